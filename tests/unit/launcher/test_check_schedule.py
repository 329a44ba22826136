"""`tandem check` foresees what a schedule does: as the whole simulation does, in seconds; warnings say why."""

import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launcher.check.schedule import ScheduleForecast, _lines, _problems, forecast, predicted_sync, schedule_report
from launcher.cli import app
from tandem_config.loading import draft_config, load_config
from tandem_config.problems import ConfigProblem
from tests.kit.folders import write_config, write_rows

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "model"


def settings(kind: str, prompts: int, group: int, replicas: int, slots: int, **others: Any) -> list[str]:
    given = {
        "model.path": MODEL,
        "data.train": "t.jsonl",
        "schedule.kind": kind,
        "grpo.preset": "decoupled",
        "grpo.prompts_per_iteration": prompts,
        "grpo.group_size": group,
        "grpo.max_new_tokens": 1024,
        "rollout.replicas": replicas,
        "rollout.max_running_requests": slots,
    }
    return [f"{key}={value}" for key, value in given.items()] + [f"{key}={value}" for key, value in others.items()]


def foreseen(*given: Any, **others: Any) -> ScheduleForecast:
    return forecast(load_config(None, settings(*given, **others)))


@pytest.mark.parametrize(
    ("kind", "prompts", "trainer", "slots", "bound"),
    [
        ("async", 128, 0.05, 0.04, 3),
        ("async", 32, 0.55, 0.59, 3),
        ("one_step_off", 128, 0.49, 0.51, 1),
    ],
)
def test_idle_shares_are_those_of_the_table(kind: str, prompts: int, trainer: float, slots: float, bound: int) -> None:
    """docs/scheduling.md: 4 replicas of 64 slots, groups of 8; there with all of it."""
    found = foreseen(kind, prompts, 8, 4, 64)
    figures = found.figures
    assert (figures.trainer_idle, figures.slots_idle) == pytest.approx((trainer, slots), abs=0.07)
    assert (found.completions, found.slots, found.bound, found.lengths) == (8 * prompts, 256, bound, (85, 853, 1024))
    assert figures.age_mean <= figures.age_max <= bound
    assert figures.age_mean == pytest.approx(1.7 if kind == "async" else 1.0, abs=0.3)


@pytest.mark.parametrize(
    ("given", "others"),
    [
        ((1024, 64, 32, 512), {"grpo.max_new_tokens": 131072}),
        ((64, 4096, 1, 8), {"schedule.max_staleness": 8, "schedule.depth": 8}),
    ],
)
def test_large_configurations_take_seconds(given: tuple[Any, ...], others: dict[str, Any]) -> None:
    begun_s = time.process_time()
    found = foreseen("async", *given, **others)
    assert time.process_time() - begun_s < 8.0
    assert 0.0 < found.figures.age_mean <= found.bound


@pytest.mark.parametrize(("prompts", "group", "slots"), [(1, 4, 4), (1, 2, 1024), (4, 4, 1)])
def test_small_ones_are_simulated_as_they_are(prompts: int, group: int, slots: int) -> None:
    found = foreseen("async", prompts, group, 1, slots, **{"grpo.max_new_tokens": 1, "grpo.updates_per_iteration": 1})
    assert found.figures.iteration_s > 0
    assert found.lengths == (1, 1, 1)


def test_a_kv_cache_that_is_given_bounds_the_slots() -> None:
    cache = {"rollout.max_total_tokens": 10 * (512 + 170), "data.max_prompt_tokens": 512}
    assert foreseen("async", 4, 4, 2, 64, **cache).slots == 20


def test_the_bound_is_that_of_the_settings() -> None:
    assert foreseen("async", 4, 4, 1, 4, **{"schedule.window": 0}).bound == 2


def report(trainer_idle: float, *given: Any, **others: Any) -> tuple[str, list[ConfigProblem]]:
    """Of figures as they were simulated, with 4 prompts of 4 completions, and another idle share."""
    wasted = others.pop("wasted", 0.0)
    config = load_config(None, settings(*given, **others))
    found = small_one()
    figures = replace(found.figures, trainer_idle=trainer_idle, slots_idle=0.0, wasted=wasted)
    slots = config.rollout.replicas * config.rollout.max_running_requests
    completions = config.grpo.prompts_per_iteration * config.grpo.group_size
    found = replace(found, figures=figures, slots=slots, completions=completions, sync=predicted_sync(config))
    return "\n".join(_lines(config, found)), list(_problems(config, found))


@cache
def small_one() -> ScheduleForecast:
    return foreseen("async", 4, 4, 1, 4)


@pytest.mark.parametrize(
    ("idle", "given", "others", "key", "said"),
    [
        (0.2, ("async", 32, 8, 4, 64), {}, None, ""),
        (0.21, ("async", 32, 8, 4, 64), {}, "grpo.prompts_per_iteration", "256 completions are 1 x the 256 slots"),
        (0.9, ("one_step_off", 32, 8, 4, 64), {}, None, ""),
        (0.5, ("async", 128, 8, 4, 64), {"schedule.max_staleness": 1}, "schedule.max_staleness", "is small"),
        (0.5, ("async", 128, 8, 4, 64), {"schedule.window": 0.5}, "schedule.window", "is small"),
        (0.5, ("async", 128, 8, 4, 64), {}, None, ""),
    ],
)
def test_what_lets_a_side_wait_is_named(
    idle: float, given: tuple[Any, ...], others: dict[str, Any], key: str | None, said: str
) -> None:
    _, problems = report(idle, *given, **others)
    assert [(one.key, one.severity) for one in problems] == ([] if key is None else [(key, "warning")])
    assert all(said in one.message and f"expected idle: trainer {idle}" in one.message for one in problems)


@pytest.mark.parametrize(
    ("given", "others", "suggestion"),
    [
        (
            (32, 8, 4, 64),
            {},
            "128 (4 x the slots), or rollout.max_running_requests: 16, "
            "or schedule.max_staleness: 4 with schedule.depth: 2",
        ),
        ((33, 8, 4, 65), {"schedule.max_staleness": 4}, "130 (4 x the slots), or rollout.max_running_requests: 16"),
        ((1, 4, 2, 8), {"schedule.max_staleness": 4}, "16 (4 x the slots)"),
    ],
)
def test_a_batch_that_is_too_small_gets_sizes_that_are_not(
    given: tuple[Any, ...], others: dict[str, Any], suggestion: str
) -> None:
    _, (problem,) = report(0.5, "async", *given, **others)
    assert problem.suggestion == suggestion


def test_short_completions_get_the_smaller_pipeline_named() -> None:
    said = "max_staleness: 1 with window: 0"
    assert said in report(0.0, "async", 128, 8, 4, 64)[0]
    assert said not in report(0.0, "async", 128, 8, 4, 64, **{"schedule.max_staleness": 1, "schedule.window": 0})[0]
    assert said not in report(0.0, "async", 128, 8, 4, 64, **{"grpo.max_new_tokens": 4096})[0]
    assert said not in report(0.0, "one_step_off", 128, 8, 4, 64)[0]


def test_the_pause_of_a_weight_sync_is_said() -> None:
    staged, _ = report(0.0, "async", 128, 8, 4, 64)
    assert "generation pauses for a step only (sync.install: staged)" in staged
    ranks = {"rollout.tensor_parallel": 2, "sync.install": "in_place", "sync.link_gbit": 100}
    in_place, _ = report(0.0, "async", 128, 8, 4, 64, **ranks)
    assert "over links of 100 Gbit/s; generation pauses for all of it (sync.install: in_place)" in in_place
    assert "weight sync" not in report(0.0, "one_step_off", 128, 8, 4, 64)[0], "nothing is generated meanwhile"
    assert "weight sync" not in report(0.0, "async", 128, 8, 4, 64, **{"sync.transport": "disk"})[0]
    assert "weight sync" not in report(0.0, "async", 128, 8, 4, 64, **{"model.path": "gone"})[0]


def test_slower_links_take_longer() -> None:
    fast, slow = (
        predicted_sync(load_config(None, settings("async", 8, 8, 2, 16, **{"sync.link_gbit": speed})))
        for speed in (400, 0.1)
    )
    assert fast is not None
    assert slow is not None
    assert slow.seconds > 2 * fast.seconds


def test_tokens_that_are_not_trained_are_said() -> None:
    assert "12% of their tokens are not trained" in report(0.0, "async", 128, 8, 4, 64, wasted=0.12)[0]
    assert "not trained" not in report(0.0, "async", 128, 8, 4, 64)[0]


@pytest.mark.parametrize("others", [{"schedule.depth": 9}, {"grpo.group_size": 1}, {"schedule.kind": "sync"}])
def test_what_is_refused_or_takes_turns_is_not_simulated(others: dict[str, Any]) -> None:
    assert schedule_report(draft_config(None, settings("async", 4, 4, 1, 4, **others))) == ([], [])


def test_without_a_temporary_folder_it_is_not_simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    (line,), problems = schedule_report(draft_config(None, settings("async", 4, 4, 1, 4)))
    assert "schedule async: not simulated" in line
    assert problems == []


@pytest.mark.runs("tandem check")
def test_the_command_prints_it(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", 64)
    file = write_config(tmp_path, schedule={"kind": "async"}, grpo={"preset": "decoupled"})
    shown = CliRunner().invoke(app, ["check", "-c", str(file)])
    assert shown.exit_code == 0, shown.output
    assert "schedule async: idle trainer 0." in shown.output
    assert "versions old on average, 3 at most" in shown.output
    assert "16 completions are 0.016 x the 1024 slots" in shown.output
    assert "tandem simulate --run" in shown.output
    turns = CliRunner().invoke(app, ["check", "-c", str(file), "--set", "schedule.kind=sync"])
    assert turns.exit_code == 0
    assert "schedule sync" not in turns.output
