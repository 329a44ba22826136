"""The web page's data: curves, alerts, what was observed; and that its server only ever answers what it should."""

import asyncio
import http.client
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml
from prometheus_client import REGISTRY

from coordinator.data.cursor import CursorState
from coordinator.fleet.lending import LendingFleet
from coordinator.fleet.view import FleetView
from coordinator.record.state import RunState
from coordinator.servicer import CoordinatorServicer
from coordinator.watch.control import RunControl, State
from coordinator.watch.events import EventKind, EventLog
from coordinator.watch.fleet_recorder import FleetRecorder
from coordinator.web import snapshot
from coordinator.web.alerts import Conditions, alerts
from coordinator.web.history import POINTS, History, thin
from coordinator.web.page_data import CURVES
from coordinator.web.server import DATA, SAMPLES, PageServer, on_loop
from coordinator.web.snapshot import Source
from servicekit.errors import ConfigError, PeerLost
from tandem_api.coordinator.v1.coordinator_pb2 import GetOverviewRequest
from tandem_clients.fleet import FixedFleet
from tandem_clients.flow import ReplicaOutcome, SyncResult
from tandem_clients.replica import Replica
from tandem_files.metrics_file import RECENT_ROWS

RULES = Path(__file__).parents[3] / "deploy" / "monitoring" / "rules" / "tandem.yaml"
NASTY = "</script><img src=x onerror=alert(1)>"


def row(iteration: int, **values: float) -> dict[str, float]:
    healthy = {
        "reward_mean": 0.5,
        "reward_std": 0.5,
        "entropy": 0.8,
        "kl_old": 1e-3,
        "zero_variance_ratio": 0.2,
        "iteration_s": 2.0,
    }
    return {"iteration": iteration, "logprob_abs_diff_max": 1e-5, **healthy, **values}


def calm(**changes: Any) -> Conditions:
    now = Conditions(
        state="running",
        error="",
        standstill_s=1.0,
        rows=[row(i) for i in range(1, 31)],
        limits={"logprob_abs_diff_max": 1e-3},
        announced=["rollout-0", "rollout-1"],
        serving=["rollout-0", "rollout-1"],
        poisoned=[],
        failed_rounds=0,
        disk_free=0.5,
    )
    return replace(now, **changes)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, []),
        ({"rows": []}, []),
        ({"standstill_s": 1000.0}, ["TandemNoProgress"]),
        ({"standstill_s": 1000.0, "state": "paused"}, []),
        ({"standstill_s": 1000.0, "rows": [row(i, iteration_s=600.0) for i in range(30)]}, []),
        ({"state": "failed", "error": "no"}, ["TandemRunFailed"]),
        ({"disk_free": 0.01}, ["TandemDiskFull"]),
        ({"missed_checkpoints": ["of 4", "of 6"]}, ["TandemCheckpointsMissed"]),
        ({"not_removed": ["Old checkpoints cannot be removed"]}, ["TandemDiskFull"]),
        ({"serving": ["rollout-0"]}, ["TandemReplicaNotServing"]),
        ({"serving": ["rollout-0"], "poisoned": ["rollout-1"]}, ["TandemReplicaPoisoned"]),
        ({"failed_rounds": 2}, ["TandemWeightSyncFailing"]),
        ({"rows": [row(1, logprob_abs_diff_max=0.1)]}, ["TandemLogprobMismatch"]),
        ({"rows": [row(i, kl_old=0.5) for i in range(30)]}, ["TandemKLHigh"]),
        ({"rows": [row(i, entropy=0.01) for i in range(30)]}, ["TandemEntropyCollapsed"]),
        ({"rows": [row(i, entropy=0.01) for i in range(2)]}, ["TandemEntropyCollapsed"]),
        ({"rows": [row(1, entropy=0.01)]}, []),
        ({"rows": [row(i, zero_variance_ratio=1.0) for i in range(30)]}, ["TandemNothingToLearn"]),
        ({"rows": [row(i, reward_mean=0.6 if i < 20 else 0.1) for i in range(30)]}, ["TandemRewardCollapsed"]),
        ({"rows": [row(i, reward_mean=0.1 if i < 20 else 0.6) for i in range(30)]}, []),
    ],
)
def test_alerts(changes: dict[str, Any], wanted: list[str]) -> None:
    assert [alert.name for alert in alerts(calm(**changes))] == wanted


def test_alerts_are_named_as_those_of_prometheus() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    known = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    awful = {"entropy": 0.0, "kl_old": 1.0, "zero_variance_ratio": 1.0, "logprob_abs_diff_max": 9.0}
    bad = calm(
        standstill_s=1e6,
        rows=[row(i, **awful, reward_mean=30.0 - i) for i in range(30)],
        serving=[],
        poisoned=["rollout-1"],
        failed_rounds=1,
        disk_free=0.0,
    )
    named = {alert.name for alert in [*alerts(bad), *alerts(calm(state="failed"))]}
    assert len(named) >= 9
    assert named <= known


@pytest.mark.parametrize("count", [0, 1, 2, 5, 239, 240, 241, 1000])
def test_a_thinned_curve_keeps_its_end_and_its_mean(count: int) -> None:
    points = [(float(i), float(i * i)) for i in range(count)]
    thinned = thin(points, 240)
    assert len(thinned) == min(count, len(thinned)) <= 240
    assert [x for x, _ in thinned] == sorted({x for x, _ in thinned})
    if points:
        assert thinned[-1][0] == points[-1][0]
        assert thinned[-1][1] <= points[-1][1]
    if count <= 240:
        assert thinned == points


def test_history_follows_the_events() -> None:
    events, history = EventLog(), History([row(1, reward_mean=0.1)])
    history.add(events.append(EventKind.PROGRESS, "generate"))
    assert history.part == "generate"
    assert history.curve("reward_mean") == [(1.0, 0.1)]
    history.add(events.append(EventKind.ITERATION, "iteration 2", row(2, reward_mean=0.3)))
    history.add(events.append(EventKind.WARNING, "careful"))
    assert history.curve("reward_mean") == [(1.0, 0.1), (2.0, 0.3)]
    assert history.curve("heldout_accuracy") == []
    assert (history.last("reward_mean"), history.last("heldout_accuracy")) == (0.3, None)
    assert [event.message for event in history.messages] == ["careful"]
    for number in range(3, 2000):
        history.add(events.append(EventKind.ITERATION, "", row(number)))
    assert len(history.curve("reward_mean")) <= POINTS


def test_a_long_history_is_thinned_and_keeps_its_shape() -> None:
    events, history = EventLog(), History()
    for number in range(1, 20_001):
        values = {"reward_mean": number / 20_000} | ({"heldout_accuracy": 0.5} if number == 12_345 else {})
        history.add(events.append(EventKind.ITERATION, "", row(number, **values)))
    assert len(history.rows) <= 3 * RECENT_ROWS
    numbers = [one["iteration"] for one in history.rows]
    assert numbers == sorted({*numbers})
    assert numbers[:9] == [*range(1, 10)]
    assert numbers[-RECENT_ROWS:] == [*range(20_001 - RECENT_ROWS, 20_001)]
    assert max(later - earlier for earlier, later in itertools.pairwise(numbers)) <= 640
    assert history.last("heldout_accuracy") == 0.5
    for at, mean in history.curve("reward_mean"):
        assert mean == pytest.approx(at / 20_000, abs=0.05)


def test_iterations_that_are_repeated_replace_those_in_the_history() -> None:
    events, history = EventLog(), History([row(number, reward_mean=0.1) for number in range(1, 5)])
    history.add(events.append(EventKind.ITERATION, "iteration 3", row(3, reward_mean=0.7)))
    assert history.curve("reward_mean") == [(1.0, 0.1), (2.0, 0.1), (3.0, 0.7)]


def sync_result(version: int = 3) -> SyncResult:
    return SyncResult(
        policy_version=version,
        attempts=1,
        total_s=0.5,
        stages={"prepare": 0.1, "transfer": 0.3},
        bytes_per_rollout_rank=10,
        bytes_received=20,
        redundancy=1.0,
        outcomes={"rollout-0": ReplicaOutcome.COMMITTED, "rollout-1": ReplicaOutcome.POISONED},
        epoch=7,
        replica_s={"rollout-0": 0.4},
    )


async def test_observed_counts_processes_and_forgets_the_gone() -> None:
    first, second, returned = (Replica(name, "127.0.0.1:1") for name in ("w-0", "w-1", "w-0"))
    observed = FleetRecorder()
    observed.fleet([first, second], [first])
    observed.fleet([first, second], [first, second])
    observed.sync(replace(sync_result(), outcomes={"w-0": ReplicaOutcome.COMMITTED}, replica_s={"w-0": 0.4}))

    def version() -> float | None:
        return REGISTRY.get_sample_value("tandem_replica_policy_version", {"replica": "w-0"})

    assert version() == 3
    observed.fleet([second], [second])
    assert version() is None
    assert (observed.replicas["w-0"].there, observed.replicas["w-0"].serving) == (False, False)
    observed.fleet([returned, second], [second])
    assert [observed.replicas[name].starts for name in ("w-0", "w-1")] == [2, 1]
    assert REGISTRY.get_sample_value("tandem_replica_starts_total", {"replica": "w-0"}) == 2
    observed.sync(replace(sync_result(), outcomes={"w-0": ReplicaOutcome.COMMITTED}, replica_s={"w-0": 0.4}))
    observed.lent.add(second)  # by an attempt of the run that has ended
    lending = LendingFleet(FixedFleet([second, returned]), keep=1, lent=observed.lent)
    assert lending.lend(2) == (returned,), "one is kept"
    observed.fleet(await lending.look(), lending.serving())
    row = observed.replicas["w-0"]
    assert (row.there, row.serving, row.evaluates, version()) == (True, False, True, 3)
    assert lending.lend(1) == ()
    lending.give_back([returned])
    observed.fleet(await lending.look(), lending.serving())
    assert (row.there, row.serving, row.evaluates) == (True, True, False)
    for replica in (first, second, returned):
        await replica.close()


def test_observed_rounds_say_what_became_of_the_replicas() -> None:
    observed = FleetRecorder()
    observed.failed_round(3, PeerLost("rollout-1 is gone"), {"rollout-1": ReplicaOutcome.ABORTED})
    observed.sync(sync_result())
    assert [each.error for each in observed.rounds] == ["rollout-1 is gone", ""]
    assert observed.rounds[-1].stages == {"prepare": 0.1, "transfer": 0.3}
    assert [observed.replicas[name].outcome for name in ("rollout-0", "rollout-1")] == ["committed", "poisoned"]
    assert (observed.replicas["rollout-0"].sync_s, observed.replicas["rollout-1"].sync_s) == (0.4, None)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    state = RunState(cursor=CursorState(sources=()), batch_rng={}, model_fingerprint="x")
    state.iteration, state.policy_version = 5, 5
    observed = FleetRecorder()
    observed.sync(sync_result())
    control = RunControl(EventLog())
    control.enter(State.RUNNING)
    return Source(
        run=NASTY,
        total_iterations=40,
        evaluate_every=10,
        checkpoint_every=10,
        limits={"logprob_abs_diff_max": 1e-3},
        run_dir=tmp_path,
        control=control,
        state=state,
        history=History([row(i) for i in range(1, 6)]),
        observed=observed,
        troubles=lambda: ["pod rollout-3 is stuck"],
    )


def test_a_snapshot_is_plain_json(source: Source) -> None:
    shown = json.loads(json.dumps(source.snapshot(), allow_nan=False))
    assert (shown["run"], shown["state"], shown["iteration"]) == (NASTY, "running", 5)
    assert [curve["field"] for curve in shown["curves"]] == [field for field, _, _ in CURVES]
    assert shown["curves"][0]["points"][-1] == [5, 0.5]
    assert [each["iteration"] for each in shown["iterations"]] == [1, 2, 3, 4, 5]
    assert [replica["name"] for replica in shown["replicas"]] == ["rollout-0", "rollout-1"]
    assert shown["syncs"][0]["stages"] == {"prepare": 0.1, "transfer": 0.3}
    assert "pod rollout-3 is stuck" in [alert["text"] for alert in shown["alerts"]]


def test_memory_has_a_unit_that_a_person_reads(source: Source) -> None:
    for value, unit, shown in ((6.1e8, "MiB", 581.7), (70 * 2.0**30, "GiB", 70.0), (0.0, "bytes", 0.0)):
        seen = replace(source, history=History([row(1, train_peak_memory_bytes=value)]))
        (curve,) = [one for one in seen.snapshot()["curves"] if one["field"] == "train_peak_memory_bytes"]
        assert (curve["unit"], curve["points"]) == (unit, [(1, pytest.approx(shown, rel=1e-3))])


def test_a_held_out_figure_that_is_no_share_is_no_accuracy(source: Source) -> None:
    assert source.snapshot()["heldout_title"] == "held-out accuracy"
    source.state.initial_accuracy = -0.7
    source.state.accuracy_is_share = False
    source.history.add(EventLog().append(EventKind.ITERATION, "", row(6, heldout_accuracy=-0.4)))
    shown = source.snapshot()
    titles = {curve["field"]: curve["title"] for curve in shown["curves"]}
    assert (shown["heldout_title"], titles["heldout_accuracy"]) == ("held-out reward", "Held-out reward")


def test_the_accuracy_before_the_training_begins_its_curve(source: Source) -> None:
    source.state.initial_accuracy = 0.7
    source.history.add(EventLog().append(EventKind.ITERATION, "", row(6, heldout_accuracy=0.4)))
    shown = source.snapshot()
    curves = {curve["field"]: curve for curve in shown["curves"]}
    assert curves["heldout_accuracy"]["points"] == [(0.0, 0.7), (6, 0.4)]
    assert (curves["heldout_accuracy"]["start"], curves["reward_mean"]["start"]) == (0.7, None)


def test_rewards_and_evaluation_sets_of_the_configuration_have_curves_too(source: Source) -> None:
    more = {"reward/format_mean": 0.25, "reward/format_std": 0.1, "eval/aime/pass@8": 0.5, "eval/aime/pass@8_low": 0.1}
    source.history.add(EventLog().append(EventKind.ITERATION, "", row(6, **more)))
    curves = {curve["title"]: curve["points"] for curve in source.snapshot()["curves"]}
    assert list(curves)[len(CURVES) :] == ["Reward: format", "aime: pass@8"]
    assert curves["aime: pass@8"] == [(6, 0.5)]
    source.history.add(EventLog().append(EventKind.ITERATION, "", row(7, **more, **{"reward/math_mean": 0.5})))
    titles = [curve["title"] for curve in source.snapshot()["curves"]]
    assert titles[len(CURVES) :] == ["Reward: format (unweighted)", "Reward: math (unweighted)", "aime: pass@8"]


def test_an_iteration_s_time_is_shown_by_part_and_what_is_left_is_estimated(source: Source) -> None:
    source.history.add(EventLog().append(EventKind.ITERATION, "", row(6, iteration_s=5.0, generate_s=2.0, train_s=1.5)))
    shown = source.snapshot()
    assert shown["iterations"][-1] == {
        "iteration": 6,
        "total_s": 5.0,
        "parts": {"generate": 2.0, "train": 1.5, "other": 1.5},
    }
    assert shown["left_s"] == 34 * 2.0, "a slow iteration changes nothing"


def test_a_run_that_starts_says_which_services_it_waits_for(source: Source) -> None:
    source.observed.awaited, source.observed.arrived = ["trainer"], {"rollout-0": 12.0}
    shown = source.snapshot()
    assert (shown["awaited"], shown["arrived"]) == (["trainer"], {"rollout-0": 12.0})


@pytest_asyncio.fixture
async def ask(source: Source) -> AsyncIterator[Callable[..., Any]]:
    """Asks the page's server: (status, headers, body)."""
    answers = {DATA: on_loop(source.snapshot, asyncio.get_running_loop()), SAMPLES: lambda query: dict(query)}
    server = PageServer("127.0.0.1", 0, answers, key="secret")

    def request(path: str, method: str = "GET", key: str = "") -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request(method, path, headers={"Authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body

    yield lambda *arguments: asyncio.to_thread(request, *arguments)
    await asyncio.to_thread(server.close)


# What the page must show of the trainer's speed, written out: a curve that is removed must fail a test.
SPEED = (
    "train_tokens_per_s",
    "model_flops_utilization",
    "train_peak_memory_bytes",
    "packing_efficiency",
    "prompt_sharing",
)
STEP = {
    "receive": 0.01,
    "onload": 0.02,
    "pack": 0.04,
    "old_logprobs": 0.2,
    "reference": 0.1,
    "forward_backward": 0.8,
    "optimizer": 0.05,
    "offload": 0.03,
}


def test_the_speed_of_the_trainer_is_drawn(source: Source) -> None:
    source.history.add(EventLog().append(EventKind.ITERATION, "", row(6, **dict.fromkeys(SPEED, 0.5))))
    curves = {curve["field"]: curve["points"] for curve in source.snapshot()["curves"]}
    assert {name: curves.get(name) for name in SPEED} == {name: [(6, 0.5)] for name in SPEED}


def test_a_train_step_s_time_is_shown_by_part(source: Source) -> None:
    parts = {f"train_{part}_s": seconds for part, seconds in STEP.items()}
    source.history.add(EventLog().append(EventKind.ITERATION, "", row(6, train_s=1.5, **parts)))
    (step,) = source.snapshot()["train_steps"]  # earlier rows have no train step
    assert (step["iteration"], step["total_s"]) == (6, 1.5)
    assert step["parts"] == pytest.approx({**STEP, "other": 0.25})


STATIC = sorted((Path(snapshot.__file__).parent / "static").iterdir())
PATHS = ["/", DATA, *(f"/{path.name}" for path in STATIC if path.name != "index.html")]


@pytest.mark.parametrize("path", PATHS)
async def test_the_page_is_served_with_a_strict_policy(ask: Callable[..., Any], path: str) -> None:
    status, headers, body = await ask(path)
    assert status == 200
    assert body
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert set(policy.values()) <= {"'none'", "'self'"}
    assert headers["x-content-type-options"] == "nosniff"
    # Nothing from elsewhere, and no code or style inside the markup, which the policy would refuse.
    text = body.decode()
    assert "//" not in text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    assert path != "/" or not any(wrong in text for wrong in ("onclick", "<style", " style=", "<script>"))
    assert not any(wrong in text for wrong in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval("))


@pytest.mark.parametrize(("key", "status"), [("", 401), ("guess", 401), ("sécret", 401), ("secret", 200)])
async def test_samples_are_for_those_who_know_the_key(ask: Callable[..., Any], key: str, status: int) -> None:
    found, _, body = await ask(f"{SAMPLES}?search=%3Cb%3E&iteration=3", "GET", key)
    assert found == status
    assert (json.loads(body) == {"search": "<b>", "iteration": "3"}) if status == 200 else (b"key" in body)


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("no such iteration"), 400), (PermissionError(13, "not yours"), 500)]
)
async def test_data_that_cannot_be_read_is_said(error: Exception, status: int) -> None:
    def fail(query: Mapping[str, str]) -> dict[str, Any]:
        raise error

    server = PageServer("127.0.0.1", 0, {SAMPLES: fail})

    def request() -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        connection.request("GET", SAMPLES)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    assert await asyncio.to_thread(request) == (status, f"{error}\n")
    await asyncio.to_thread(server.close)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
async def test_the_page_can_only_be_read(ask: Callable[..., Any], method: str) -> None:
    assert (await ask(DATA, method))[0] == 405


@pytest.mark.parametrize("path", ["/../app.py", "/static/page.js", "/etc/passwd", "/run.json/", "/page.js.map"])
async def test_other_paths_are_not_there(ask: Callable[..., Any], path: str) -> None:
    assert (await ask(path))[0] == 404


async def test_head_has_no_body(ask: Callable[..., Any]) -> None:
    status, headers, body = await ask("/", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 0


async def test_a_stuck_loop_is_said(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.web.server.SNAPSHOT_S", 0.05)
    loop = asyncio.get_running_loop()
    server = PageServer("127.0.0.1", 0, {DATA: on_loop(source.snapshot, loop)})
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", DATA)
    assert connection.getresponse().status == 503  # we hold the loop
    connection.close()
    await asyncio.to_thread(server.close)


async def test_a_snapshot_becomes_a_message_once_however_many_ask(source: Source) -> None:
    taken = [source.snapshot(), source.snapshot()]
    servicer = CoordinatorServicer(
        run="r",
        total_iterations=1,
        control=source.control,
        events=EventLog(),
        progress=source.state,
        fleet=FleetView(),
        overview=lambda: taken[0],
    )
    sent = [await servicer.GetOverview(GetOverviewRequest(), None) for _ in range(3)]
    assert sent[0] is sent[1] is sent[2]
    del taken[0]
    assert await servicer.GetOverview(GetOverviewRequest(), None) is not sent[0]
