"""`tandem top`'s picture of a run, from overviews as the coordinator makes them."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.view.top import show
from launcher.view.top_view import Drawing, sparkline
from tandem_files.run_folder import locked

OVERVIEW: dict[str, Any] = {
    "now_s": 1000.0,
    "run": "sums",
    "state": "running",
    "error": "",
    "part": "generate",
    "part_since_s": 988.0,
    "iteration": 3.0,
    "total_iterations": 40.0,
    "policy_version": 4.0,
    "curves": [
        {"field": "reward_mean", "title": "Reward", "unit": "", "points": [[1, 0.2], [2, 0.4], [3, 0.9]]},
        {"field": "kl_old", "title": "KL(old || new)", "unit": "nats", "points": []},
    ],
    "replicas": [
        {"name": "rollout-0", "there": True, "serving": True, "starts": 1, "policy_version": 4, "sync_s": 0.041,
         "outcome": "committed"},
        {"name": "rollout-1", "there": True, "serving": False, "starts": 2, "policy_version": None, "sync_s": None,
         "outcome": "poisoned"},
        {"name": "rollout-2", "there": False, "serving": False, "starts": 1, "policy_version": 3, "sync_s": 0.05,
         "outcome": ""},
    ],
    "syncs": [
        {"policy_version": 3, "total_s": 0.050, "stages": {"transfer": 0.02, "verify": 0.004}, "bytes_received": 2**21,
         "attempts": 1, "error": ""},
        {"policy_version": 4, "total_s": 0.0, "stages": {}, "bytes_received": 0, "attempts": 1, "error": "lost"},
    ],
    "alerts": [{"name": "TandemReplicaPoisoned", "text": "rollout-1 holds partly written weights."}],
    "messages": [{"time_s": 990.0, "kind": "warning", "text": "rollout-2 left"}],
}  # fmt: skip


def picture(width: int = 160, height: int | None = None, **changes: Any) -> list[str]:
    console = Console(width=width, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(Drawing(OVERVIEW | changes), height=height)
    return captured.get().rstrip().splitlines()


def line(lines: list[str], beginning: str) -> list[str]:
    return next(each.split() for each in lines if each.startswith(beginning))


def test_the_head_says_where_the_run_stands() -> None:
    assert picture()[0] == "sums  running  iteration 3 of 40, policy version 4, generate for 12 s"
    assert "the trainer is gone" in "\n".join(picture(state="failed", error="the trainer is gone"))


def test_curves_show_their_newest_value_and_only_those_that_were_measured() -> None:
    lines = picture()
    assert line(lines, "Reward") == ["Reward", "0.9", "▁▃█"]
    assert not any(each.startswith("KL") for each in lines)


def test_every_replica_has_its_state() -> None:
    lines = picture()
    assert line(lines, "rollout-0") == ["rollout-0", "serving", "4", "0.041", "committed", "1"]
    assert line(lines, "rollout-1") == ["rollout-1", "no", "work", "-", "-", "poisoned", "2"]
    assert line(lines, "rollout-2") == ["rollout-2", "lost", "3", "0.050", "-", "1"]


def test_syncs_are_shown_by_stage_the_newest_first() -> None:
    lines = picture()
    heading = next(each for each in lines if each.startswith("weight sync"))
    assert heading.split()[2:] == ["ms", "total", "transfer", "verify", "MiB", "tries"]
    given_up, committed = [each.split() for each in lines if each.startswith("version ")]
    assert given_up[:4] == ["version", "4", "given", "up"]
    assert committed == ["version", "3", "50.0", "20.0", "4.0", "2.0", "1"]


STAGES = {"rendezvous": 0.3, "prepare": 0.01, "pause": 0.2, "transfer": 0.25, "install": 0.03, "verify": 0.04,
          "commit": 0.05}  # fmt: skip
LARGE: dict[str, Any] = {
    "curves": [
        {
            "field": f"f{n}",
            "title": f"A curve of a long name {n}",
            "unit": "tokens",
            "points": [[i, i / 7] for i in range(90)],
        }
        for n in range(12)
    ],
    "replicas": [OVERVIEW["replicas"][0] | {"name": f"rollout-{n}", "serving": n != 9} for n in range(10)],
    "syncs": [OVERVIEW["syncs"][0] | {"stages": STAGES, "policy_version": 100 + n} for n in range(8)],
    "messages": [{"time_s": 990.0, "kind": "warning", "text": "a long message " * 12} for _ in range(6)],
}


def test_a_terminal_of_80_columns_shows_everything_that_is_cut_nowhere() -> None:
    lines = picture(width=80, **LARGE | {"messages": []})
    assert max(map(len, lines)) <= 80
    assert not any("…" in each for each in lines)
    heading = next(each for each in lines if each.startswith("weight sync"))
    assert heading.split()[2:] == ["ms", "total", "rendezvous", "pause", "transfer", "others", "MiB", "tries"]
    assert line(lines, "version 107") == ["version", "107", "50.0", "300.0", "200.0", "250.0", "130.0", "2.0", "1"]


def test_a_terminal_of_24_lines_shows_something_of_every_part() -> None:
    lines = picture(width=80, height=24, **LARGE)
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert all(any(each.startswith(start) for each in lines) for start in ("A curve", "rollout-", "version"))
    assert any(each.startswith("rollout-9") for each in lines), "the replica without work comes first"
    assert sum("a long message" in each for each in lines) >= 2
    assert picture(width=80, height=60, **LARGE) == picture(width=80, height=200, **LARGE)


def test_the_head_says_how_long_it_still_takes() -> None:
    assert picture(left_s=3725.0, current={"tokens_per_s": 4321.4})[1].endswith("about 1:02:05 left, 4,321 tokens/s")
    assert "left" not in picture(left_s=3725.0, state="finished")[1]
    assert "left" not in picture(left_s=None)[1]


def test_alerts_and_messages_are_there() -> None:
    text = "\n".join(picture())
    assert "! TandemReplicaPoisoned: rollout-1 holds partly written weights." in text
    assert "rollout-2 left" in text


def test_a_run_that_has_just_begun_is_drawn_too() -> None:
    lines = picture(curves=[], replicas=[], syncs=[], alerts=[], messages=[], state="starting", part="", iteration=0.0)
    assert lines[0] == "sums  starting  iteration 0 of 40, policy version 4"


def test_a_level_curve_is_level() -> None:
    assert sparkline([(1, 2.0), (2, 2.0)]) == "▁▁"
    assert len(sparkline([(i, float(i)) for i in range(100)], width=10)) == 10


def drawn(run_dir: Path, *, terminal: bool) -> str:
    console = Console(file=StringIO(), width=100, height=30, force_terminal=terminal, color_system=None)
    with console.capture() as captured:
        show(run_dir, console, once=False)
    return captured.get()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of which 2 iterations of 3 are done; its state is written by the tests."""
    (tmp_path / "config.resolved.yaml").write_text("run: {iterations: 3}")
    rows = [{"iteration": n, "reward_mean": n / 4, "reward/tidy_mean": 0.5, "iteration_s": 1.0} for n in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def write_status(run_dir: Path, **state: Any) -> None:
    (run_dir / "state.json").write_text(json.dumps({"iteration": 2, "policy_version": 4, **state}))


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_is_over_is_drawn_from_its_folder(run_dir: Path, terminal: bool) -> None:
    """In a terminal too it is drawn, and ends."""
    write_status(run_dir, status="failed", error="the trainer is gone")
    text = drawn(run_dir, terminal=terminal)
    assert f"{run_dir.name}  failed  iteration 2 of 3, policy version 4\nthe trainer is gone" in text
    lines = [each.rstrip() for each in text.splitlines()]
    assert line(lines, "Reward ") == ["Reward", "0.5", "▁█"]
    assert line(lines, "Reward: tidy") == ["Reward:", "tidy", "0.5", "▁▁"]


def test_a_run_that_nobody_runs_here_is_drawn_with_a_warning(run_dir: Path) -> None:
    write_status(run_dir, status="running")
    text = drawn(run_dir, terminal=False)
    assert "running  iteration 2 of 3" in text
    assert "no launcher runs it on this machine" in text


def test_a_run_that_is_resumed_is_starting_whatever_the_launch_before_has_left(run_dir: Path) -> None:
    write_status(run_dir, status="interrupted", error="by SIGTERM")
    with locked(run_dir):
        text = drawn(run_dir, terminal=False)
    assert "starting  iteration 2 of 3" in text
    assert "SIGTERM" not in text
