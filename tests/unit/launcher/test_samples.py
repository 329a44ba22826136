"""`tandem samples`: which samples it shows, how they look in a terminal and in a pipe, and what it says of a typo."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from launcher.cli import app
from launcher.view.samples.choose import SampleQuery, choose
from launcher.view.samples.draw import draw
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import MaskedSpan, TextSpan
from tests.kit.folders import stored, write_samples


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = SampleFolder(tmp_path)
    rewards = [0.0, 0.25, 0.5, 0.75, 1.0, 0.1]
    samples = [
        stored(place // 2, place % 2, reward=reward, num_tokens=100 - place, completion=f"answer {place}")
        for place, reward in enumerate(rewards)
    ]
    write_samples(folder, 1, "train", [stored()])
    write_samples(folder, 2, "train", samples)
    write_samples(folder, 2, "heldout", [stored(kind="heldout", advantage=None, use="evaluated")])
    return tmp_path


def ids(run_dir: Path, **wanted: Any) -> list[str]:
    return [
        sample.completion.removeprefix("answer ")
        for sample in choose(SampleFolder(run_dir), SampleQuery(**wanted)).samples
    ]


@pytest.mark.parametrize(
    ("wanted", "shown"),
    [
        ({}, ["4", "3", "0", "5"]),
        ({"ends": [("worst", 2)]}, ["0", "5"]),
        ({"ends": [("best", 1), ("longest", 1), ("shortest", 1)]}, ["4", "0", "5"]),
        ({"group": "g1"}, ["2", "3"]),
        ({"group": "i1.g2.row3", "ends": [("best", 1)]}, ["4"]),
        ({"pattern": "[24]$"}, ["2", "4"]),
        ({"pattern": "[24]$", "ends": [("worst", 1)]}, ["2"]),
        ({"pattern": "nothing like it"}, []),
    ],
)
def test_the_samples_that_are_asked_for(run_dir: Path, wanted: dict[str, Any], shown: list[str]) -> None:
    assert ids(run_dir, **wanted) == shown


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["samples", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-i", "7"], "has no samples of iteration 7; stored: 1, 2"),
        (["-i", "two"], "give a number, or last"),
        (["--group", "g9"], "no group 'g9' in this iteration; its groups: i1.g0.row1, i1.g1.row2, i1.g2.row3"),
        (["--kind", "test"], "no samples of kind 'test'; stored: heldout, train"),
        (["--grep", "("], "'(' is not a regular expression"),
    ],
)
def test_a_wrong_choice_is_named_with_what_there_is(run_dir: Path, arguments: list[str], said: str) -> None:
    code, output = invoke(str(run_dir), *arguments)
    assert code == 2
    assert said in " ".join(output.replace("│", "").split())


def test_a_run_without_samples_and_no_run_are_said(tmp_path: Path) -> None:
    assert invoke(str(tmp_path / "gone")) == (
        2,
        f"{tmp_path / 'gone'} does not exist; give a run's folder, e.g. `tandem samples runs/arithmetic`\n",
    )
    assert "has no stored samples" in invoke(str(tmp_path))[1]


@pytest.mark.runs("tandem samples")
def test_a_pipe_gets_plain_lines(run_dir: Path) -> None:
    code, output = invoke(str(run_dir), "--best", "1")
    assert code == 0
    assert output == (
        f"{run_dir}, iteration 2, train: 6 samples of 3 groups, reward 0.433 (0 to 1), 97.5 tokens, 0% cut off; "
        "also stored: heldout (--kind)\n\n"
        "i1.g2.row3#0  reward 1.000  advantage +0.500  96 tokens, stop  version 0  trained\n"
        "  prompt\n    1+2=\n  completion\n    answer 4\n  answer\n    3\n\n"
        "5 more (--best, --worst, --longest, --shortest K choose others)\n"
    )


def test_the_first_line_says_how_many_samples_fit_the_filters(run_dir: Path) -> None:
    of_all = "all 6 samples of 3 groups, reward 0.433"
    for options, said in (
        (["--grep", "[24]$"], "2 of 6 samples fit --grep"),
        (["--grep", "[24]$", "--group", "g2", "--worst", "1"], "1 of 6 samples fit --group, --grep"),
        (["--grep", "nothing like it"], "0 of 6 samples fit --grep"),
    ):
        first = invoke(str(run_dir), *options)[1].splitlines()[0]
        assert first.startswith(f"{run_dir}, iteration 2, train: {said}; {of_all}")


def test_json_lines_hold_everything(run_dir: Path) -> None:
    code, output = invoke(str(run_dir), "--kind", "heldout", "--json")
    assert code == 0
    (sample,) = [json.loads(line) for line in output.splitlines()]
    assert (sample["completion"], sample["advantage"], sample["use"]) == ("3<eos>", None, "evaluated")


def shown(tmp_path: Path, *, full: bool = False, terminal: bool = True, **changes: Any) -> str:
    folder = SampleFolder(tmp_path)
    write_samples(folder, 1, "train", [stored(**changes)])
    console = Console(file=io.StringIO(), width=80, force_terminal=terminal, soft_wrap=True, color_system=None)
    draw(console, tmp_path, choose(folder, SampleQuery()), full=full)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_a_terminal_of_80_columns_holds_every_line(tmp_path: Path) -> None:
    spans = (TextSpan(end=10, text_end=40, policy_version=3), TextSpan(end=300, text_end=1000, policy_version=4))
    output = shown(
        tmp_path,
        completion="long words " * 90,
        reward_parts={"math": 1.0, "format": 0.5, "length": -0.25},
        version_spans=spans,
    )
    assert max(map(len, output.splitlines())) <= 80
    assert output.count("long words") >= 80
    assert "versions 3 (tokens 1 to 10), 4 (tokens 11 to 300)" in " ".join(output.split())
    assert "(unweighted: math 1, format 0.5, length -0.25)" in " ".join(output.split())
    assert "(math 1, format 0.5, length -0.5)" in shown(
        tmp_path, terminal=False, reward_parts={"math": 1.0, "format": 0.5, "length": -0.5}
    )


def test_what_the_policy_has_not_sampled_is_marked(tmp_path: Path) -> None:
    spans = (MaskedSpan(start=0, end=1, text_start=0, text_end=1), MaskedSpan(start=2, end=3, text_start=2, text_end=4))
    output = shown(tmp_path, terminal=False, completion="abc\x1bd", masked_spans=spans)
    assert "  completion (⟦not sampled by the policy⟧)\n    ⟦a⟧b⟦c\\x1b⟧d\n" in output
    assert "⟦" not in shown(tmp_path, terminal=False)


def test_the_turns_of_an_episode_are_shown_with_what_they_got(tmp_path: Path) -> None:
    call = {"id": "call0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    said = {
        "messages": [
            {"role": "assistant", "content": "I add.", "tool_calls": [call]},
            {"role": "tool", "content": "3\x1b", "branch": True},
            {"role": "assistant", "content": "It is 3."},
        ],
        "rewards": [None, 1.0],
        "end": "failed",
        "error": "g#0: late",
    }
    output = shown(tmp_path, terminal=False, transcript=json.dumps(said))
    assert (
        '  turns\n    assistant: I add. add({"a": 1, "b": 2})\n    (another context) tool: 3\\x1b\n'
        "    assistant (got 1.000): It is 3.\n"
        "    ended: failed, g#0: late\n" in output
    )
    assert "\n  turns\n" not in shown(tmp_path, terminal=False)


def test_a_failed_score_is_no_zero(tmp_path: Path) -> None:
    parts, errors = {"score": 0.0, "short": 0.3}, {"score": "IndexError: list index\x1b"}
    output = shown(tmp_path, terminal=False, reward_parts=parts, errors=errors)
    assert "(unweighted: score failed, short 0.3)" in output
    assert "trained\n  score failed: IndexError: list index\\x1b\n" in output
    assert "0% cut off, 1 with a failed score (--failed)\n" in output
    write_samples(SampleFolder(tmp_path), 2, "train", [stored(), stored(0, 1, errors=errors), stored(1, 0)])
    assert "train: 1 of 3 samples fit --failed; all 3 samples of 2 groups, " in invoke(str(tmp_path), "--failed")[1]
    _, output = invoke(str(tmp_path), "--failed", "--json")
    assert [json.loads(line)["errors"] for line in output.splitlines()] == [errors]
    assert "no sample fits" in invoke(str(tmp_path), "--failed", "--group", "g1")[1]


def test_columns_that_rewards_take_are_shown_in_a_line_and_are_an_object_in_json(tmp_path: Path) -> None:
    row = {"difficulty": 3, "source": "jars\x1b", "hints": ["a" * 90, "b"], "unused": 1, "score": float("nan")}
    named = ("difficulty", "source", "hints", "score")
    output = shown(tmp_path, terminal=False, columns=json.dumps(row), reward_columns=named)
    line = f'difficulty: 3, source: jars\\x1b, hints: ["{"a" * 35}..., score: null'
    assert f"  answer\n    3\n  of the row, for rewards\n    {line}\n" in output
    assert '"b"]' in shown(tmp_path, full=True, columns=json.dumps(row), reward_columns=named)
    _, output = invoke(str(tmp_path), "--json")
    assert json.loads(output)["columns"] == row | {"score": None}
    assert "for rewards" not in shown(tmp_path, columns=json.dumps(row))


def test_a_sample_without_a_reward_is_shown_last(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    rewards = [None, 0.5, 0.25]
    write_samples(folder, 1, "train", [stored(0, k, reward=reward) for k, reward in enumerate(rewards)])
    for order, first in (("worst", 2), ("best", 1)):
        chosen = choose(folder, SampleQuery(ends=[(order, 3)]))
        assert [sample.sample for sample in chosen.samples] == [first, 3 - first, 0]
    assert "no reward" in shown(tmp_path, reward=None)


def test_the_middle_of_a_long_text_is_left_out_unless_asked_for(tmp_path: Path) -> None:
    text = "a" * 800 + "b" * 5000 + "c" * 400
    output = shown(tmp_path, terminal=False, completion=text)
    assert "b" not in output.partition("completion")[2].replace("--full shows them", "")[: output.index("answer")]
    assert "[... 5,000 characters left out, --full shows them ...]" in output
    assert text in shown(tmp_path, terminal=False, full=True, completion=text)


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_do_not_reach_the_terminal(tmp_path: Path, terminal: bool) -> None:
    output = shown(tmp_path, terminal=terminal, completion="a\x1b[2J\x1b]0;title\x07\r\x9bb\u202e[bold]c", full=True)
    assert "a\\x1b[2J\\x1b]0;title\\x07\\r\\x9bb\\u202e[bold]c" in output
    assert not {"\x1b", "\x07", "\r", "\x9b", "\u202e"} & set(output.replace("\x1b[0m", ""))
