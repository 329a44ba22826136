"""A discrete-event simulation of a sync round: phases, messages along the chain, a slow or a dying replica.

As in a real round: the same messages in the same order, as many in flight, relays that verify a message before they
forward it, links shared by the messages on them, and one phase after the other with a call to all participants. If a
replica dies before COMMIT, the round is given up. The others repeat it in a new epoch when the lease of the dead
replica has expired. If it dies in COMMIT, only that replica is lost.
"""

from dataclasses import dataclass, field

from weightsync.round.phases import NAMES
from weightsync.simulate.phases import PhaseTimes, SimulatedFleet, phase_times


@dataclass(frozen=True, kw_only=True)
class ReplicaDeath:
    """A replica that dies when a phase (its name) begins, or `at` seconds after the start of the round."""

    replica: int
    at: str | float


@dataclass(frozen=True, kw_only=True)
class RoundScenario:
    """A round to simulate.

    Attributes:
        formation_s: seconds to form a new communicator.
        detect_s: seconds from a death to the first error.
        lease_s: seconds until the lease of a dead member expires.
    """

    fleet: SimulatedFleet
    death: ReplicaDeath | None = None
    formation_s: float = 0.1
    detect_s: float = 0.02
    lease_s: float = 15.0


@dataclass(kw_only=True)
class SimulatedRound:
    """The result of a simulation; times count from the start of the round.

    Attributes:
        seconds: by phase (of the attempt that succeeded) and in total.
        commits_s: end of COMMIT by replica; None for one that died.
        transfers_s: seconds by replica from the start of TRANSFER to its last byte.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    commits_s: list[float | None] = field(default_factory=list)
    transfers_s: dict[int, float] = field(default_factory=dict)
    trainer_egress_bytes: int = 0
    received_bytes: dict[int, int] = field(default_factory=dict)
    num_events: int = 0

    def add(self, times: PhaseTimes) -> None:
        """Add the events and bytes of a phase."""
        self.num_events += times.num_events
        self.trainer_egress_bytes += times.trainer_egress_bytes
        if times.received_bytes:
            self.received_bytes, self.transfers_s = times.received_bytes, times.ends_s

    @property
    def slowest_replica(self) -> int:
        """The last replica to receive its last byte."""
        return max(self.transfers_s, key=lambda replica: self.transfers_s[replica])


def simulate(scenario: RoundScenario) -> SimulatedRound:
    """Simulate a round."""
    replicas = range(scenario.fleet.replicas)
    result = SimulatedRound(commits_s=[None] * len(replicas))
    lost_s = _attempt(scenario, list(replicas), 0.0, result)
    if lost_s is not None and scenario.death is not None:
        living = [replica for replica in replicas if replica != scenario.death.replica]
        # The error, ABORT to all participants, and the dead member's lease, which counts from its death.
        again_s = lost_s + max(scenario.detect_s + scenario.fleet.speeds.rpc_s, scenario.lease_s) + scenario.formation_s
        result.attempts = 2
        result.seconds["given up"] = again_s
        if living:
            _attempt(scenario, living, again_s, result)
    return result


def _attempt(scenario: RoundScenario, living: list[int], start_s: float, result: SimulatedRound) -> float | None:
    """Simulate one attempt. Returns: when a death ended it; None: it succeeded."""
    now = start_s
    for phase in NAMES:
        death_s = _death(scenario, phase, now) if len(living) == scenario.fleet.replicas else None
        times = phase_times(scenario.fleet, phase, living, None if death_s is None else death_s - now)
        result.add(times)
        if death_s is not None and death_s <= now + times.seconds:
            if phase != "commit":
                return death_s
            living = [replica for replica in living if scenario.death is None or replica != scenario.death.replica]
        result.seconds[phase] = times.seconds
        if phase == "commit":
            for replica in living:
                result.commits_s[replica] = now + times.ends_s[replica]
        now += times.seconds
    result.seconds["total"] = now
    return None


def _death(scenario: RoundScenario, phase: str, begins_s: float) -> float | None:
    """Return when the replica dies, if it may be in this phase; None otherwise."""
    at = scenario.death.at if scenario.death is not None else None
    if isinstance(at, str):
        return begins_s if at == phase else None
    return at if at is not None and at >= begins_s else None
