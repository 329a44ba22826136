"""What a run looks like: progress lines, the closing summary, the reward curve, the last line, the log's reason."""

import asyncio
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launcher.report import make_console
from launcher.run import outcome
from launcher.run.supervisor import last_error
from launcher.view.follow import Follower, show_event
from launcher.view.metric_columns import columns_for, heading, line, rewards_line
from launcher.view.run_view import RunView
from launcher.view.status import describe
from launcher.view.summary import plot_rewards, print_summary, summary_lines
from servicekit.lifecycle.tasks import cancel
from servicekit.redis.registry import Registry
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_files.checkpoints import mark_complete, step_folder
from tests.kit.waiting import until

ROW = {
    "iteration": 3, "reward_mean": 0.5, "response_length_mean": 3.25, "entropy": 0.125, "logprob_abs_diff_max": 3e-6,
    "tokens_per_s": 4321.0, "generate_s": 0.8, "train_s": 0.5, "sync_s": 0.05, "policy_version": 12,
    "iteration_s": 1.5, "engine_s": 0.7, "trainer_compute_s": 0.45, "overhead_share": 0.1,
}  # fmt: skip
SUMMARY: dict[str, Any] = {
    "iterations": 3, "initial_accuracy": 0.268, "final_accuracy": 0.962, "wall_s": 61.24, "generated_tokens": 123456,
    "trained_samples": 3072, "policy_version": 12, "logprob_abs_diff_max": 3.1e-6,
    "weight_sync": {"count": 4, "total_s_median": 0.0512, "total_s_max": 0.2,
                    "bytes_per_rollout_rank": 1790208, "redundancy": 1.0},
    "time": {"overhead_share_median": 0.104},
}  # fmt: skip


def terminal(stream: io.StringIO, width: int) -> Console:
    return Console(file=stream, width=width, highlight=False, soft_wrap=True, force_terminal=True, color_system=None)


def plain_view() -> tuple[RunView, io.StringIO]:
    stream = io.StringIO()
    return RunView(Console(file=stream, highlight=False, soft_wrap=True), 40), stream


@pytest.mark.parametrize(("width", "titles"), [(79, 9), (100, 11), (130, 14)])
def test_lines_fit_the_terminal_and_their_heading(width: int, titles: int) -> None:
    for total in (40, 999, 100_000):
        columns = columns_for(width, total)
        assert len(columns) == titles
        row = {**ROW, "iteration": total, "truncated_ratio": 1.0, "zero_variance_ratio": 1.0}
        assert len(line(columns, row, total, "10d 10h")) == len(heading(columns, total)) <= width


def test_a_line_says_what_an_engineer_looks_at_first() -> None:
    columns = columns_for(80, 40)
    row = {**ROW, "truncated_ratio": 0.25, "zero_variance_ratio": 1.0}
    titles = heading(columns, 40).split("  ")
    assert [title.strip() for title in titles if title.strip()] == [
        *("iter", "reward", "heldout", "length", "cut%", "same%", "entropy", "tok/s", "all s", "left")
    ]
    assert line(columns, row, 40, "1:05").split() == [
        *("3/40", "0.500", "-", "3.2", "25", "100", "0.125", "4321", "1.5", "1:05")
    ]
    assert set(line(columns, {}, 40).split()) == {"-"}


REWARDS = {"reward/math_verify_mean": 0.412, "reward/tidy_mean": 0.9}


@pytest.mark.parametrize(("width", "among"), [(80, False), (96, False), (97, True), (160, True)])
def test_a_list_of_rewards_has_columns_where_there_is_room(width: int, among: bool) -> None:
    stream = io.StringIO()
    view = RunView(terminal(stream, width), 40)
    for _ in range(2):
        view.iteration({**ROW, **REWARDS})
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].split()[1:4] == ["reward", *(["math_verify", "tidy"] if among else ["heldout", "length"])]
    assert lines[1].split()[1:4] == (["0.500", "0.412", "0.900"] if among else ["0.500", "-", "3.2"])
    assert lines[2:4] == ([lines[1]] if among else ["       math_verify 0.412  tidy 0.900", lines[1]])


@pytest.mark.parametrize("width", [80, 160])
def test_a_reward_s_weight_stands_beside_its_mean_which_it_is_no_part_of(width: int) -> None:
    stream = io.StringIO()
    RunView(terminal(stream, width), 40, weights={"math_verify": 1.0, "tidy": 0.3}).iteration({**ROW, **REWARDS})
    lines = stream.getvalue().splitlines()
    if width == 80:
        assert lines[2] == "       math_verify 0.412  tidy 0.900 x 0.3"
    else:
        assert lines[0].split()[1:6] == ["reward", "math_verify", "tidy", "x", "0.3"]
        assert lines[1].split()[1:4] == ["0.500", "0.412", "0.900"]


def test_one_reward_is_not_shown_twice_and_many_are_cut() -> None:
    columns = columns_for(80, 40)
    assert rewards_line(columns, {**ROW, "reward/math_verify_mean": 0.5}, 40, 80) == ""
    many = {f"reward/a_reward_of_mine_{n}_mean": n / 10 for n in range(9)}
    text = rewards_line(columns, many, 40, 80)
    assert len(text) == 80
    assert text.endswith("…")
    wide = columns_for(300, 40, ["a_name_of_twenty_chrs"])
    assert "a_name_of_twent…" in heading(wide, 40)


def test_rewards_come_as_configured_with_the_accuracy_first_and_parts_last() -> None:
    rewards = {
        "reward/tidy_mean": 0.9,
        "reward/zeal_mean": 0.2,
        "reward/answer_mean": 0.4,
        "reward/answer_calls_mean": 2.0,
    }
    stream = io.StringIO()
    view = RunView(terminal(stream, 80), 40, weights={"zeal": 1.0, "tidy": 1.0, "answer": 1.0})
    view.iteration({**ROW, **rewards})
    assert stream.getvalue().splitlines()[2].split() == [
        *("zeal", "0.200", "tidy", "0.900", "answer", "0.400", "answer_calls", "2.000")
    ]


def test_a_file_has_every_column_and_every_reward() -> None:
    view, stream = plain_view()
    rewards = {f"reward/a_reward_of_mine_{n}_mean": n / 10 for n in range(9)}
    view.iteration({**ROW, **rewards})
    titles, figures = stream.getvalue().splitlines()
    assert [title for title in titles.split() if title.startswith(("a_rew", "version", "gen"))] == [
        *(f"a_reward_of_mine_{n}" for n in range(9)),
        *("gen", "version"),
    ]
    assert figures.split()[1:11] == ["0.500", *(f"0.{n}00" for n in range(9))]


def test_rewards_are_in_the_summary_and_in_the_status_of_a_run_under_way(tmp_path: Path) -> None:
    rows: list[dict[str, float | None]] = [{**ROW, **REWARDS}]
    rows.append({**ROW, "reward/math_verify_mean": 0.73, "reward/tidy_mean": None})
    assert dict(summary_lines(SUMMARY, rows, tmp_path))["rewards"] == "math_verify 0.412 -> 0.730 (unweighted)"
    plain = [{**rows[0], "reward_mean": 1.312}]
    assert dict(summary_lines(SUMMARY, plain, tmp_path))["rewards"] == "math_verify 0.412, tidy 0.900"
    assert "rewards" not in dict(summary_lines(SUMMARY, [ROW], tmp_path))
    (tmp_path / "config.resolved.yaml").write_text("run: {}")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    assert dict(describe(tmp_path))["rewards"] == "math_verify 0.412, tidy 0.900 (unweighted)"


def test_the_time_left_is_in_the_line_and_beside_the_spinner() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    view = RunView(console, 40, lambda rows: 60.0 * len(rows))
    view.iteration(ROW)
    view.doing("train")
    view.close()
    assert stream.getvalue().splitlines()[1].endswith("1:00")
    assert "train; about 1:00 left" in stream.getvalue()


def test_events_become_plain_lines_without_control_codes() -> None:
    view, stream = plain_view()
    events = [
        pb.WatchEventsResponse(kind=pb.EVENT_KIND_STATE, message="running"),
        pb.WatchEventsResponse(kind=pb.EVENT_KIND_PROGRESS, message="generate"),
        pb.WatchEventsResponse(kind=pb.EVENT_KIND_EVALUATION, message="held-out accuracy 0.268 at version 0"),
        pb.WatchEventsResponse(kind=pb.EVENT_KIND_ITERATION, message="iteration 3", values=ROW),
        pb.WatchEventsResponse(
            kind=pb.EVENT_KIND_EVALUATION, message="again", values={"iteration": 3, "heldout_accuracy": 0.3}
        ),
        pb.WatchEventsResponse(kind=pb.EVENT_KIND_EVALUATION, message="aime: mean@4 0.5", values={"iteration": 3}),
        pb.WatchEventsResponse(kind=pb.EVENT_KIND_WARNING, message="look [here]"),
    ]
    for event in events:
        show_event(event, view)
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines == [
        "running",
        "held-out accuracy 0.268 at version 0",
        heading(columns_for(999, 40), 40),
        line(columns_for(999, 40), ROW, 40),
        "aime: mean@4 0.5",
        "warning: look [here]",
    ]
    assert "\x1b" not in stream.getvalue()


def test_the_heading_comes_again_every_twenty_rows() -> None:
    view, stream = plain_view()
    for _ in range(21):
        view.iteration(ROW)
    assert stream.getvalue().count(heading(columns_for(999, 40), 40)) == 2


async def test_the_services_that_a_run_waits_for_are_named_again(redis_server: str) -> None:
    view, stream = plain_view()
    roles = {"trainer": ["trainer"], "rollout": ["rollout-1", "rollout-0"]}
    registry = await asyncio.to_thread(Registry, redis_server, "t")
    follower = Follower(registry=registry, roles=roles, view=view, on_address=lambda _: None, token="", remind_s=0.1)
    following = asyncio.create_task(follower.follow())
    try:
        named = "  waiting for rollout-0, rollout-1, trainer: "
        await asyncio.to_thread(until, lambda: stream.getvalue().count(named) > 1, 4.0)
    finally:
        await cancel(following)


def test_a_terminal_gets_a_spinner_and_is_left_clean() -> None:
    stream = io.StringIO()
    view = RunView(Console(file=stream, force_terminal=True, width=120), 40)
    view.doing("starting Redis")
    view.doing("waiting for trainer")
    view.close()
    assert "\x1b[?25l" in stream.getvalue()  # cursor hidden ...
    assert stream.getvalue().rstrip().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")  # ... and shown again


def test_output_into_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print("x" * 300)
    assert capsys.readouterr().out == "x" * 300 + "\n"


def test_the_summary_says_what_the_run_was_worth(tmp_path: Path) -> None:
    lines = dict(summary_lines(SUMMARY, [ROW, ROW], tmp_path))
    assert lines["held-out accuracy"] == "0.268 -> 0.962"
    assert lines["weight sync"] == "4 rounds, median 0.051 s, longest 0.200 s"
    assert lines["bytes per rank"] == "1,790,208 per sync, redundancy 1.00"
    assert lines["added by Tandem"].startswith("10.4% of an iteration")
    assert lines["time goes to"] == (
        "engine 47%, trainer 30%, generation beyond the engine 7%, training beyond the model 3%, sync 3%, other 10%"
    )
    with_turns = dict(summary_lines(SUMMARY, [ROW | {"turns_mean": 2.0}], tmp_path))
    assert with_turns["time goes to"].startswith("engine and environment 47%, trainer 30%")


@pytest.mark.parametrize(
    ("scores", "is_share", "title", "text"),
    [
        ((0.268, 0.962), None, "held-out accuracy", "0.268 -> 0.962"),
        ((-0.5, 0.25), None, "held-out reward", "-0.500 -> 0.250"),
        ((0.2, 0.5), False, "held-out reward", "0.200 -> 0.500"),
        ((0.0, 1.0), True, "held-out accuracy", "0.000 -> 1.000"),
    ],
)
def test_what_is_no_share_is_called_a_reward(
    tmp_path: Path, scores: tuple[float, float], is_share: bool | None, title: str, text: str
) -> None:
    said = {} if is_share is None else {"accuracy_is_share": is_share}
    summary = {**SUMMARY, "initial_accuracy": scores[0], "final_accuracy": scores[1], **said}
    lines = dict(summary_lines(summary, [ROW, ROW], tmp_path))
    assert {name: found for name, found in lines.items() if "held-out" in name} == {title: text}


@pytest.mark.parametrize("reward", [-0.999, -1.0, -5.5, -123.456, 99.5, 123456.789, -2e6, -1e12, 1e300, 1e-9])
def test_a_line_keeps_its_columns_whatever_the_reward(reward: float) -> None:
    columns = columns_for(80, 40)
    text = line(columns, {**ROW, "reward_mean": reward, "heldout_accuracy": reward}, 40)
    assert len(text) == len(heading(columns, 40))
    shown = float(text.split()[1])
    assert shown == pytest.approx(reward, rel=0.05, abs=5e-4)


def test_the_reference_s_passes_are_the_trainer_s_work(tmp_path: Path) -> None:
    """KL in the reward: what is no part of the train step is in trainer_compute_s too."""
    row = {"iteration_s": 10.0, "train_s": 4.0, "reference_s": 3.0, "trainer_compute_s": 6.0, "generate_s": 3.0}
    lines = dict(summary_lines(SUMMARY, [ROW | row | {"engine_s": 3.0}], tmp_path))
    assert "trainer 60%, training beyond the model 10%" in lines["time goes to"]


def test_evaluations_are_summed_up(tmp_path: Path) -> None:
    before = {"eval/heldout/mean@1": 0.2, "eval/my_set/mean@4": 0.25, "eval/my_set/mean@4_low": 0.1}
    after = {
        "eval/heldout/mean@1": 0.4,
        "eval/my_set/mean@4": 0.5,
        "eval/my_set/maj@4": None,
        "eval/my_set/pass@4": 0.75,
    }
    best = {"metric": "my_set/mean@4", "value": 0.5, "iteration": 3}
    lines = dict(summary_lines({"evaluation": {"initial": before, "final": after, "best": best}}, [], tmp_path))
    assert lines["my_set, mean@4"] == "0.250 -> 0.500"
    assert lines["my_set, pass@4"] == "0.750"
    assert lines["best policy"] == "after iteration 3: my_set/mean@4 0.500"
    assert len(lines) == 4
    lines = dict(summary_lines({"evaluation": {"best": best | {"iteration": 0}}}, [], tmp_path))
    assert lines["best policy"].startswith("before the training")


def test_a_summary_with_holes_leaves_them_out(tmp_path: Path) -> None:
    assert [name for name, _ in summary_lines({"wall_s": 1.0}, [], tmp_path)] == ["wall time", "results"]
    console = Console(file=io.StringIO())
    print_summary(console, tmp_path)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


def test_the_curve_is_drawn_if_there_is_something_to_draw(tmp_path: Path) -> None:
    assert plot_rewards(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({**ROW, "iteration": n}) + "\n" for n in (1, 2)))
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    path = plot_rewards(tmp_path)
    assert path == tmp_path / "reward.png"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_last_line_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "runs" / "a"
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text(json.dumps({"iteration": 12}) + "\n")
    step_folder(run_dir, 10).mkdir(parents=True)
    mark_complete(step_folder(run_dir, 10))
    monkeypatch.chdir(tmp_path)
    assert outcome.stopped(run_dir, signal.SIGINT, {}) == outcome.LaunchOutcome(
        code=130,
        text="stopped by Ctrl-C after iteration 12; resume from iteration 10 with: tandem run --resume runs/a",
    )


def test_a_run_that_had_failed_when_the_signal_came_has_failed(tmp_path: Path) -> None:
    state = {"status": "failed", "error": "loss is nan"}
    (tmp_path / "state.json").write_text(json.dumps(state))
    told = outcome.stopped(tmp_path, signal.SIGINT, {**state, "iteration": 3})
    assert (told.code, told.text.partition(";")[0]) == (1, "failed: loss is nan")
    # A resume of it that is stopped before its coordinator has written anything has not failed.
    assert outcome.stopped(tmp_path, signal.SIGINT, state).code == 130


def test_a_coordinator_that_was_stopped_by_a_signal_has_not_finished(tmp_path: Path) -> None:
    assert outcome.ended(tmp_path).code == 0
    (tmp_path / "state.json").write_text('{"status": "interrupted"}')
    assert outcome.ended(tmp_path).code == 1


LOGS = [
    ("", ""),
    ("plain text\n\n", "plain text"),
    ('{"message": "fine", "level": "info"}\n{"message": "no", "level": "error", "error": "rank 1"}\n', "no: rank 1"),
    ('{"message": "bad", "level": "error"}\n{"message": "stopped", "level": "info"}\n', "bad"),
    ('{"message": "bad", "level": "error"}\nTraceback (most recent call last):\n  x\nKeyError: 1\n', "KeyError: 1"),
    ('{"message": "run failed", "level": "error", "exception": "T\\nValueError: x"}\n', "run failed: ValueError: x"),
    ("x" * 2000, "x" * 2000),
    ("x" * 2001, "x" * 1997 + "..."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), LOGS, ids=[str(number) for number in range(len(LOGS))])
def test_the_reason_in_a_log(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "log").write_text(text, encoding="utf-8")
    assert last_error(tmp_path / "log") == reason


def test_a_missing_log_has_no_reason(tmp_path: Path) -> None:
    assert last_error(tmp_path / "log") == ""
