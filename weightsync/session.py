"""One process's part in sync rounds: it holds a slot, keeps the epoch's communicator, and runs the phases.

| phase    | needs                 | does                                                             | state after   |
|----------|-----------------------|------------------------------------------------------------------|---------------|
| PREPARE  | -                     | plan, coverage of the engine's own parameters, communicator      | PREPARED      |
| PAUSE    | PREPARED              | nothing here (the service pauses its engine)                     | PREPARED      |
| TRANSFER | PREPARED              | sends; or receives into staging (staged) or parameters (in place)| TRANSFERRED   |
| VERIFY   | TRANSFERRED           | digests of what was installed                                    | VERIFIED      |
| COMMIT   | VERIFIED (trainer: TRANSFERRED) | copies staging into the parameters; version flips      | IDLE          |
| ABORT    | any                   | drops staging and the communicator                               | IDLE          |

A phase that was done is answered again with its report. A failed phase leaves the state where it was, except TRANSFER,
which leaves FAILED: only ABORT helps then.
"""

import threading
import time
from collections.abc import Callable, Mapping
from enum import Enum

import torch

from servicekit.errors import ConfigError, DigestMismatch, PhaseOrder
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.communicators import CommunicatorCache
from weightsync.coverage import check_coverage, zero_padding
from weightsync.layout import Layout, Parallel
from weightsync.model_spec import ModelSpec
from weightsync.participants import Participants
from weightsync.rendezvous import Lease, Rendezvous
from weightsync.round_plan import RoundPlan, plan_round, source_layout
from weightsync.sglang_layout import sglang_layout
from weightsync.tensors import poison_tensors, tensor_checksums
from weightsync.transports.collective import Transfer, TransferStats, verify_installed
from weightsync.transports.communicator import Communicator
from weightsync.transports.packing import Packer

MIB = 2**20

log = get_logger(__name__)


class _State(Enum):
    IDLE = "idle"
    PREPARED = "prepared"
    TRANSFERRED = "transferred"
    VERIFIED = "verified"
    FAILED = "failed"


class SyncMember:
    """A rank of the trainer or of a rollout replica, in its weight group.

    Args:
        slot: "trainer/<rank>" or "<replica>/<tp rank>".
        parallel: sizes of this process's own side.
        tensors: parameters (and persistent buffers) by engine name: the memory that is read or written.
        group: rendezvous group in Redis.
        host: address that the other ranks reach this process at.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        slot: str,
        parallel: Parallel,
        tensors: Mapping[str, torch.Tensor],
        redis_url: str,
        group: str,
        host: str = "127.0.0.1",
        lease_ttl_s: float = 15.0,
    ) -> None:
        self._spec = spec
        self._slot = slot
        self._role, _, rank = slot.rpartition("/")
        self._rank = int(rank)
        self._parallel = parallel
        self._tensors = tensors
        self._lease = Lease(Rendezvous(redis_url, group), slot, lease_ttl_s)
        self._communicators = CommunicatorCache(self._lease, host, next(iter(tensors.values())).device)
        self._lock = threading.Lock()
        self._layout = self._own_layout()
        self._state = _State.IDLE
        self._round_id = ""
        self._plan: RoundPlan | None = None
        self._participants: Participants | None = None
        self._comm: Communicator | None = None
        self._comm_rank = 0
        self._done: dict[tuple[str, int], pb.PhaseReport] = {}
        self._target: Mapping[str, torch.Tensor] = tensors
        self._stats = TransferStats()

    def start(self) -> None:
        """Takes the slot and keeps its lease alive."""
        self._lease.start()

    def close(self) -> None:
        """Closes the communicator, then leaves the group."""
        self._communicators.close()
        self._lease.close()

    def checksums(self) -> dict[str, str]:
        """ "dtype:shape:xxh3-128" of every tensor, padding included, by engine name."""
        return tensor_checksums(self._tensors)

    def poison(self) -> int:
        """Fills every tensor with NaN (tests of coverage). Returns: the number of tensors."""
        return poison_tensors(self._tensors)

    def run_phase(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> pb.PhaseReport:
        """Runs one phase; blocks until it is done, at most the round's deadlines.

        Raises: a TandemError, by the table in the module's docstring; Evicted: another process has the slot.
        """
        with self._lock:
            done = self._done.get((round_.round_id, phase))
            if done is not None:
                return done
            self._lease.check()
            start = time.monotonic()
            report = self._run(phase, round_)
            name = pb.RoundPhase.Name(phase).removeprefix("ROUND_PHASE_").lower()
            report.seconds.setdefault(name, time.monotonic() - start)
            report.plan_digest = self._plan.digest if self._plan is not None else ""
            report.policy_version = round_.policy_version
            self._done[(round_.round_id, phase)] = report
            return report

    def _run(self, phase: int, round_: pb.Round) -> pb.PhaseReport:
        handlers: dict[int, Callable[[pb.Round], pb.PhaseReport]] = {
            pb.ROUND_PHASE_PREPARE: self._prepare,
            pb.ROUND_PHASE_PAUSE: self._pause,
            pb.ROUND_PHASE_TRANSFER: self._transfer,
            pb.ROUND_PHASE_VERIFY: self._verify,
            pb.ROUND_PHASE_COMMIT: self._commit,
            pb.ROUND_PHASE_ABORT: self._abort,
        }
        if phase not in handlers:
            raise PhaseOrder(f"{self._slot}: {phase} is no phase of a round")
        if phase not in (pb.ROUND_PHASE_PREPARE, pb.ROUND_PHASE_ABORT) and round_.round_id != self._round_id:
            raise PhaseOrder(f"{self._slot}: round {round_.round_id} was not prepared here")
        return handlers[phase](round_)

    # ---- phases ----

    def _prepare(self, round_: pb.Round) -> pb.PhaseReport:
        if self._state is not _State.IDLE and round_.round_id != self._round_id:
            # Its coordinator is gone: it would have ended the round before it began another.
            log.warning("round superseded", slot=self._slot, old=self._round_id, state=self._state.value)
            self._communicators.drop()
            self._end_round()
        started = time.monotonic()
        participants = Participants.of_round(round_)
        rank = self._communicator_rank(participants)
        plan = plan_round(
            self._spec,
            participants.trainer,
            tuple(participants.chains()),
            max(1, round_.bucket_bytes // self._dtype_bytes()),
        )
        check_coverage(self._layout, self._rank, self._tensors, self._slot)
        planned = time.monotonic()
        self._comm = self._communicators.get(round_, participants, rank)
        self._plan, self._participants, self._comm_rank = plan, participants, rank
        self._round_id, self._state = round_.round_id, _State.PREPARED
        self._done.clear()
        report = pb.PhaseReport(shard_bytes=self._shard_bytes())
        report.seconds["prepare"] = planned - started
        report.seconds["rendezvous"] = time.monotonic() - planned
        return report

    def _pause(self, round_: pb.Round) -> pb.PhaseReport:
        self._require(_State.PREPARED)
        return pb.PhaseReport()

    def _transfer(self, round_: pb.Round) -> pb.PhaseReport:
        self._require(_State.PREPARED)
        self._state = _State.FAILED  # until the last byte is there
        plan, participants, communicator = self._prepared()
        hops = plan.hops_of(self._comm_rank, participants)
        if self._is_receiver:
            self._target = self._staging() if round_.install_mode == pb.INSTALL_MODE_STAGED else self._tensors
        transfer = Transfer(
            communicator=communicator,
            hops=hops,
            packer=Packer(self._layout, self._target, "dst" if self._is_receiver else "src"),
            plan_digest=plan.digest,
            policy_version=round_.policy_version,
            timeout_s=round_.transfer_timeout_s,
        )
        self._stats = transfer.run()
        if self._is_receiver:
            zero_padding(self._layout, self._rank, self._target)
        self._state = _State.TRANSFERRED
        return self._transfer_report(self._stats)

    def _verify(self, round_: pb.Round) -> pb.PhaseReport:
        self._require(_State.TRANSFERRED)
        plan, _, _ = self._prepared()
        if self._is_receiver:
            mine = [m for m in plan.messages[self._parallel] if m.dst == self._rank]
            wrong = verify_installed(mine, self._stats.digests, Packer(self._layout, self._target, "dst"))
            if wrong:
                message = wrong[0][0]
                names = sorted({self._layout.params[p] for p in message.ops["dst_param"]})
                raise DigestMismatch(
                    f"{self._slot}: {len(wrong)} of {len(mine)} messages differ from what the trainer sent; "
                    f"the first, {message.sequence}, holds {', '.join(names[:3])}"
                )
        self._state = _State.VERIFIED
        return pb.PhaseReport(shard_bytes=self._shard_bytes())

    def _commit(self, round_: pb.Round) -> pb.PhaseReport:
        self._require(_State.VERIFIED, *([] if self._is_receiver else [_State.TRANSFERRED]))
        start = time.monotonic()
        if self._target is not self._tensors:
            for name, staged in self._target.items():
                self._tensors[name].detach().copy_(staged)
        self._end_round()
        report = pb.PhaseReport()
        report.seconds["install"] = time.monotonic() - start
        return report

    def _abort(self, round_: pb.Round) -> pb.PhaseReport:
        # Everyone drops its communicator, also who had no trouble: the next round builds a new one together.
        self._communicators.drop()
        if self._round_id == round_.round_id:
            self._end_round()
        return pb.PhaseReport()

    # ---- helpers ----

    @property
    def _is_receiver(self) -> bool:
        return self._role != "trainer"

    def _own_layout(self) -> Layout:
        if self._is_receiver:
            return sglang_layout(self._spec, self._parallel)
        return source_layout(self._spec, self._parallel)

    def _end_round(self) -> None:
        """Back to idle; reports of this round stay, so that a repeated COMMIT is answered."""
        self._state = _State.IDLE
        self._target = self._tensors
        self._stats = TransferStats()

    def _communicator_rank(self, participants: Participants) -> int:
        if self._slot not in participants.slots:
            raise ConfigError(f"{self._slot} has no part in the round: {', '.join(participants.slots)}")
        expected = participants.replicas[self._role] if self._is_receiver else participants.trainer
        if expected != self._parallel:
            raise ConfigError(f"{self._slot}: the round says {expected}, this process has {self._parallel}")
        return participants.slots.index(self._slot)

    def _dtype_bytes(self) -> int:
        return int(next(iter(self._tensors.values())).dtype.itemsize)

    def _shard_bytes(self) -> int:
        return self._layout.elements_of(self._rank) * self._dtype_bytes()

    def _prepared(self) -> tuple[RoundPlan, Participants, Communicator]:
        if self._plan is None or self._participants is None or self._comm is None:
            raise PhaseOrder(f"{self._slot}: no round is prepared")
        return self._plan, self._participants, self._comm

    def _require(self, *states: _State) -> None:
        if self._state not in states:
            wanted = " or ".join(state.value for state in states)
            raise PhaseOrder(f"{self._slot}: the round is {self._state.value}, it must be {wanted}")

    def _staging(self) -> dict[str, torch.Tensor]:
        return {name: torch.empty_like(tensor.detach()) for name, tensor in self._tensors.items()}

    def _transfer_report(self, stats: TransferStats) -> pb.PhaseReport:
        report = pb.PhaseReport(
            bytes_sent=stats.bytes_sent,
            bytes_received=stats.bytes_received,
            shard_bytes=self._shard_bytes(),
            num_messages=stats.num_messages,
            staging_bytes=stats.staging_bytes,
        )
        report.seconds["transfer"] = stats.seconds
        return report
