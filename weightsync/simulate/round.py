"""A discrete-event simulation of a sync round: phases, messages along the chain, a slow or a dying replica.

What it keeps of the real round: the real messages in their real order, as many under way as there, a relay that waits
for what it passes on, links shared by the messages on them, one phase after the other with a call to everybody. A
replica that dies before COMMIT costs the round: it is given up, and the others run it again in a new epoch, once the
lease of the dead one is over. One that dies in COMMIT costs only itself.
"""

from dataclasses import dataclass, field

from weightsync.round.phases import NAMES
from weightsync.simulate.phases import PhaseTimes, SimulatedFleet, phase_times


@dataclass(frozen=True, kw_only=True)
class ReplicaDeath:
    """A replica that dies when a phase (its name) begins, or so many seconds after the round began."""

    replica: int
    at: str | float


@dataclass(frozen=True, kw_only=True)
class RoundScenario:
    """What is simulated.

    formation_s: a new communicator. detect_s: from a death to the first error. lease_s: until a dead member is out.
    """

    stage: SimulatedFleet
    dies: ReplicaDeath | None = None
    formation_s: float = 0.1
    detect_s: float = 0.02
    lease_s: float = 15.0


@dataclass(kw_only=True)
class SimulatedRound:
    """Seconds by phase (of the attempt that went through) and in total; times count from the round's beginning.

    commits_s: by replica, None for one that died. transfers_s: by replica, from the phase's beginning to its last byte.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    attempts: int = 1
    commits_s: list[float | None] = field(default_factory=list)
    transfers_s: dict[int, float] = field(default_factory=dict)
    trainer_egress_bytes: int = 0
    received_bytes: dict[int, int] = field(default_factory=dict)
    num_events: int = 0

    def add(self, took: PhaseTimes) -> None:
        """What a phase has moved."""
        self.num_events += took.num_events
        self.trainer_egress_bytes += took.trainer_egress_bytes
        if took.received_bytes:
            self.received_bytes, self.transfers_s = took.received_bytes, took.ends_s

    @property
    def slowest_replica(self) -> int:
        """The replica that got its last byte last."""
        return max(self.transfers_s, key=lambda replica: self.transfers_s[replica])


def simulate(scene: RoundScenario) -> SimulatedRound:
    """Runs a round."""
    replicas = range(scene.stage.replicas)
    result = SimulatedRound(commits_s=[None] * len(replicas))
    lost_s = _attempt(scene, list(replicas), 0.0, result)
    if lost_s is not None and scene.dies is not None:
        living = [replica for replica in replicas if replica != scene.dies.replica]
        # The error, ABORT to everybody, and the end of the dead member's lease, which is counted from its death.
        again_s = lost_s + max(scene.detect_s + scene.stage.speeds.rpc_s, scene.lease_s) + scene.formation_s
        result.attempts = 2
        result.seconds["given up"] = again_s
        if living:
            _attempt(scene, living, again_s, result)
    return result


def _attempt(scene: RoundScenario, living: list[int], start_s: float, result: SimulatedRound) -> float | None:
    """One try. Returns: when a death ended it; None: it went through."""
    now = start_s
    for phase in NAMES:
        death_s = _death(scene, phase, now) if len(living) == scene.stage.replicas else None
        took = phase_times(scene.stage, phase, living, None if death_s is None else death_s - now)
        result.add(took)
        if death_s is not None and death_s <= now + took.seconds:
            if phase != "commit":
                return death_s
            living = [replica for replica in living if scene.dies is None or replica != scene.dies.replica]
        result.seconds[phase] = took.seconds
        if phase == "commit":
            for replica in living:
                result.commits_s[replica] = now + took.ends_s[replica]
        now += took.seconds
    result.seconds["total"] = now
    return None


def _death(scene: RoundScenario, phase: str, begins_s: float) -> float | None:
    """When the replica dies, if that may be in this phase; counted from the round's beginning."""
    at = scene.dies.at if scene.dies is not None else None
    if isinstance(at, str):
        return begins_s if at == phase else None
    return at if at is not None and at >= begins_s else None
