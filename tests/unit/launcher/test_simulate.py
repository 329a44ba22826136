"""`tandem simulate`: its engine follows its formula, its figures are those of known cases, errors name the option."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from launcher.cli import app
from launcher.simulate.command import _engine_fit, read_lengths
from launcher.simulate.engine import SimulatedReplica
from launcher.simulate.plot import plot
from launcher.simulate.virtual_loop import run
from launcher.simulate.world import Figures, ServiceSpeeds, simulate
from servicekit.errors import ConfigError
from tandem_clients.flow import Group, Order, Prompt, Sampling
from tandem_clients.sample_stream import OpenGroup
from tandem_config.schema import RunConfig

PROMPT = Prompt(row=1, token_ids=array("I", [1]), answer="")


def config(kind: str, prompts: int, **schedule: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "/model"},
            "data": {"train": "/data.jsonl"},
            "grpo": {"prompts_per_iteration": prompts, "group_size": 4, "max_new_tokens": 1000, "preset": "decoupled"},
            "rollout": {"replicas": 2},
            "schedule": {"kind": kind, **schedule},
        }
    )


def speeds(
    lengths: Any, *, slots: int = 16, train_s: float = 1.0, row_s: float = 0.0, sync_s: float = 0.0
) -> ServiceSpeeds:
    return ServiceSpeeds(
        slots=slots,
        step_s=0.01,
        row_s=row_s,
        train_s=train_s,
        sync_s=sync_s,
        reward_s=0.0,
        lengths=np.asarray(lengths, np.int64),
    )


def figures(kind: str, prompts: int, fast: ServiceSpeeds, iterations: int = 6, **schedule: Any) -> Figures:
    return simulate(config(kind, prompts, **schedule), fast, iterations, kind)


def test_an_engine_gives_each_row_a_token_a_step_and_lets_the_others_wait() -> None:
    lengths = {0: 10, 1: 30, 2: 20}
    replica = SimulatedReplica(
        name="r", slots=2, kv_tokens=0, step_s=lambda rows: 0.1 * rows, length_of=lambda name, index: lengths[index]
    )
    order = Order(
        policy_version=0, num_completions=3, sampling=Sampling(temperature=1.0, max_new_tokens=99, stop_token_ids=())
    )

    async def story() -> tuple[Group, float]:
        import asyncio

        replica.flips.append((0.0, 0))
        group = OpenGroup(group_id="g", prompt=PROMPT, num_completions=3)
        async with replica.sampling(order, timeout_s=1.0) as stream:
            await stream.submit([(group, group.take(3))])
            asyncio.get_running_loop().call_later(1.0, replica.flip, 1)  # 5 steps of two rows
            async for news in stream.news():
                if news.whole:
                    break
            ended_s = asyncio.get_running_loop().time()
        await replica.close()
        return group.group(), ended_s

    group, ended_s = run(story())
    # 0 and 1 for 10 steps of 0.2 s, then 2 in the place of 0: 20 steps until both end.
    assert ended_s == pytest.approx(6.0)
    assert replica.busy_row_s == pytest.approx(12.0)
    spans = [completion.version_spans for completion in group.completions]
    assert spans == [((5, 0), (10, 1)), ((5, 0), (30, 1)), ((20, 1),)]
    assert [completion.oldest_version for completion in group.completions] == [0, 0, 1]


def test_taking_turns_lasts_as_long_as_all_parts_together() -> None:
    """Two replicas, 32 completions of 100 tokens: all at a time, in a second."""
    found = figures("sync", 8, speeds([100], train_s=1.0, sync_s=0.5))
    assert found.iteration_s == pytest.approx(2.5, abs=0.01)
    assert [found.trainer_idle, found.slots_idle] == pytest.approx([0.6, 0.6], abs=0.01)
    assert (found.age_max, found.wasted, found.length_ratio) == (0, 0.0, 1.0)


def test_the_time_line_says_who_was_busy_and_when() -> None:
    found = figures("sync", 8, speeds([100], train_s=1.0, sync_s=0.5))
    second = round(1 / found.beat_s)
    for busy, at_work in ((found.trainer_busy, [False, True, False]), (found.slots_busy, [True, False, False])):
        middles = [busy[part * second + second // 2 - (part == 2) * second // 4] for part in range(3)]
        assert middles == pytest.approx([float(one) for one in at_work], abs=1e-6)
    assert 4.0 <= sum(found.trainer_busy) * found.beat_s <= 8.0, "seconds of as many iterations"


@pytest.mark.parametrize("width", [10, 80, 99, 500])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_plot_has_a_line_for_each_side_of_each_schedule(width: int, ascii_only: bool) -> None:
    one, half = [figures(kind, 8, speeds([100, 10])) for kind in ("sync", "async")]
    half = replace(half, trainer_busy=half.trainer_busy[:30])  # its run was over
    lines = list(plot([one, half], width, ascii_only=ascii_only))
    rows = [line for line in lines if line.endswith("|")]
    assert [row.split()[0] for row in rows] == ["trainer", "slots"] * 2
    assert len({len(row) for row in rows}) == 1
    assert 20 < len(rows[0]) <= min(max(width, 40), 120)
    assert all(line.isascii() for line in lines) == ascii_only
    full = "#" if ascii_only else "█"
    assert full in rows[0]
    assert " " in rows[0].partition("|")[2], "it waits"
    bars = {line.split()[0]: line.count(full) for line in lines[-2:]}
    assert bars["sync"] == round(20 * one.trainer_idle) + round(20 * one.slots_idle)


def test_one_step_off_lasts_as_long_as_its_slower_side() -> None:
    found = figures("one_step_off", 8, speeds([100], train_s=1.2))
    assert found.iteration_s == pytest.approx(1.2, abs=0.01)
    assert (found.age_mean, found.age_max) == (1.0, 1)


def test_long_tails_stop_turns_and_not_the_pipeline() -> None:
    """Batches of four times the slots, the train step as long as the engines' full work."""
    tails = read_lengths("lognormal:40,400,480")
    mean = float(np.mean(tails))
    fast = speeds(tails, slots=8, train_s=64 * 4 * mean * 0.01 / 16)
    turns, ahead = figures("sync", 64, fast, 12), figures("async", 64, fast, 12)
    assert min(turns.trainer_idle, turns.slots_idle) > 0.5
    assert max(ahead.trainer_idle, ahead.slots_idle) < 0.1
    assert ahead.wasted == 0.0
    assert ahead.length_ratio == pytest.approx(turns.length_ratio, abs=0.02)
    assert 1.0 < ahead.age_mean < ahead.age_max <= 3
    dropping = figures("async", 64, fast, 12, stale="drop", max_token_age=1)
    assert dropping.wasted > 0.2
    assert dropping.length_ratio < 0.98


def test_lengths_are_drawn_alike_in_all_schedules_and_cut() -> None:
    assert read_lengths("constant:7").tolist()[:2] == [7, 7]
    tails = read_lengths("lognormal:100,1000,500")
    assert float(np.median(tails)) == pytest.approx(100, rel=0.05)
    assert tails.max() == 500


@pytest.mark.parametrize("given", ["lognormal:0,10", "lognormal:ten", "constant:", "nothing-there.txt"])
def test_lengths_that_cannot_be_read_are_named(given: str) -> None:
    with pytest.raises(ConfigError, match="--lengths"):
        read_lengths(given)


def test_an_empty_file_of_lengths_is_named(tmp_path: Path) -> None:
    (tmp_path / "lengths").write_text("")
    with pytest.raises(ConfigError, match="at least one token"):
        read_lengths(str(tmp_path / "lengths"))


def decoded(lengths: Sequence[int], slots: int, step_s: float, row_s: float) -> tuple[float, float]:
    """Seconds until all have run, one after another in free slots, and those in which slots were busy: step by step."""
    waiting, took_s, busy_s = list(lengths), 0.0, 0.0
    running: list[int] = []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(waiting.pop(0))
        took_s += step_s + row_s * len(running)
        busy_s += (step_s + row_s * len(running)) * len(running)
        running = [left - 1 for left in running if left > 1]
    return took_s, busy_s


@pytest.mark.parametrize("slots", [16, 100])
def test_an_engines_speed_is_found_from_generations(slots: int) -> None:
    """Also where completions wait for slots, and all generations last about as long: their longest one is the limit."""
    chance = np.random.default_rng(0)
    lengths = {number: np.append(chance.integers(1, 40, 63), 400) for number in range(1, 9)}
    rows = []
    for number, found in lengths.items():
        took_s, busy_s = decoded(found.tolist(), slots, 0.02, 0.0003)
        took_s *= chance.uniform(0.98, 1.02)
        idle = {"trainer_compute_s": 1.0, "trainer_idle_ratio": took_s / (took_s + 1.0)}
        idle["rollout_idle_ratio"] = 1.0 - busy_s / (slots * (took_s + 1.0))
        rows.append({"iteration": number, "generate_s": took_s, **idle})
    fit = _engine_fit(rows, lengths, replicas=1, slots=slots)
    assert fit == {"step_s": pytest.approx(0.02, rel=0.05), "row_s": pytest.approx(0.0003, rel=0.15)}


def test_an_engines_speed_is_found_without_a_count_of_busy_slots() -> None:
    chance = np.random.default_rng(0)
    lengths = {number: chance.integers(1, 200, 64) for number in range(1, 9)}
    rows = [
        {"iteration": number, "generate_s": 0.02 * found.max() + 0.0003 * found.sum() / 2}
        for number, found in lengths.items()
    ]
    fit = _engine_fit(rows, lengths, replicas=2, slots=64)
    assert fit == {"step_s": pytest.approx(0.02), "row_s": pytest.approx(0.0003)}


def write_config(folder: Path) -> str:
    path = folder / "c.yaml"
    path.write_text("model: {path: model}\ndata: {train: t.jsonl}\ngrpo: {prompts_per_iteration: 8, group_size: 4}\n")
    return str(path)


@pytest.mark.runs("tandem simulate")
def test_the_command_prints_a_table_and_what_was_guessed(tmp_path: Path) -> None:
    given = ["simulate", "-c", write_config(tmp_path), "--lengths", "constant:50", "--iterations", "3", "--compare"]
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0, shown.output
    assert "guessed: train_s" in shown.output
    assert all(name in shown.output for name in ("schedule.kind: sync", "one_step_off", "async, S=2", "slots idle"))
    assert shown.output.count("\n  trainer |") == shown.output.count("\n  slots   |") == 7
    assert "\x1b" not in shown.output
    plain = CliRunner().invoke(app, [*given, "--json"])
    found = json.loads(plain.output)
    assert [one["schedule"] for one in found["schedules"]][:2] == ["schedule.kind: sync", "sync"]
    assert found["schedules"][0]["iteration_s"] == pytest.approx(found["schedules"][1]["iteration_s"])


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([], "--lengths"),
        (["--lengths", "constant:50", "--set", "schedule.kind=async"], "grpo.preset: decoupled"),
        (["--run", "nowhere"], "no finished iterations"),
        (["--lengths", "constant:50", "--step-ms", "0", "--row-ms", "0"], "a step that takes some"),
        (["--lengths", "constant:50", "--train-s", "inf"], "need finite seconds"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, more: list[str], named: str) -> None:
    shown = CliRunner().invoke(app, ["simulate", "-c", write_config(tmp_path), *more])
    assert shown.exit_code == 2
    assert named in shown.output
