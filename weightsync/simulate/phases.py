"""Simulates each phase of a round."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from weightsync.plans.cost import MessageSizes, Speeds
from weightsync.plans.messages import Message
from weightsync.plans.plan import TransferPlan
from weightsync.round.phases import ROUND
from weightsync.simulate.clock import Clock, Machine, SimulatedLink
from weightsync.simulate.ranks import Rank, Walk, Weights, hops_by_rank

_IN_CALL_BEFORE = frozenset(rule.name for rule in ROUND if rule.in_call_before)


@dataclass(frozen=True, kw_only=True)
class SlowReplica:
    """A replica whose links and cores are `factor` times slower."""

    replica: int
    factor: float


@dataclass(frozen=True, kw_only=True)
class SimulatedFleet:
    """Plan, replicas and machines of a simulation.

    Attributes:
        slow: replicas that are slower than `speeds`.
        staged: COMMIT copies the shard.
        prepare_s: seconds of PREPARE (planning, coverage) beyond the call.
        pause_s: seconds of PAUSE (draining) beyond the call.
        device: of the parameters, "cpu" or "cuda".
    """

    plan: TransferPlan
    messages: Sequence[Message]
    dtype_bytes: int
    replicas: int
    speeds: Speeds
    slow: tuple[SlowReplica, ...] = ()
    staged: bool = False
    prepare_s: float = 0.0
    pause_s: float = 0.0
    device: str = "cuda"

    @cached_property
    def sizes(self) -> MessageSizes:
        """The sizes of all messages."""
        return MessageSizes.of(self.plan, self.messages, self.dtype_bytes, self.device)

    def speed_of(self, replica: int) -> float:
        """Return a replica's speed relative to `speeds`."""
        return 1 / max((slow.factor for slow in self.slow if slow.replica == replica), default=1.0)


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Seconds of a phase; when each replica had finished it, from its start; bytes that TRANSFER moved."""

    seconds: float
    ends_s: dict[int, float]
    num_events: int = 0
    trainer_egress_bytes: int = 0
    received_bytes: dict[int, int] = field(default_factory=dict)


def phase_times(fleet: SimulatedFleet, phase: str, replicas: Sequence[int], until_s: float | None) -> PhaseTimes:
    """Simulate one phase with its calls.

    Args:
        replicas: numbers of the replicas that take part.
        until_s: seconds after which TRANSFER is broken off; None: it is not.
    """
    if phase == "transfer":
        return _transfer(fleet, replicas, float("inf") if until_s is None else until_s)
    if phase in ("verify", "commit"):
        return _local_work(fleet, phase, replicas)
    seconds = _call_s(fleet, phase) + {"prepare": fleet.prepare_s, "pause": fleet.pause_s}[phase]
    return PhaseTimes(seconds=seconds, ends_s=dict.fromkeys(replicas, seconds))


def _call_s(fleet: SimulatedFleet, phase: str) -> float:
    return 0.0 if phase in _IN_CALL_BEFORE else fleet.speeds.rpc_s


def _transfer(fleet: SimulatedFleet, replicas: Sequence[int], until_s: float) -> PhaseTimes:
    clock = Clock()
    speeds, trainers, width = fleet.speeds, fleet.plan.source.num_ranks, fleet.plan.target.num_ranks
    ranks = [_rank(speeds.trainer_link, 1.0) for _ in range(trainers)]
    for replica in replicas:
        ranks += [_rank(speeds.rollout_link, fleet.speed_of(replica)) for _ in range(width)]
    machine, weights = Machine(clock, speeds.cores), Weights.of(fleet.sizes, speeds)
    walk = Walk(clock=clock, machine=machine, speeds=speeds, ranks=ranks, weights=weights)
    for rank, hops in enumerate(hops_by_rank(fleet.messages, trainers, width, len(replicas))):
        clock.after(speeds.rpc_s, partial(walk.start, rank, hops))
    clock.run(until_s)
    ends = [clock.now if rank.finished_s is None else rank.finished_s for rank in ranks]
    first = {replica: trainers + place * width for place, replica in enumerate(replicas)}
    return PhaseTimes(
        seconds=max(ends),
        ends_s={replica: max(ends[begin : begin + width]) for replica, begin in first.items()},
        num_events=clock.num_events,
        trainer_egress_bytes=sum(rank.sent_bytes for rank in ranks[:trainers]),
        received_bytes={
            replica: sum(rank.received_bytes for rank in ranks[begin : begin + width])
            for replica, begin in first.items()
        },
    )


def _local_work(fleet: SimulatedFleet, phase: str, replicas: Sequence[int]) -> PhaseTimes:
    """Simulate VERIFY, which packs and digests every message again, or COMMIT, which copies staged weights."""
    clock = Clock()
    machine = Machine(clock, fleet.speeds.cores)
    per_message = fleet.sizes.verify_s(fleet.speeds)
    if phase == "commit":
        per_message = fleet.sizes.num_bytes / fleet.speeds.copy * fleet.staged
    ends = dict.fromkeys(replicas, 0.0)

    def ended(replica: int) -> None:
        ends[replica] = clock.now

    for replica in replicas:
        for seconds in np.bincount(fleet.sizes.dst, per_message, fleet.plan.target.num_ranks).tolist():
            machine.compute(seconds, partial(ended, replica), fleet.speed_of(replica))
    clock.run()
    ends = {replica: seconds + _call_s(fleet, phase) for replica, seconds in ends.items()}
    return PhaseTimes(seconds=max(ends.values()), ends_s=ends, num_events=clock.num_events)


def _rank(link: float, speed: float) -> Rank:
    return Rank(out=SimulatedLink(link * speed), into=SimulatedLink(link * speed), speed=speed)
