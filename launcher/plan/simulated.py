"""`tandem plan --simulate`: the faults of a round as options, and its simulation as JSON and as a table."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from launcher.plan.figures import DTYPE_BYTES, PlannedSync
from tandem_config.problems import ConfigErrors, ConfigProblem, problem
from weightsync.round.phases import NAMES
from weightsync.simulate.phases import SimulatedFleet, SlowReplica
from weightsync.simulate.round import ReplicaDeath, RoundScenario, SimulatedRound, simulate

_DIGITS = 7
_LARGEST = 1e6  # times slower; seconds
_HINT = "slow:3=4 (replica 3 is four times slower), kill:3@transfer or kill:3@1.5 (replica 3 dies then)"


def simulated(planned: PlannedSync, faults: Sequence[str]) -> dict[str, Any]:
    """Simulate the planned round.

    Args:
        faults: options such as "slow:3=4" or "kill:3@transfer".
    Returns: figures for JSON; times in seconds.
    Raises: ConfigErrors: a fault cannot be parsed.
    """
    request = planned.request
    parsed = [_parse(fault, request.replicas) for fault in faults]
    deaths = [fault for fault in parsed if isinstance(fault, ReplicaDeath)]
    if len(deaths) > 1:
        raise ConfigErrors([_problem(faults[-1], "one death per round can be simulated")])
    fleet = SimulatedFleet(
        plan=planned.plan,
        messages=planned.messages,
        dtype_bytes=DTYPE_BYTES[request.dtype],
        replicas=request.replicas,
        speeds=request.speeds,
        slow=tuple(fault for fault in parsed if isinstance(fault, SlowReplica)),
    )
    return _as_json(simulate(RoundScenario(fleet=fleet, death=deaths[0] if deaths else None)))


def simulation_table(figures: dict[str, Any]) -> Table:
    """Tabulate seconds by phase, the slowest replica and the lost ones."""
    table = Table(title="simulated round", title_justify="left", box=None, pad_edge=False)
    for column in ("phase", "seconds"):
        table.add_column(column)
    for phase, seconds in figures["seconds"].items():
        table.add_row(phase, f"{seconds:.4f}")
    table.add_row("slowest replica", str(figures["slowest_replica"]))
    if figures["lost_replicas"]:
        table.add_row("lost replicas", ", ".join(map(str, figures["lost_replicas"])))
    return table


def _as_json(result: SimulatedRound) -> dict[str, Any]:
    committed = [seconds for seconds in result.commits_s if seconds is not None]
    return {
        "seconds": result.seconds,
        "attempts": result.attempts,
        "slowest_replica": result.slowest_replica,
        "lost_replicas": [replica for replica, seconds in enumerate(result.commits_s) if seconds is None],
        "first_commit_s": min(committed, default=None),
        "last_commit_s": max(committed, default=None),
        "commits_s": result.commits_s,
        "transfers_s": {str(replica): seconds for replica, seconds in result.transfers_s.items()},
        "trainer_egress_bytes": result.trainer_egress_bytes,
        "events": result.num_events,
    }


def _parse(fault: str, replicas: int) -> SlowReplica | ReplicaDeath:
    kind, _, rest = fault.partition(":")
    name, _, value = rest.partition("=" if kind == "slow" else "@")
    if kind not in ("slow", "kill") or not name.isdecimal() or len(name) > _DIGITS:
        raise ConfigErrors([_problem(fault, "cannot be read")])
    if int(name) >= replicas:
        raise ConfigErrors([_problem(fault, f"there is no replica {name}: they are 0 to {replicas - 1}")])
    if kind == "kill" and value in NAMES:
        return ReplicaDeath(replica=int(name), at=value)
    try:
        number = float(value)
    except ValueError:
        raise ConfigErrors([_problem(fault, f"{value!r} is neither a number nor a phase")]) from None
    if not 0 < number <= _LARGEST:
        raise ConfigErrors([_problem(fault, f"{value} must be above 0, and at most {_LARGEST:g}")])
    return (
        SlowReplica(replica=int(name), factor=number) if kind == "slow" else ReplicaDeath(replica=int(name), at=number)
    )


def _problem(fault: str, message: str) -> ConfigProblem:
    return problem("--fault", fault, message, f"for example {_HINT}")
