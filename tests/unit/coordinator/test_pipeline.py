"""The pipeline of asynchronous schedules: nothing trained is older than the bound says, and nothing waits for ever."""

import heapq
import random
from array import array

import pytest

from coordinator.schedule.pipeline import Pipeline
from tandem_clients.flow import Group, Prompt

PROMPT = Prompt(row=1, token_ids=array("I", [1]), answer="")


def group(name: str) -> Group:
    return Group(group_id=name, prompt=PROMPT, completions=())


def pipeline(batch: int = 4, depth: int = 1, max_staleness: int = 2, window: int = 2) -> Pipeline:
    return Pipeline(batch=batch, depth=depth, max_staleness=max_staleness, window=window)


def names(first: int, number: int) -> list[str]:
    return [f"g{place}" for place in range(first, first + number)]


def taken(line: Pipeline, size: int = 4) -> list[str] | None:
    groups = line.take(size)
    return None if groups is None else [group.group_id for group in groups]


def test_groups_are_taken_in_their_order_but_for_the_window() -> None:
    line = pipeline(window=3)
    line.begin(1, names(0, 4), {})
    line.begin(2, names(4, 4), {})
    for name in ("g0", "g2", "g3", "g4"):
        line.finish(group(name))
    assert taken(line) is None, "g4 is not within three of g1"
    line.finish(group("g5"))
    assert taken(line) is None
    assert line.first_wave == 1
    line.finish(group("g1"))
    assert taken(line) == ["g0", "g1", "g2", "g3"]
    assert (len(line), line.num_finished, line.first_wave) == (4, 2, 2)


def test_a_window_stays_where_it_is_until_its_first_group_has_come() -> None:
    line = pipeline(window=3)
    line.begin(1, names(0, 12), {})
    for name in ("g0", "g1", "g2", "g4", "g5"):
        line.finish(group(name))
    assert taken(line) == ["g0", "g1", "g2", "g4"]
    for name in ("g6", "g7", "g8", "g9"):
        line.finish(group(name))
    assert taken(line) is None, "g3 would wait for ever"
    line.finish(group("g3"))
    assert taken(line) == ["g3", "g5", "g6", "g7"]


def test_groups_begin_as_long_as_there_is_room_and_few_wait() -> None:
    line = pipeline(depth=1, max_staleness=2)
    for wave in range(3):
        assert line.may_begin()
        line.begin(wave + 1, names(4 * wave, 4), {})
    assert not line.may_begin()
    for name in names(0, 8):
        line.finish(group(name))
    assert taken(line) == names(0, 4)
    assert not line.may_begin(), "the step under way is still charged"
    line.commit()
    assert not line.may_begin(), "a batch waits"
    assert line.may_begin(again=True), "an earlier process has begun it"
    assert taken(line) == names(4, 4)
    line.commit()
    assert line.may_begin()


def test_what_an_earlier_process_has_trained_keeps_its_place() -> None:
    line = pipeline(window=2)
    line.begin(1, names(0, 4), {"g3": group("g3")}, settled=("g0", "g2"))
    assert (len(line), line.num_finished) == (2, 1)
    assert taken(line, 1) is None, "g3 is not within two of g1"
    line.finish(group("g1"))
    assert taken(line, 2) == ["g1", "g3"]


def random_schedule(chance: random.Random) -> int:
    """Run a schedule of random lengths to its end. Returns: the oldest that a trained group was."""
    batch, slots = chance.randint(1, 9), chance.randint(1, 40)
    staleness = chance.randint(1, 4)
    window = chance.randint(1, staleness * batch)
    line = pipeline(batch, chance.randint(1, staleness), staleness, window)
    spread, train_s = chance.choice([0.1, 1.0, 2.0]), chance.lognormvariate(0.0, 1.0)
    begun_at: dict[str, int] = {}  # with the policy's version
    queue: list[str] = []
    running: list[tuple[float, str]] = []
    now_s, version, oldest, num_begun, steps, trains_until_s = 0.0, 0, 0, 0, chance.randint(3, 9), -1.0
    while version < steps:
        while line.may_begin() and len(line) < (steps - version - (trains_until_s >= 0)) * batch:
            started = names(num_begun, batch)
            begun_at |= dict.fromkeys(started, version)
            line.begin(num_begun // batch + 1, started, {})
            queue += started
            num_begun += batch
        while queue and len(running) < slots:
            heapq.heappush(running, (now_s + chance.lognormvariate(0.0, spread), queue.pop(0)))
        if trains_until_s < 0 and (ready := line.take(batch)) is not None:
            ages = [version - begun_at.pop(one.group_id) for one in ready]
            oldest = max(oldest, *ages)
            assert oldest <= line.max_age
            trains_until_s = now_s + train_s
            continue
        assert running or trains_until_s >= 0, "nothing would ever happen"
        if trains_until_s >= 0 and (not running or trains_until_s <= running[0][0]):
            now_s, trains_until_s, version = trains_until_s, -1.0, version + 1
            line.commit()
            slots = max(1, slots + chance.choice([-1, 0, 0, 1]))  # replicas leave and join
        else:
            now_s, name = heapq.heappop(running)
            if chance.random() < 0.1:  # its replica fails: it begins again
                queue.insert(0, name)
            else:
                line.finish(group(name))
    assert num_begun == steps * batch
    assert not begun_at
    return oldest - line.max_age


@pytest.mark.parametrize("seeds", [2_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_no_trained_group_is_older_than_the_bound_whatever_the_lengths(seeds: int) -> None:
    found = [random_schedule(random.Random(seed)) for seed in range(seeds)]
    assert 0 in found, "the bound is never reached, so that a smaller one might be true"
