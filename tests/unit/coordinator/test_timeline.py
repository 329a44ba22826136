"""The page's time line: parts of iterations with their times, and what became of each replica."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from coordinator.watch.events import Event, EventKind
from coordinator.watch.fleet_recorder import FleetChange, FleetRecorder, ObservedReplica, ObservedSync
from coordinator.web.timeline import Timeline
from servicekit.errors import PeerLost
from tandem_clients.flow import ReplicaOutcome
from tandem_clients.replica import Replica

START_S = 1_700_000_000.0
SEQUENCE = count(1)


def event(after_s: float, kind: EventKind, message: str = "", **values: float) -> Event:
    return Event(sequence=next(SEQUENCE), time_s=START_S + after_s, kind=kind, message=message, values=values)


def part(timeline: Timeline, name: str, begin_s: float, end_s: float) -> None:
    timeline.add(event(begin_s, EventKind.PROGRESS, name))
    timeline.add(event(end_s, EventKind.PROGRESS))


def iterations(timeline: Timeline, first: int, last: int) -> None:
    """Iterations of two seconds: generate, train, and a report."""
    for number in range(first, last + 1):
        begin_s = 2.0 * number
        part(timeline, "generate", begin_s, begin_s + 0.5)
        part(timeline, "train", begin_s + 0.5, begin_s + 1.5)
        timeline.add(event(begin_s + 1.75, EventKind.ITERATION, f"iteration {number}", iteration=number))


def plain(timeline: Timeline, seen: FleetRecorder | None = None, now_s: float = 0.0) -> dict[str, Any]:
    found = timeline.plain(seen or FleetRecorder(), START_S + now_s)
    return dict(json.loads(json.dumps(found, allow_nan=False)))


def test_nothing_is_known_before_a_part_begins() -> None:
    timeline = Timeline()
    timeline.add(event(0.0, EventKind.STATE, "starting"))
    assert plain(timeline) == {}


def test_parts_have_the_times_at_which_they_began_and_ended() -> None:
    timeline = Timeline()
    part(timeline, "sync", 0.0, 4.0)
    part(timeline, "evaluate", 4.0, 5.0)
    timeline.add(event(5.5, EventKind.PROGRESS, "generate"))
    timeline.add(event(6.0, EventKind.WARNING, "careful"))
    timeline.add(event(6.0, EventKind.PROGRESS, "pause requested: holding before the next iteration"))
    timeline.add(event(6.25, EventKind.EVALUATION, "held-out accuracy 0.5"))
    timeline.add(event(7.0, EventKind.PROGRESS))
    part(timeline, "train", 7.5, 9.0)  # half a second is in no part
    shown = plain(timeline, now_s=20.0)
    assert shown["parts"] == [["generate", 0.0, 1.5], ["train", 2.0, 3.5]]
    assert shown["iterations"] == [[None, 0.0, None]]
    assert (shown["begin_s"], shown["length_s"]) == (START_S + 5.5, 3.5)


def test_the_start_is_shown_until_an_iteration_begins() -> None:
    timeline = Timeline()
    part(timeline, "sync", 0.0, 4.0)
    timeline.add(event(4.0, EventKind.PROGRESS, "evaluate"))
    shown = plain(timeline, now_s=9.0)
    assert (shown["parts"], shown["iterations"]) == ([["sync", 0.0, 4.0], ["evaluate", 4.0, 9.0]], [])


def test_an_iteration_has_its_number_and_its_report_when_it_has_ended() -> None:
    timeline = Timeline()
    iterations(timeline, 7, 8)
    part(timeline, "generate", 18.0, 18.5)
    part(timeline, "reward", 18.5, 18.75)
    timeline.add(event(18.75, EventKind.PROGRESS, "generate"))  # for groups that replace others: the same iteration
    shown = plain(timeline, now_s=19.0)
    assert shown["iterations"] == [[7, 0.0, 1.75], [8, 2.0, 3.75], [None, 4.0, None]]
    assert ["report", 1.5, 1.75] in shown["parts"]
    assert shown["parts"][-1] == ["generate", 4.75, 5.0]


def test_a_run_that_is_paused_or_over_stands_still() -> None:
    timeline = Timeline()
    iterations(timeline, 1, 1)
    timeline.add(event(4.0, EventKind.PROGRESS, "generate"))
    timeline.add(event(5.0, EventKind.STATE, "failed: no"))
    assert plain(timeline, now_s=500.0) == plain(timeline, now_s=900.0)
    assert plain(timeline, now_s=900.0)["parts"][-1] == ["generate", 2.0, 3.0]


def test_only_the_last_iterations_are_kept() -> None:
    timeline = Timeline()
    part(timeline, "sync", 0.0, 1.0)
    iterations(timeline, 1, 1000)
    shown = plain(timeline)
    assert [number for number, _, _ in shown["iterations"]] == list(range(981, 1001))
    assert len(shown["parts"]) == 3 * 20
    assert shown["parts"][0] == ["generate", 0.0, 0.5]


def test_parts_of_an_iteration_without_an_end_are_bounded() -> None:
    timeline = Timeline()
    for number in range(5000):
        part(timeline, "generate", number, number + 0.5)
    assert len(plain(timeline)["parts"]) == 400


def synced(end_s: float, version: int, outcomes: Mapping[str, str], **values: Any) -> ObservedSync:
    values = {"total_s": 0.5} | values
    return ObservedSync(time_s=START_S + end_s, policy_version=version, outcomes=outcomes, **values)


def seen(names: list[str], *happened: ObservedSync | FleetChange) -> FleetRecorder:
    recorder = FleetRecorder()
    recorder.replicas = {name: ObservedReplica(name=name, policy_version=3) for name in names}
    recorder.rounds.extend(one for one in happened if isinstance(one, ObservedSync))
    recorder.changes.extend(one for one in happened if isinstance(one, FleetChange))
    return recorder


def lanes(recorder: FleetRecorder, last: int = 12) -> dict[str, dict[str, Any]]:
    timeline = Timeline()
    part(timeline, "sync", 0.0, 1.0)  # the time line begins 2 seconds later
    iterations(timeline, 1, last)
    return {lane["name"]: lane for lane in plain(timeline, recorder)["lanes"]}


BOTH = {"a": "committed", "b": "committed"}


def test_a_replica_has_a_version_from_the_end_of_its_round_on() -> None:
    waited = {"retries": 1.0, "roll_call": 0.25}
    second = synced(6.0, 2, {"a": "committed"}, total_s=2.25, stages=waited)
    found = lanes(seen(["a"], synced(3.0, 1, {"a": "committed"}), second))
    assert found["a"]["bands"] == [[1.0, 1, True, 4.0], [4.0, 2, True, None]]
    assert found["a"]["marks"] == [[0.5, 1.0, "committed", 1], [3.0, 4.0, "committed", 2]]


@pytest.mark.parametrize(
    ("outcome", "bands"),
    [
        ("aborted", [[1.0, 1, True, 8.0], [8.0, 3, True, None]]),
        ("poisoned", [[1.0, 1, True, 4.0], [8.0, 3, True, None]]),
        (None, [[1.0, 1, True, 4.0], [4.0, 1, False, 8.0], [8.0, 3, True, None]]),
    ],
)
def test_a_round_that_a_replica_did_not_end_well_is_marked(outcome: str | None, bands: list[Any]) -> None:
    of_b = {} if outcome is None else {"b": outcome}
    second = synced(6.0, 2, {"a": "committed"} | of_b)
    found = lanes(seen(["a", "b"], synced(3.0, 1, BOTH), second, synced(10.0, 3, BOTH)))
    assert found["b"]["bands"] == bands
    assert found["b"]["marks"][1] == [3.5, 4.0, outcome or "left out", 2]
    assert [mark[2] for mark in found["a"]["marks"]] == ["committed"] * 3


def test_a_replica_that_evaluates_meanwhile_is_not_left_out() -> None:
    second = replace(synced(6.0, 2, {"a": "committed"}), lent=("b",))
    found = lanes(seen(["a", "b"], synced(3.0, 1, BOTH), second, synced(10.0, 3, BOTH)))
    assert found["b"]["bands"] == [[1.0, 1, True, 8.0], [8.0, 3, True, None]]
    assert [mark[2] for mark in found["b"]["marks"]] == ["committed", "evaluated", "committed"]


def test_a_round_that_was_given_up_leaves_no_one_out() -> None:
    failed = synced(5.0, 2, {"a": "aborted"}, error="a is gone")
    found = lanes(seen(["a", "b"], synced(3.0, 1, BOTH), failed, synced(6.0, 2, BOTH)))
    assert [mark[2] for mark in found["a"]["marks"]] == ["committed", "aborted", "committed"]
    assert [mark[2] for mark in found["b"]["marks"]] == ["committed", "committed"]


def test_seeding_one_that_joins_leaves_no_one_out() -> None:
    joins = FleetChange(START_S + 4.0, "b", joined=True)
    found = lanes(seen(["a", "b"], synced(3.0, 1, {"a": "committed"}), joins, synced(5.0, 1, {"b": "committed"})))
    assert found["a"]["bands"] == [[1.0, 1, True, None]]
    assert found["b"]["marks"] == [[2.0, 2.0, "joined", 0], [2.5, 3.0, "committed", 1]]
    assert found["b"]["bands"] == [[3.0, 1, True, None]]


def test_a_replica_that_leaves_has_no_version_until_it_is_seeded_again() -> None:
    gone, back = FleetChange(START_S + 4.0, "b", joined=False), FleetChange(START_S + 7.0, "b", joined=True)
    without = [synced(6.0, 2, {"a": "committed"}), synced(7.25, 3, {"a": "committed"})]  # the second began before
    found = lanes(seen(["a", "b"], synced(3.0, 1, BOTH), gone, without[0], back, without[1], synced(9.0, 4, BOTH)))
    assert found["b"]["bands"] == [[1.0, 1, True, 2.0], [7.0, 4, True, None]]
    assert [mark[2] for mark in found["b"]["marks"]] == ["committed", "left", "joined", "committed"]


def test_one_that_has_joined_and_is_not_seeded_is_left_out() -> None:
    recorder = seen(["b"], FleetChange(START_S + 4.0, "b", joined=True), synced(6.0, 2, {"a": "committed"}))
    found = lanes(recorder)
    assert [mark[2] for mark in found["b"]["marks"]] == ["joined", "left out"]
    assert found["b"]["bands"] == []


def test_a_version_from_a_round_that_is_not_kept_is_known() -> None:
    assert lanes(seen(["a"]))["a"]["bands"] == [[-START_S - 2.0, 3, True, None]]


def test_a_version_from_such_a_round_ends_as_any_other() -> None:
    found = lanes(seen(["a"], synced(6.0, 4, {"a": "poisoned"})))
    assert found["a"]["bands"] == [[-START_S - 2.0, 3, True, 4.0]]


def test_one_that_left_before_has_no_lane() -> None:
    gone = FleetChange(START_S + 1.0, "b", joined=False)
    assert list(lanes(seen(["a", "b"], synced(0.5, 1, BOTH), gone, synced(4.0, 2, {"a": "committed"})))) == ["a"]


def test_replicas_with_trouble_are_among_those_that_are_shown() -> None:
    names = [f"rollout-{number}" for number in range(64)]
    outcomes = dict.fromkeys(names, "committed") | {"rollout-40": "poisoned"}
    timeline = Timeline()
    iterations(timeline, 1, 4)
    recorder = seen(names, synced(3.0, 1, outcomes), synced(5.0, 2, dict.fromkeys(names[:-1], "committed")))
    shown = plain(timeline, recorder)
    assert [lane["name"] for lane in shown["lanes"]] == [*names[:14], "rollout-40", "rollout-63"]
    assert shown["not_shown"] == 48
    assert len(json.dumps(shown)) < 4000


async def test_the_recorder_keeps_when_replicas_join_and_leave() -> None:
    first, second, again = (Replica(name, "127.0.0.1:1") for name in ("a", "b", "a"))
    recorder = FleetRecorder()
    recorder.replicas["a"] = ObservedReplica(name="a", policy_version=0)  # by the first round of the run
    recorder.fleet([first], [first])
    recorder.fleet([first, second], [first])
    recorder.fleet([again], [])
    assert [(change.name, change.joined) for change in recorder.changes] == [("b", True), ("a", True), ("b", False)]
    assert recorder.replicas["a"].policy_version is None, "a new process has no weights"
    for replica in (first, second, again):
        await replica.close()


def test_the_recorder_keeps_how_long_a_round_took_that_was_given_up() -> None:
    recorder = FleetRecorder()
    recorder.failed_round(3, PeerLost("gone"), {"a": ReplicaOutcome.ABORTED}, 1.5)
    assert [(one.total_s, one.round_s) for one in recorder.rounds] == [(1.5, 1.5)]
