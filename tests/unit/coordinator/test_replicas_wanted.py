"""How many replicas an autoscaler should give a run: by rule, and in simulated runs of the real schedule."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from coordinator.record.replicas_wanted import LEAST_ROWS, MEMORY, IterationWork, ReplicasWanted
from coordinator.record.sinks import FinishedIteration
from tests.unit.coordinator.simulated_works import works

SLOTS = 4


class Fleet:
    """A run whose number of replicas follows what is wanted."""

    def __init__(self, size: int, least: int = 1) -> None:
        self.size = size
        self.rule = ReplicasWanted(slots=SLOTS, least=least, expected=lambda: self.size)

    def after(self, engines_s: float, trainer_s: float = 10.0, *, times: int = LEAST_ROWS, serving: int = -1) -> int:
        """What is wanted after so many iterations, in which all engines were busy for so long."""
        work = IterationWork(compute_s=trainer_s, running_s=engines_s * SLOTS, most_running=SLOTS)
        for _ in range(times):
            found = self.rule.wanted(work, self.size if serving < 0 else serving)
        return found


@pytest.mark.parametrize(
    ("size", "engines_s", "wanted"),
    [
        (4, 9.0, 4),  # both are as busy
        (4, 12.4, 4),
        (4, 13.0, 6),  # the trainer waits: 4 x 1.3 / 0.9
        (4, 100.0, 8),  # twice as many at most
        (1, 13.0, 2),
        (4, 7.2, 4),
        (4, 6.0, 3),  # slots idle: 4 x 0.6 / 0.9
        (4, 0.1, 2),  # half of them at least
        (2, 6.0, 2),  # one would not be enough
        (2, 4.4, 1),
        (1, 0.1, 1),
    ],
)
def test_the_rule(size: int, engines_s: float, wanted: int) -> None:
    assert Fleet(size).after(engines_s) == wanted


def test_a_fleet_that_has_just_changed_or_is_not_whole_is_not_judged() -> None:
    fleet = Fleet(4)
    assert fleet.after(20.0, times=LEAST_ROWS - 1) == 4
    assert fleet.after(20.0, times=5, serving=3) == 4  # one is lost, or evaluates
    assert fleet.after(20.0, times=1) == 8
    fleet.size = 8
    assert fleet.after(20.0, times=LEAST_ROWS - 1) == 8
    assert fleet.after(20.0, times=1) == 16
    fleet.size = 4  # somebody scales by hand
    assert fleet.after(9.0, times=1) == 4


def test_a_size_that_was_too_few_is_remembered_for_a_while() -> None:
    """Half as many engines take more than twice as long where their steps are slower with more rows."""
    fleet = Fleet(4)
    assert fleet.after(2.0) == 2
    fleet.size = 2
    assert fleet.after(14.0) == 4
    fleet.size = 4
    assert fleet.after(2.0) == 3
    fleet.size = 3
    assert fleet.after(5.0, times=20) == 3
    assert fleet.after(5.0, times=MEMORY) == 2


def test_it_never_asks_for_fewer_than_the_run_can_have() -> None:
    assert Fleet(8, least=6).after(0.1) == 6
    assert Fleet(2, least=3).after(0.1) == 2  # which is not for it to mend


def test_iterations_without_a_measure_change_nothing() -> None:
    assert Fleet(4).after(20.0, 0.0, times=20) == 4
    assert Fleet(0).after(20.0) == 1  # a set that is empty for a while


def settle(kind: str, size: int, **world: Any) -> list[int]:
    """The sizes that a run goes through when it gets what is wanted."""
    fleet, sizes = Fleet(size), [size]
    for _ in range(9):
        for work in works(kind, fleet.size, **world):
            found = fleet.rule.wanted(work, fleet.size)
        fleet.size = found
        sizes.append(found)
    return sizes


WORLDS = {
    "engines are the slower side": {"prompts": 16, "train_s": 4.0},
    "the trainer is the slower side": {"prompts": 16, "train_s": 60.0},
    "steps are slower with more rows": {"prompts": 16, "train_s": 6.0, "row_s": 0.01},
    "a batch is as small as the slots": {"prompts": 2, "train_s": 1.0},
}


# Each size of a fleet is a simulation of twelve iterations.
@pytest.mark.timeout(240)
@pytest.mark.parametrize("begin", [1, 6])
@pytest.mark.parametrize("name", WORLDS)
def test_async_runs_settle_and_stay(name: str, begin: int) -> None:
    sizes = settle("async", begin, **WORLDS[name])
    last = sizes[-1]
    assert sizes[-4:] == [last] * 4, sizes
    turns = [b - a for a, b in pairwise(sizes) if b != a]
    assert sum((one > 0) != (other > 0) for one, other in pairwise(turns)) <= 1, sizes


@pytest.mark.timeout(240)
def test_where_they_settle_follows_the_trainer() -> None:
    """Engines work for 16 x 8 completions of 74 tokens on average: 24 s of a replica with 4 slots."""
    slow, fast = (settle("async", 2, prompts=16, train_s=train_s)[-1] for train_s in (30.0, 4.0))
    assert slow == 1
    assert 5 <= fast <= 8


def test_it_is_exported_from_the_first_iteration_on() -> None:
    rule = ReplicasWanted(slots=SLOTS, least=1, expected=lambda: 4)
    generation = SimpleNamespace(slots=4 * SLOTS, running_s=20.0 * SLOTS, most_running=SLOTS)
    record: Any = SimpleNamespace(generation=generation)
    seen = []
    for _ in range(LEAST_ROWS):
        rule.take(FinishedIteration(record=record, row={"trainer_compute_s": 10.0}))
        seen.append(REGISTRY.get_sample_value("tandem_replicas_wanted"))
    rule.take(FinishedIteration(record=None, row={}))
    assert seen == [4, 4, 8]
    assert rule.close() is None
