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
from launcher.simulate.command import _engine_fit, _engine_table, _measured, measured_in, read_lengths
from launcher.simulate.engine import EngineSpeed, SimulatedReplica
from launcher.simulate.plot import plot
from launcher.simulate.virtual_loop import run
from launcher.simulate.world import Figures, ServiceSpeeds, simulate
from servicekit.errors import ConfigError
from tandem_clients.flow import Group, Order, Prompt, Sampling
from tandem_clients.sample_stream import OpenGroup
from tandem_config.schema import RunConfig
from tandem_files.metrics_file import METRICS_FILE
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import TRAIN, table_of

MINIMAL = "model: {path: model}\ndata: {train: t.jsonl}\ngrpo: {prompts_per_iteration: 8, group_size: 4}\n"
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


@pytest.mark.parametrize("prefill_s", [0.0, 0.25])
def test_an_engine_gives_each_row_a_token_a_step_and_lets_the_others_wait(prefill_s: float) -> None:
    lengths = {0: 10, 1: 30, 2: 20}
    replica = SimulatedReplica(
        name="r",
        slots=2,
        kv_tokens=0,
        speed=EngineSpeed(step_s=0.0, row_s=0.1, prefill_s=prefill_s),
        length_of=lambda name, index: lengths[index],
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
            asyncio.get_running_loop().call_later(prefill_s + 1.0, replica.flip, 1)  # 5 steps of two rows
            async for news in stream.news():
                if news.whole:
                    break
            ended_s = asyncio.get_running_loop().time()
        await replica.close()
        return group.group(), ended_s

    group, ended_s = run(story())
    # 0 and 1 for 10 steps of 0.2 s, then 2 in the place of 0: 20 steps until both end. Twice one begins.
    assert ended_s == pytest.approx(6.0 + 2 * prefill_s)
    assert replica.busy_row_s == pytest.approx(2 * ended_s)
    spans = [completion.version_spans for completion in group.completions]
    assert spans == [((5, 0), (10, 1)), ((5, 0), (30, 1)), ((20, 1),)]
    assert [completion.oldest_version for completion in group.completions] == [0, 0, 1]


def test_tokens_in_the_kv_cache_make_steps_longer() -> None:
    speed = EngineSpeed(step_s=0.01, row_s=0.001, kv_s=0.0001)
    one_by_one_s = sum(0.01 + 0.002 + 0.0001 * (50 + 2 * step + 1) for step in range(30))
    assert speed.seconds(30, 2, 50) == pytest.approx(one_by_one_s)
    assert speed.steps(one_by_one_s, 2, 50) == pytest.approx(30)


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


def decoded(lengths: Sequence[int], slots: int, speed: EngineSpeed) -> tuple[float, float]:
    """Seconds until all have run, one after another in free slots, and those in which slots were busy: step by step."""
    waiting, took_s, busy_s = list(lengths), 0.0, 0.0
    running: list[list[int]] = []  # tokens that are left, tokens that there are
    while waiting or running:
        step_s = speed.prefill_s if waiting and len(running) < slots else 0.0
        while waiting and len(running) < slots:
            running.append([waiting.pop(0), 0])
        step_s += speed.step_s + speed.row_s * len(running) + speed.kv_s * sum(tokens for _, tokens in running)
        took_s += step_s
        busy_s += step_s * len(running)
        running = [[left - 1, tokens + 1] for left, tokens in running if left > 1]
    return took_s, busy_s


@pytest.mark.parametrize("slots", [16, 100])
@pytest.mark.parametrize("kv_s", [0.0, 4e-6])
def test_an_engines_speed_is_found_from_generations(slots: int, kv_s: float) -> None:
    """Also where completions wait for slots, and all generations last about as long: their longest one is the limit."""
    chance = np.random.default_rng(0)
    speed = EngineSpeed(step_s=0.02, row_s=0.0003, kv_s=kv_s, prefill_s=0.02)
    lengths = {number: np.append(chance.integers(1, 40, 63), chance.integers(300, 500)) for number in range(1, 25)}
    rows = []
    for number, found in lengths.items():
        took_s, busy_s = decoded(found.tolist(), slots, speed)
        took_s *= chance.uniform(0.999, 1.001)
        idle = {"trainer_compute_s": 1.0, "trainer_idle_ratio": took_s / (took_s + 1.0)}
        idle["rollout_idle_ratio"] = 1.0 - busy_s / (slots * (took_s + 1.0))
        rows.append({"iteration": number, "engine_s": took_s, **idle})
    fit = _engine_fit(np.concatenate(_engine_table(rows, lengths, replicas=1, slots=slots)))
    assert fit == {
        "step_s": pytest.approx(0.02, rel=0.05),
        "row_s": pytest.approx(0.0003, rel=0.15),
        "kv_s": pytest.approx(kv_s, rel=0.15, abs=5e-7),
        "prefill_s": fit["step_s"],
    }


def test_an_engines_speed_is_found_without_a_count_of_busy_slots() -> None:
    chance = np.random.default_rng(0)
    lengths = {number: chance.integers(1, 200, 64) for number in range(1, 9)}
    rows = [
        {"iteration": number, "engine_s": 0.02 * (found.max() + 1) + 0.0003 * found.sum() / 2}
        for number, found in lengths.items()
    ]
    fit = _engine_fit(np.concatenate(_engine_table(rows, lengths, replicas=2, slots=64)))
    assert fit["step_s"] == pytest.approx(0.02, rel=1e-3)
    assert fit["row_s"] == pytest.approx(0.0003, rel=1e-3)


def test_figures_of_a_run_are_shares_of_all_seconds() -> None:
    """A short iteration counts less than a long one, an age by its tokens."""
    rows = [
        {"trainer_compute_s": 1.0, "trainer_idle_ratio": 0.5, "rollout_idle_ratio": 0.2}
        | {"generated_tokens": 100, "token_age_mean": 1.0, "staleness_max": 1, "masked_tokens": 0},
        {"trainer_compute_s": 6.0, "trainer_idle_ratio": 0.0, "rollout_idle_ratio": 0.6}
        | {"generated_tokens": 300, "token_age_mean": 2.0, "staleness_max": 3, "masked_tokens": 40},
    ]
    found = _measured("run", rows)
    assert found.iteration_s == pytest.approx(4.0)
    assert [found.trainer_idle, found.slots_idle] == pytest.approx([1 / 8, 0.5])
    assert [found.age_mean, found.age_max, found.wasted] == pytest.approx([1.75, 3, 0.1])


def write_config(folder: Path) -> str:
    path = folder / "c.yaml"
    path.write_text(MINIMAL)
    return str(path)


def write_run(folder: Path, kind: str, *, train_s: float) -> str:
    """A run of three iterations, of which the first one is slower; each has 32 completions of 10 to 40 tokens."""
    folder.mkdir()
    (folder / RESOLVED_CONFIG).write_text(
        f"{MINIMAL}schedule: {{kind: {kind}}}\nrollout: {{max_running_requests: 64}}\n"
    )
    rows = []
    for number in (1, 2, 3):
        lengths = [10 * (number + 1)] * 32
        named = {"iteration": [number] * 32, "kind": [TRAIN] * 32, "num_tokens": lengths, "use": ["trained"] * 32}
        named |= {name: [name] * 32 for name in ("group_id", "source", "finish_reason")}
        named |= {"sample": list(range(32)), "row": [1] * 32}
        SampleFolder(folder).write(number, TRAIN, table_of(32, **named))
        generate_s, whole_s = 0.02 * (lengths[0] + 1), 0.02 * (lengths[0] + 1) + train_s + 0.5
        row = {"iteration": number, "generated_tokens": sum(lengths), "engine_s": generate_s, "sync_s": 0.25}
        row |= {"trainer_compute_s": train_s, "trainer_idle_ratio": 1 - train_s / whole_s}
        row |= {"train_s": train_s + 0.05, "batch_s": 0.01, "reward_s": 0.04, "token_age_mean": 0.0}
        rows.append(row | {"rollout_idle_ratio": 1 - 32 * generate_s / (64 * whole_s)})
    rows[0]["sync_s"] = 9.0
    (folder / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_services_are_as_fast_as_in_all_runs_together(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / kind, kind, train_s=train_s) for kind, train_s in (("sync", 1.0), ("async", 2.0))]
    found, remarks = measured_in([Path(run) for run in runs])
    assert remarks == []
    assert [found[name] for name in ("train_s", "sync_s", "reward_s")] == pytest.approx([1.5, 0.25, 0.1])
    assert found["step_s"] == found["prefill_s"] == pytest.approx(0.02, rel=0.01)
    assert len(found["lengths"]) == 2 * 3 * 32
    assert "kind async" in measured_in([Path(runs[1])])[1][0]


def test_a_run_is_shown_beside_what_is_simulated_of_it(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", "sync", train_s=1.0)
    given = ["simulate", "-c", write_config(tmp_path), "--run", run_dir, "--against", run_dir]
    simulated, measured = json.loads(CliRunner().invoke(app, [*given, "--json"]).output)["schedules"]
    assert measured["schedule"] == f"measured in {run_dir}"
    assert simulated["iteration_s"] == pytest.approx(measured["iteration_s"], rel=0.1)
    shown = CliRunner().invoke(app, given)
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("|") == 4, "a time line of what was simulated only"


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
        (["--lengths", "constant:50", "--against", "nowhere"], "no finished iterations with a train step; 2 needed"),
        (["--lengths", "constant:50", "--step-ms", "0", "--row-ms", "0"], "a step that takes some"),
        (["--lengths", "constant:50", "--train-s", "inf"], "need finite seconds"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, more: list[str], named: str) -> None:
    shown = CliRunner().invoke(app, ["simulate", "-c", write_config(tmp_path), *more])
    assert shown.exit_code == 2
    assert named in shown.output
