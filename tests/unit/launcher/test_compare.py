"""`tandem compare`: the figures of several runs, the settings in which they differ, a picture, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.view.compare.differences import differing
from launcher.view.compare.picture import smoothed
from launcher.view.compare.runs import curve_of, read_runs
from launcher.view.compare.table import compare_command

OWN: dict[str, Any] = {
    "kind": "function",
    "function": "/home/me/mine.py:score",
    "args": {},
    "name": None,
    "weight": 1.0,
}
SHORT: dict[str, Any] = {"kind": "length", "name": "short", "full_tokens": 1, "weight": 0.5}


def write_run(folder: Path, rewards: list[float], reward: object = OWN, **trainer: float) -> Path:
    folder.mkdir(parents=True)
    settings = {"run": {"name": folder.name, "iterations": 4}, "trainer": trainer, "trackers": [], "reward": reward}
    (folder / "config.resolved.yaml").write_text(yaml.safe_dump(settings))
    rows = [
        {
            "iteration": place,
            "reward_mean": reward,
            "loss": -reward,
            "iteration_s": 2.0 * place,
            "heldout_accuracy": None,
        }
        for place, reward in enumerate(rewards, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    state = {
        "status": "running",
        "initial_accuracy": None,
        "troubles": ["Entropy is low."] if len(rewards) == 1 else [],
    }
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def command(*folders: Path, metrics: tuple[str, ...] = (), out: Path | None = None) -> int:
    return compare_command(folders, metrics, smooth=0.6, out=out, last=2)


def test_figures_times_settings_and_troubles_are_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "one", [0.1, 0.9, 0.5, 0.7], learning_rate=1e-4, clip_grad=1.0)
    two = write_run(tmp_path / "two", [0.3], learning_rate=2e-4, clip_grad=1.0)
    assert command(one, two) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "reward_mean first final best at mean of last 2" in lines
    assert "one 0.1 0.7 0.9 2 0.6" in lines
    assert "one 4/4 running 5 - - - -" in lines
    assert "trainer.learning_rate 0.0001 0.0002" in lines
    assert not any("clip_grad" in line or "run.name" in line for line in lines)
    assert "! two: Entropy is low." in lines


def test_a_run_without_an_iteration_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = write_run(tmp_path / "one", [0.1, 0.9]), write_run(tmp_path / "two", [])
    assert command(one, two) == 0
    printed = capsys.readouterr().out
    assert "one" in printed
    assert [line for line in printed.splitlines() if "two" in line] == [
        "! two: left out, it has no finished iteration yet (state: running)"
    ]


def test_lines_fit_into_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [write_run(tmp_path / f"a-run-with-{name}", [0.123456] * 4, learning_rate=rate)
               for name, rate in (("one-name", 1e-4), ("another", 2e-5))]  # fmt: skip
    assert command(*folders) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("code", "other", "differ"),
    [
        ("c2e4", "f70d", {"reward score: mine.py": ["c2e4", "f70d"]}),
        ("c2e4", "c2e4", {}),
        ("c2e4", None, {}),  # of an older release: it has not recorded its rewards
    ],
)
def test_a_changed_reward_is_a_difference(code: str, other: str | None, differ: object, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [0.1]) for name in ("one", "two")]
    for folder, digest in zip(folders, (code, other), strict=True):
        recorded = {"reward score: kind": '"function"', "reward score: code of /home/me/mine.py": digest}
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(state | {"rewards": recorded if digest else {}}))
    assert differing(read_runs(folders)) == differ


def test_a_changed_file_of_an_environment_is_a_difference(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [0.1]) for name in ("one", "two")]
    for folder, digest in zip(folders, ("c2e4", "f70d"), strict=True):
        recorded = {f"environment: code of /mine/{name}.py": f"{digest}" for name in ("tools", "more")}
        (folder / "state.json").write_text(json.dumps({"rewards": recorded | {"environment: code of same.py": "a"}}))
    assert differing(read_runs(folders)) == {f"environment: {name}.py": ["c2e4", "f70d"] for name in ("tools", "more")}


@pytest.mark.parametrize(
    ("one", "two", "differ"),
    [
        (OWN, [OWN], {}),
        (OWN, [OWN, SHORT], {"rewards": ["score", "score + 0.5 short"]}),
        ([SHORT, OWN], [OWN | {"weight": 2}, SHORT], {"rewards": ["0.5 short + score", "2 score + 0.5 short"]}),
        (
            [OWN, SHORT],
            [OWN | {"args": {"scale": 2}}, SHORT | {"kind": "overlong"}],
            {
                "reward score: args": ["{}", "-"],
                "reward score: args.scale": ["-", "2"],
                "reward short: kind": ["length", "overlong"],
            },
        ),
    ],
)
def test_rewards_are_compared_by_name(one: object, two: object, differ: object, tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [0.1], reward) for name, reward in (("one", one), ("two", two))]
    for folder in folders:
        named = [name for name in ("score", "short") if name in (folder / "config.resolved.yaml").read_text()]
        recorded = {f"reward {name}: code of /home/me/{name}.py": "f70d" for name in named}
        (folder / "state.json").write_text(json.dumps({"rewards": recorded}))
    assert differing(read_runs(folders)) == differ


def test_what_differs_is_not_shortened_to_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    several = [SHORT | {"name": f"r{place}"} for place in range(9)]
    tail = "/the/same/folder/of/tasks/for/all.py:score"
    mine, theirs = (OWN | {"function": f"/{who}{tail}"} for who in ("mine", "theirs"))
    assert command(write_run(tmp_path / "one", [0.1], several), write_run(tmp_path / "two", [0.1], mine)) == 0
    printed = capsys.readouterr().out
    assert all(f"0.5 r{place}" in printed for place in range(9))
    assert command(write_run(tmp_path / "a", [0.1], mine), write_run(tmp_path / "b", [0.1], theirs)) == 0
    assert "/theirs" in capsys.readouterr().out


def test_of_a_loss_the_least_is_best(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "one", [0.1, 0.9, 0.5])])
    losses, rewards = curve_of(run, "loss", 2), curve_of(run, "reward_mean", 2)
    assert losses is not None
    assert rewards is not None
    assert (losses.best, losses.best_at, rewards.best, rewards.best_at) == (-0.9, 2, 0.9, 2)
    assert curve_of(run, "heldout_accuracy", 2) is None


@pytest.mark.parametrize(
    ("metric", "best"),
    [("tokens_per_s", 2.0), ("train_s", 1.0), ("eval/a/truncated_ratio", 1.0), ("eval/a/mean@1", 2.0), ("own", 2.0)],
)
def test_the_table_says_which_end_of_a_metric_is_best(metric: str, best: float, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [0.1, 0.9])
    rows = [{"iteration": number, metric: float(number)} for number in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = curve_of(read_runs([folder])[0], metric, 2)
    assert curve is not None
    assert curve.best == best


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / place / "a", [0.1]) for place in ("here", "there")])
    assert [run.label for run in runs] == ["here/a", "there/a"]
    assert differing(runs) == {}


@pytest.mark.timeout(60)  # imports matplotlib
def test_the_picture_has_the_format_of_its_suffix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = write_run(tmp_path / "one", [0.1, 0.9]), tmp_path / "curves.svg"
    assert command(run, metrics=("loss", "reward_mean"), out=out) == 0
    assert "<svg" in out.read_text()
    assert f"curves: {out}" in capsys.readouterr().out.replace("\n", "")


def test_smoothing_has_no_bias_to_the_first_value() -> None:
    assert smoothed([3.0, 3.0, 3.0], 0.9) == pytest.approx([3.0] * 3)
    assert smoothed([1.0, 2.0], 0.0) == [1.0, 2.0]


@pytest.mark.parametrize(
    ("folders", "metrics", "out", "words"),
    [
        (["nosuch"], [], None, "nosuch is not a run's folder: there is no such folder"),
        (["."], [], None, "it has no config.resolved.yaml"),
        (["empty"], [], None, "no finished iteration yet in empty"),
        (["one", "one"], [], None, "is given twice"),
        (["one"], ["los"], None, "--metric los: no run has measured it; did you mean loss?"),
        (["one"], [], "x.mp3", "give it one of the suffixes"),
        (["one"], [], "nosuch/x.png", "cannot be written: No such file"),
    ],
)
def test_what_cannot_be_compared_is_named(
    folders: list[str],
    metrics: list[str],
    out: str | None,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "one", [0.1])
    write_run(tmp_path / "empty", [])
    chosen = None if out is None else tmp_path / out
    assert command(*(tmp_path / name for name in folders), metrics=tuple(metrics), out=chosen) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.out == ""
