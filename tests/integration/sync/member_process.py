"""Members of a weight group as processes of their own, without engines: plain tensors, real session code."""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from servicekit.errors import TandemError
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

ANSWER_S = 60.0
_ERROR = b"!error "

_fork_server = multiprocessing.get_context("forkserver")
_fork_server.set_forkserver_preload(["torch", "weightsync.transfer.session", "tests.kit.stores"])


class MemberProcess:
    """One rank. Its process ends with close()."""

    def __init__(self, slot: str, **settings: Any) -> None:
        self.slot = slot
        self._pipe, theirs = multiprocessing.Pipe()
        self._process: ForkServerProcess = _fork_server.Process(
            target=_serve, args=(theirs, slot, settings), name=slot, daemon=True
        )
        self._process.start()

    def wait_up(self) -> None:
        """Returns once the rank has its slot."""
        self._answer()

    def begin(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> None:
        """Starts a phase; end() waits for it."""
        self._pipe.send_bytes(pb.RunPhaseRequest(phase=phase, round=round_).SerializeToString())

    def end(self) -> pb.PhaseReport:
        """The report of the phase that was begun. Raises: RuntimeError: the rank's error."""
        answer = self._answer()
        if answer.startswith(_ERROR):
            raise RuntimeError(answer.removeprefix(_ERROR).decode())
        return pb.PhaseReport.FromString(answer)

    def kill(self) -> None:
        """SIGKILL; returns at once."""
        self._process.kill()

    def written_bytes(self) -> int:
        """Bytes that the whole process has written so far, to sockets too, as the kernel counts them."""
        lines = Path(f"/proc/{self._process.pid}/io").read_text(encoding="ascii").splitlines()
        return int(dict(line.split(": ") for line in lines)["wchar"])

    def close(self) -> None:
        self._process.kill()
        self._process.join(timeout=10)

    def _answer(self) -> bytes:
        if not self._pipe.poll(ANSWER_S):
            raise RuntimeError(f"{self.slot} did not answer within {ANSWER_S:g} s")
        return self._pipe.recv_bytes()


def run_phase(
    members: Sequence[MemberProcess], phase: pb.RoundPhase.ValueType, round_: pb.Round
) -> dict[str, pb.PhaseReport]:
    """One phase on all of them at once: the reports by slot."""
    for member in members:
        member.begin(phase, round_)
    return {member.slot: member.end() for member in members}


def _serve(pipe: Connection, slot: str, settings: dict[str, Any]) -> None:
    """A rank's life. settings: spec, parallel, redis_url, group."""
    # Imported in the process that it is for.
    import torch

    from tests.kit.stores import canonical_tensors, cut, empty_like_rank
    from weightsync.layouts.megatron import megatron_layout
    from weightsync.layouts.sglang import sglang_layout
    from weightsync.transfer.session import SyncMember

    torch.set_num_threads(1)
    spec: ModelSpec = settings["spec"]
    parallel: Parallel = settings["parallel"]
    role, _, rank = slot.rpartition("/")
    if role == "trainer":
        tensors = cut(megatron_layout(spec, parallel), int(rank), canonical_tensors(spec))
    else:
        tensors = empty_like_rank(sglang_layout(spec, parallel), int(rank))
    member = SyncMember(
        spec=spec,
        slot=slot,
        parallel=parallel,
        tensors=tensors,
        redis_url=settings["redis_url"],
        group=settings["group"],
    )
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
