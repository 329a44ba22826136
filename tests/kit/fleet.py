"""Members of a weight group without engines: plain tensors, real Redis and gloo; in threads, or as processes.

A fleet's rounds may have other participants, its services: a real trainer, or real replicas.
"""

import multiprocessing
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from servicekit.errors import TandemError
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.processes import fork_server
from tests.kit.round import RunPhase, new_round, outcomes, run_round
from tests.kit.stores import Tensors, canonical_tensors, cut, empty_like_rank
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.membership.rendezvous import Rendezvous
from weightsync.model.spec import ModelSpec
from weightsync.plans.participants import Participants
from weightsync.round.phases import TRANSFER, Phase
from weightsync.transfer.hf_files import load_shards
from weightsync.transfer.session import SyncMember

GROUP = "tandem:test"
ANSWER_S = 60.0
_ERROR = b"!error "

_fork_server = fork_server("tests.kit.fleet")


def own_tensors(spec: ModelSpec, slot: str, parallel: Parallel, weights: Tensors | None = None) -> Tensors:
    """Make a trainer rank's shard of the weights (by default random ones), or a rollout rank's empty tensors."""
    role, _, rank = slot.rpartition("/")
    if role == "trainer":
        return cut(megatron_layout(spec, parallel), int(rank), weights or canonical_tensors(spec))
    return empty_like_rank(sglang_layout(spec, parallel), int(rank))


class MemberProcess:
    """One rank as a process of its own, which ends with close()."""

    def __init__(self, slot: str, **settings: Any) -> None:
        self.slot = slot
        self._pipe, theirs = multiprocessing.Pipe()
        self._process: ForkServerProcess = _fork_server.Process(
            target=_serve, args=(theirs, slot, settings), name=slot, daemon=True
        )
        self._process.start()

    def wait_up(self) -> None:
        """Wait until the rank has its slot."""
        self._answer()

    def begin(self, phase: Phase, round_: pb.Round) -> None:
        """Start a phase; end() waits for it."""
        self._pipe.send_bytes(pb.RunPhaseRequest(phase=phase, round=round_).SerializeToString())

    def end(self) -> pb.PhaseReport:
        """Wait for the phase that was begun. Returns: its report. Raises: RuntimeError: the rank's error."""
        answer = self._answer()
        if answer.startswith(_ERROR):
            raise RuntimeError(answer.removeprefix(_ERROR).decode())
        return pb.PhaseReport.FromString(answer)

    def run_phase(self, phase: Phase, round_: pb.Round) -> pb.PhaseReport:
        """Run a phase: begin() and end()."""
        self.begin(phase, round_)
        return self.end()

    def kill(self) -> None:
        """Send SIGKILL, without waiting for the end."""
        self._process.kill()

    def written_bytes(self) -> int:
        """Return the bytes that the process has written so far, to sockets too, as the kernel counts them."""
        lines = Path(f"/proc/{self._process.pid}/io").read_text(encoding="ascii").splitlines()
        return int(dict(line.split(": ") for line in lines)["wchar"])

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self._process.kill()
        self._process.join(timeout=10)

    def _answer(self) -> bytes:
        if not self._pipe.poll(ANSWER_S):
            raise RuntimeError(f"{self.slot} did not answer within {ANSWER_S:g} s")
        return self._pipe.recv_bytes()


def _serve(pipe: Connection, slot: str, settings: dict[str, Any]) -> None:
    """Run a rank's process. settings: spec, parallel, redis_url, group."""
    torch.set_num_threads(1)
    member = SyncMember(slot=slot, tensors=own_tensors(settings["spec"], slot, settings["parallel"]), **settings)
    member.start()
    pipe.send_bytes(b"up")
    while True:
        request = pb.RunPhaseRequest.FromString(pipe.recv_bytes())
        try:
            report = member.run_phase(request.phase, request.round)
        except TandemError as error:
            pipe.send_bytes(_ERROR + f"{error.reason}: {error}".encode())
        else:
            pipe.send_bytes(report.SerializeToString())


M = TypeVar("M", SyncMember, MemberProcess)


class _Members(Generic[M]):
    """Members by slot, in communicator order, and the rounds that they take part in; around a `with` block.

    Args:
        services: participants that are not members of this fleet, by name; "trainer" for the trainer.
        options: further arguments of the members.
    """

    def __init__(
        self,
        redis_url: str,
        spec: ModelSpec,
        trainer: Parallel,
        replicas: dict[str, Parallel],
        *,
        group: str = GROUP,
        services: Mapping[str, RunPhase] | None = None,
        **options: Any,
    ) -> None:
        self.redis_url, self.spec, self.trainer, self.replicas = redis_url, spec, trainer, replicas
        self.group = Rendezvous(redis_url, group)
        self.services = dict(services or {})
        self.members: dict[str, M] = {}
        self._common = {"spec": spec, "redis_url": redis_url, "group": group, **options}
        self._sizes = {
            f"{name}/{rank}": parallel
            for name, parallel in {"trainer": trainer, **replicas}.items()
            if name not in self.services
            for rank in range(parallel.world_size)
        }

    def _open(self) -> None:
        try:
            for slot in self._sizes:
                self.members[slot] = self._member(slot, self._sizes[slot])
            for member in self.members.values():
                self._begin(member)
        except BaseException:
            self.close()
            raise

    def _member(self, slot: str, parallel: Parallel) -> M:
        raise NotImplementedError

    def _begin(self, member: M) -> None:
        raise NotImplementedError

    def renew(self, slot: str) -> None:
        """Replace the member of a slot by a new one."""
        self.members.pop(slot).close()
        self.members[slot] = self._member(slot, self._sizes[slot])
        self._begin(self.members[slot])

    def round(self, version: int, **changes: Any) -> pb.Round:
        """Make a round of all participants, or of the replicas in `changes`, in the current epoch."""
        trainer, replicas = changes.pop("trainer", self.trainer), changes.pop("replicas", self.replicas)
        ours: dict[str, Any] = {
            "round_id": f"round-{version}",
            "bucket_bytes": 4096,
            "formation_timeout_s": 10.0,
            "transfer_timeout_s": 10.0,
        }
        return new_round(self.group, version, trainer, replicas, **ours | changes)

    @property
    def participants(self) -> dict[str, RunPhase]:
        """The services, then the members: a service's error is the one that a user would read."""
        return {**self.services, **{slot: member.run_phase for slot, member in self.members.items()}}

    def run(self, phase: Phase, round_: pb.Round) -> dict[str, Any]:
        """Run one phase on all participants of the round concurrently. Returns: reports, or errors."""
        names = {*self.services, *Participants.of_round(round_).slots}
        return outcomes({name: run for name, run in self.participants.items() if name in names}, phase, round_)

    def run_each(self, phase: Phase, rounds: dict[str, pb.Round]) -> dict[str, Any]:
        """Run one phase on some slots, each with its own round message."""
        return outcomes({slot: self.participants[slot] for slot in rounds}, phase, rounds)

    def sync(self, round_: pb.Round) -> dict[str, Any]:
        """Run a whole round. Returns: the reports of TRANSFER."""
        return run_round(self.participants, round_)[TRANSFER]

    def close(self) -> None:
        for member in self.members.values():
            member.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fleet(_Members[SyncMember]):
    """Members in threads of the test's own process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"disk_folder": Path(tempfile.gettempdir()), **options})
        full = self.full = canonical_tensors(self.spec)
        self.stores = {slot: own_tensors(self.spec, slot, size, full) for slot, size in self._sizes.items()}
        self._open()

    def _member(self, slot: str, parallel: Parallel) -> SyncMember:
        return SyncMember(slot=slot, parallel=parallel, tensors=self.stores[slot], **self._common)

    def _begin(self, member: SyncMember) -> None:
        member.start()

    def replace(self, slot: str, tensors: Tensors) -> None:
        """Replace the member of a slot by a new one with these tensors."""
        self.stores[slot] = tensors
        self.renew(slot)

    def load(self, folder: Path) -> None:
        """Load the weights of a Hugging Face folder into the trainer ranks."""
        layout = megatron_layout(self.spec, self.trainer)
        for rank in range(self.trainer.world_size):
            load_shards(folder, self.spec, layout, rank, self.stores[f"trainer/{rank}"])

    def expected(self, slot: str) -> Tensors:
        """Return what a rollout slot must hold after a round."""
        name, _, rank = slot.rpartition("/")
        return cut(sglang_layout(self.spec, self.replicas[name]), int(rank), self.full)


class ProcessFleet(_Members[MemberProcess]):
    """Members as processes."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._open()

    def _member(self, slot: str, parallel: Parallel) -> MemberProcess:
        return MemberProcess(slot, parallel=parallel, **self._common)

    def _begin(self, member: MemberProcess) -> None:
        member.wait_up()
