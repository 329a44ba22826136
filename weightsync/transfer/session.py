"""One rank's part in rounds: it holds a slot, and runs the phases of one round at a time on its shard.

weightsync/round decides which phase may follow which, and how a repeated one is answered (phases.py, guard.py);
transfer.py does the work of a phase. A coordinator that was replaced is refused in every phase.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from servicekit.errors import PhaseOrder
from servicekit.logs import get_logger
from servicekit.rpc.fence import FenceGuard
from tandem_api.common.v1 import common_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.layouts.layout import Parallel
from weightsync.membership.rendezvous import Rendezvous, SlotLease
from weightsync.model.spec import ModelSpec
from weightsync.round.guard import OpenRound, PhaseGuard
from weightsync.round.phases import ABORT, COMMIT, PREPARE, Phase, Role, name_of
from weightsync.transfer.communicators.cache import CommunicatorCache
from weightsync.transfer.devices import on_device
from weightsync.transfer.facts import own_facts
from weightsync.transfer.shard import OwnShard
from weightsync.transfer.transfer import Transfer

log = get_logger(__name__)


class SyncMember:
    """A rank of the trainer or of a rollout replica, in its weight group.

    Args:
        spec, slot, parallel, tensors: see OwnShard.
        group: rendezvous group in Redis.
        host: address at which the other ranks reach this process.
        on_lost: called once, from a thread, with the reason, when another process has taken the slot for good.
        disk_folder: where the transport disk may write and read; None: nowhere.
        expose_memory: the transport colocated may hand out the tensors' own memory, which must stay where it is then,
            from round to round; false: it hands out copies.
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
        disk_folder: Path | None = None,
        expose_memory: bool = True,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._slot = slot
        self._shard = shard = OwnShard(spec=spec, slot=slot, parallel=parallel, tensors=tensors)
        facts = json.dumps(own_facts(shard.device))
        self._lease = SlotLease(Rendezvous(redis_url, group), slot, lease_ttl_s, facts, on_lost)
        self._transfer = Transfer(
            shard, CommunicatorCache(self._lease, host, shard.device), disk_folder, expose_memory=expose_memory
        )
        self._guard = PhaseGuard[OpenRound, pb.PhaseReport](
            lambda opened: OpenRound(message=opened, role=Role.SENDER if shard.sends(opened) else Role.RANK),
            f"{slot}: ",
        )
        self._fence = FenceGuard(lambda: self._lease.rendezvous.leader())
        self._lock = threading.Lock()

    def start(self) -> None:
        """Take the slot and keep its lease alive."""
        self._lease.start()

    def close(self) -> None:
        """Close the communicator, then leave the group."""
        self._transfer.close()
        self._lease.close()

    def checksums(self) -> dict[str, str]:
        """Return "dtype:shape:xxh3-128" of every tensor, padding included, by engine name."""
        return self._shard.checksums()

    def poison(self) -> int:
        """Fill every tensor with NaN (tests of coverage). Returns: the number of tensors."""
        return self._shard.poison()

    def load_published(
        self, folder: Path, *, at_least: int, round_id: str = "", fence: common_pb2.CoordinatorFence | None = None
    ) -> int:
        """Fill the parameters from the newest version in a folder of the disk transport, and check them.

        For late joiners and cold starts.

        Args:
            at_least: oldest policy version that is accepted.
            round_id: the round that must have published it; "" for any.
            fence: of the coordinator that asks; None: the caller is not a coordinator.
        Returns: the policy version.
        Raises: Fenced: the coordinator was replaced; PhaseOrder: a round is open; NotReady: nothing is published, or
            by another round; StaleVersion: it is older than at_least; DigestMismatch: a file is torn.
        """
        with self._lock, on_device(self._shard.device):
            self._fence.admit(fence or common_pb2.CoordinatorFence())
            if self._guard.current is not None:
                raise PhaseOrder(f"{self._slot}: round {self._guard.current.message.round_id} is under way")
            return self._transfer.load_published(folder, at_least=at_least, round_id=round_id)

    def run_phase(self, phase: Phase, round_: pb.Round) -> pb.PhaseReport:
        """Run one phase; blocks until it is done, at most the round's deadlines.

        Raises: a TandemError, by the rules of the guard or from the transfer; Fenced: its coordinator was replaced;
            Evicted: another process has the slot.
        """
        self._fence.admit(round_.fence)
        if phase == ABORT:
            self.interrupt(round_.round_id)  # a transfer that waits for a lost peer holds the lock
        with self._lock, on_device(self._shard.device):
            self._fence.admit(round_.fence)  # it may have waited behind the phase of a newer one
            answered = self._guard.answer(phase, round_)
            if answered is not None:
                return answered
            if phase != ABORT:  # an evicted rank must not act, but it must be able to give up
                self._lease.check()
            start = time.monotonic()
            report = self._abort(round_) if phase == ABORT else self._advance(phase, round_)
            report.seconds.setdefault(name_of(phase), time.monotonic() - start)
            report.policy_version = round_.policy_version
            self._transfer.describe(report)
            self._guard.answered(phase, round_, report)
            return report

    def interrupt(self, round_id: str) -> None:
        """End the waits of a phase of this round, from any thread; nothing if the round is not under way.

        Abort the round afterwards.
        """
        self._transfer.interrupt(round_id)

    def _advance(self, phase: Phase, round_: pb.Round) -> pb.PhaseReport:
        if phase == PREPARE and (older := self._guard.superseded_by(round_)) is not None:
            done = [*map(name_of, older.done)]
            log.warning("round superseded", slot=self._slot, old=older.message.round_id, done=done)
            self._abort(older.message)
        with self._guard.running(phase, round_) as current:
            report = self._transfer.run(phase, current.message)
            if phase == COMMIT:
                self._guard.close(round_)
            return report

    def _abort(self, round_: pb.Round) -> pb.PhaseReport:
        if self._guard.is_open(round_):
            self._transfer.give_up()
        self._guard.close(round_)
        return pb.PhaseReport()
