"""A fleet for tests of weight sync: real SyncMembers over real Redis and gloo, with plain tensor stores, in threads."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.stores import canonical_tensors, cut, empty_like_rank
from weightsync.group.rendezvous import Rendezvous
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec
from weightsync.plans.participants import Participants
from weightsync.round.phases import ROUND, TRANSFER, Role
from weightsync.transfer.session import SyncMember

GROUP = "tandem:test"


@dataclass
class Fleet:
    """Members by slot, in communicator order."""

    redis_url: str
    spec: ModelSpec
    trainer: Parallel
    replicas: dict[str, Parallel]
    full: dict[str, torch.Tensor] = field(default_factory=dict)
    members: dict[str, SyncMember] = field(default_factory=dict)
    stores: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    _sizes: dict[str, Parallel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.full = canonical_tensors(self.spec)
        layout = megatron_layout(self.spec, self.trainer)
        for rank in range(self.trainer.world_size):
            self._add(f"trainer/{rank}", self.trainer, cut(layout, rank, self.full))
        for name, parallel in self.replicas.items():
            target = sglang_layout(self.spec, parallel)
            for rank in range(parallel.world_size):
                self._add(f"{name}/{rank}", parallel, empty_like_rank(target, rank))

    def _add(self, slot: str, parallel: Parallel, tensors: dict[str, torch.Tensor]) -> None:
        self._sizes[slot] = parallel
        self.stores[slot] = tensors
        self.members[slot] = SyncMember(
            spec=self.spec,
            slot=slot,
            parallel=parallel,
            tensors=tensors,
            redis_url=self.redis_url,
            group=GROUP,
            disk_folder=Path(tempfile.gettempdir()),
        )
        self.members[slot].start()

    def replace(self, slot: str, tensors: dict[str, torch.Tensor]) -> None:
        """A new incarnation of a slot, with these tensors."""
        self.members.pop(slot).close()
        self._add(slot, self._sizes[slot], tensors)

    def round(self, version: int, **changes: object) -> pb.Round:
        """A round over everybody in the current epoch."""
        round_ = pb.Round(
            round_id=f"round-{version}",
            policy_version=version,
            group=GROUP,
            epoch=Rendezvous(self.redis_url, GROUP).snapshot().epoch,
            trainer=self.trainer.to_proto(),
            replicas=[pb.ReplicaSpec(name=name, parallel=p.to_proto()) for name, p in self.replicas.items()],
            install_mode=pb.INSTALL_MODE_IN_PLACE,
            bucket_bytes=4096,
            formation_timeout_s=10,
            transfer_timeout_s=10,
        )
        round_.MergeFrom(pb.Round(**changes))  # type: ignore[arg-type]
        return round_

    def run(self, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> dict[str, pb.PhaseReport | Exception]:
        """One phase on every participant at once."""
        slots = [slot for slot in Participants.of_round(round_).slots if slot in self.members]
        return self.run_each(phase, dict.fromkeys(slots, round_))

    def run_each(
        self, phase: pb.RoundPhase.ValueType, rounds: dict[str, pb.Round]
    ) -> dict[str, pb.PhaseReport | Exception]:
        """One phase, with each slot's own idea of the round."""
        with ThreadPoolExecutor(len(rounds)) as pool:
            futures = {slot: pool.submit(self.members[slot].run_phase, phase, own) for slot, own in rounds.items()}
        return {slot: future.exception() or future.result() for slot, future in futures.items()}  # type: ignore[misc]

    def sync(self, round_: pb.Round) -> dict[str, pb.PhaseReport]:
        """A whole round. Returns: the reports of TRANSFER."""
        reports = {}
        for rule in (each for each in ROUND if Role.RANK in each.roles):
            outcome = self.run(rule.phase, round_)
            for result in outcome.values():
                if isinstance(result, Exception):
                    raise result
            if rule.phase == TRANSFER:
                reports = outcome
        return reports  # type: ignore[return-value]

    def expected(self, slot: str) -> dict[str, torch.Tensor]:
        """What a rollout slot must hold after a round."""
        name, _, rank = slot.rpartition("/")
        return cut(sglang_layout(self.spec, self.replicas[name]), int(rank), self.full)

    def close(self) -> None:
        for member in self.members.values():
            member.close()
