"""`tandem score`: a configuration's rewards on completions of a file, the command line, a notebook."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from launcher.cli import app
from launcher.score import Report, score
from servicekit.errors import ConfigError
from tandem_config.problems import ConfigErrors
from tandem_files.rows.problems import DataError
from tests.kit.folders import write_config

pytestmark = pytest.mark.timeout(60)  # workers start

CODE = """
def score(completions, answer, level=None, **kwargs):
    return [None if text == "9" else {"score": float(text == right), "acc/strict": 1 / len(text)}
            for text, right in zip(completions, answer)]

def rank(completions):
    return [len(completions)] * len(completions)

def late(completion):
    import time
    time.sleep(5 if completion == "9" else 0)
    return 1
"""
REWARDS: list[dict[str, Any]] = [
    {"kind": "exact_match"},
    {"kind": "overlong", "weight": 0.5, "cache_tokens": 2},
    {"function": "mine.py:score", "weight": 2.0},
]
ROWS: list[dict[str, Any]] = [
    {"prompt": "1+2=", "answer": "3", "completion": "3<eos>"},
    {"prompt": "1+2=", "answer": "3", "completion": "123"},
    {"prompt": "1+3=", "answer": "4", "completions": ["9", "4"]},
    {"prompt": "1+4=", "answer": "5", "completion": "5", "finish_reason": "length"},
]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return configured(tmp_path, REWARDS)


def configured(folder: Path, rewards: list[dict[str, Any]]) -> Path:
    (folder / "mine.py").write_text(CODE)
    file = write_config(folder)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"reward": rewards}))
    return file


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (folder / "out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "out.jsonl"


def test_each_completion_has_its_scores_their_sum_and_the_reasons(tmp_path: Path, config: Path) -> None:
    report = score(config, written(tmp_path, ROWS))
    assert [(one.place, one.completion, one.reward) for one in report.completions] == [
        ("out.jsonl:1#0", "3", 3.0),
        ("out.jsonl:2#0", "123", -0.5),
        ("out.jsonl:3#0", "9", 0.0),
        ("out.jsonl:3#1", "4", 3.0),
        ("out.jsonl:4#0", "5", 2.0),
    ]
    assert report.completions[2].scores == {"exact_match": 0.0, "overlong": 0.0, "score": None}
    assert [dict(one.why) for one in report.completions[1:3]] == [
        {"exact_match": "'123' is not '3'", "overlong": "4 tokens"},
        {"exact_match": "'9' is not '4'", "overlong": "2 tokens", "score": "it returned None: it does not apply"},
    ]
    assert report.completions[4].why["exact_match"] == "cut off by the length limit, and require_stop is true"
    assert report.totals["means"]["score"] == 0.75
    assert all(one.seconds["score"] >= 0.0 for one in report.completions)
    assert report.remarks == ["reward score: part 'acc/strict' is reported as acc_strict"]
    assert report.would_end == ""


def test_parquet_messages_a_column_of_another_name_and_rows_in_memory(tmp_path: Path, config: Path) -> None:
    plain = [{"prompt": "1+2=", "answer": "3", "response": "3"}, {"prompt": "1+2=", "answer": "3", "response": "4"}]
    pq.write_table(pa.Table.from_pylist(plain), tmp_path / "out.parquet")
    chat = [{**row, "response": [{"role": "assistant", "content": row["response"]}]} for row in plain]
    for rows in (tmp_path / "out.parquet", plain, chat, str(written(tmp_path, plain))):
        report = score(str(config), rows, column="response")
        assert [one.scores["exact_match"] for one in report.completions] == [1.0, 0.0]


def test_completions_of_a_prompt_are_a_group(tmp_path: Path) -> None:
    file = configured(tmp_path, [{"function": "mine.py:rank", "per": "group"}])
    assert [one.reward for one in score(file, ROWS).completions] == [2.0, 2.0, 2.0, 2.0, 1.0]


def test_a_stored_sample_is_scored_again(tmp_path: Path, config: Path) -> None:
    stored = {
        "group_id": "i1.g0.row7", "sample": 0, "prompt": "1+2=", "completion": "3<eos>", "answer": "3",
        "columns": '{"question": "1+2=", "level": 2}', "finish_reason": "stop", "reward": 0.0, "num_tokens": 2,
    }  # fmt: skip
    (one,) = score(config, written(tmp_path, [stored]), overrides=["data.prompt_key=question"]).completions
    assert (one.reward, one.completion) == (3.0, "3")


async def test_a_notebook_whose_event_loop_runs_may_call_it(config: Path) -> None:
    assert score(config, ROWS[:1]).totals["reward_mean"] == 3.0


def test_every_failure_is_shown_and_what_would_end_a_run(tmp_path: Path) -> None:
    file = configured(tmp_path, [{"function": "mine.py:late", "timeout_s": 0.2}])
    report = score(file, [{"completion": "9"}, {"completion": "8"}])
    assert [dict(one.why) for one in report.completions] == [{"late": "it took longer than timeout_s = 0.2 s"}, {}]
    assert report.would_end.startswith("reward late: scoring failed for 1 of 2 completions, more than reward.max_error")
    assert report.remarks[:2] == [
        "no column 'prompt' (data.prompt_key): rewards get an empty prompt",
        "no column 'answer' (data.answer_key): rewards get an empty answer",
    ]
    dropped = score(file, [{"completion": "9"}, {"completion": "8"}], overrides=["reward.on_error=drop"])
    assert [one.reward for one in dropped.completions] == [None, 1.0]


def test_a_regex_says_what_it_found(tmp_path: Path) -> None:
    file = configured(tmp_path, [{"kind": "regex", "pattern": "([0-9])="}])
    (wrong, none) = score(file, [{"completion": "1=2=", "answer": "3"}, {"completion": "1", "answer": "3"}]).completions
    assert (wrong.why, none.why) == ({"regex": "found '2', not '3'"}, {"regex": "no match; the answer is '3'"})


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([{"completion": "1", "answer": "3"}, {"answer": "3"}], "out.jsonl:2: has no 'completion'"),
        ([{"completion": 5, "answer": "3"}], "out.jsonl:1: 'completion' is 5; it must be a text"),
        ([{"completions": ["1", None]}], r"out.jsonl:1: 'completions' is \['1', None\]; it must be"),
        ([{"completions": []}], r"out.jsonl:1: 'completions' is \[\]"),
        ([{"completion": "1", "answer": "3"}, {"completion": "1"}], "out.jsonl:2: has no 'answer'"),
        ([], "out.jsonl: has no rows"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(
    tmp_path: Path, config: Path, rows: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(DataError, match=why):
        score(config, written(tmp_path, rows))


def test_without_a_tokenizer_only_lengths_are_missed(tmp_path: Path, config: Path) -> None:
    with pytest.raises(ConfigError, match=r"reward overlong needs the tokenizer, for lengths in tokens: .*no-such"):
        score(config, ROWS, overrides=["model.path=no-such"])
    file = configured(tmp_path, [{"kind": "exact_match"}])
    report = score(file, ROWS[1:2], overrides=["model.path=no-such"])
    assert report.completions[0].reward == 0.0
    assert report.remarks[0].startswith("tokens are not counted, prompts not rendered: ")
    with pytest.raises(ConfigErrors):
        score(file, ROWS, overrides=["reward.kind=no_such"])


@pytest.mark.runs("tandem score")
@pytest.mark.parametrize("as_text", [True, False])  # as Parquet has it, and as `tandem samples --json` writes it
def test_of_a_stored_episode_the_last_turn_is_scored_and_all_are_shown(tmp_path: Path, as_text: bool) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    said = {
        "messages": [
            {"role": "assistant", "content": "9", "tool_calls": [call]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "3"},
        ],
        "rewards": [None, 0.5],
        "end": "done",
        "error": "",
    }
    row = {
        "group_id": "i1.g0.row7",
        "sample": 0,
        "prompt": "1+2=",
        "answer": "3",
        "columns": "{}",
        "completion": "9=3=3<eos>",
        "finish_reason": "stop",
        "transcript": json.dumps(said) if as_text else said,
        "masked_spans": [{"start": 1, "end": 4, "text_start": 1, "text_end": 4}],
        "num_tokens": 6,
    }
    (tmp_path / "lengths.py").write_text("def score(completion, num_tokens): return num_tokens")
    lengths = score(configured(tmp_path, [{"function": "lengths.py:score"}]), written(tmp_path, [row]))
    assert [one.reward for one in lengths.completions] == [3.0], "the tokens of all turns, as in the run"
    file = configured(tmp_path, [{"kind": "exact_match"}])
    first_turn_only = row | {"masked_spans": None, "completion": "4<eos>"}
    report = score(file, written(tmp_path, [row, first_turn_only]))
    assert [(one.completion, one.reward) for one in report.completions] == [("3", 1.0), ("4", 0.0)]
    result = CliRunner().invoke(app, ["score", "-c", str(file), str(tmp_path / "out.jsonl")])
    assert (
        '      assistant: 9 add({"a": 1, "b": 2})\n      tool: 3\n      assistant (got 0.500): 3\n      ended: done\n'
        in result.stdout
    )
    with pytest.raises(ConfigError, match="tandem evaluate runs them"):
        score(configured(tmp_path, [{"kind": "environment"}]), [row], overrides=["environment.function=mine.py:Env"])


def test_a_reward_that_cannot_start_is_named(tmp_path: Path) -> None:
    file = configured(tmp_path, [{"function": "mine.py:score"}])
    (tmp_path / "mine.py").write_text("def score(completion, depth): return 1")
    with pytest.raises(ConfigError, match="takes 'depth', which nothing fills"):
        score(file, ROWS[:1])


@pytest.mark.runs("tandem score")
def test_the_command_scores_a_file_or_one_text(tmp_path: Path, config: Path) -> None:
    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["score", "-c", str(config), *words])
        return result.exit_code, result.stdout

    code, text = run(str(written(tmp_path, ROWS)))
    assert code == 0
    assert "out.jsonl:2#0  reward -0.5  exact_match 0  overlong -1 x 0.5  score 0 x 2  score_acc_strict 0.3333" in text
    assert "    exact_match: '123' is not '3'" in text
    assert "5 completions: mean reward 1.5" in text
    code, text = run("--completion", "3", "--answer", "3", "--prompt", "1+2=", "--json")
    plain = json.loads(text)
    assert (code, plain["totals"]["reward_mean"], plain["completions"][0]["prompt"]) == (0, 3.0, "1+2=")
    assert [code for code, _ in (run(), run("f.jsonl", "--completion", "3"), run("f.jsonl"))] == [2, 2, 2]


def test_a_report_of_nothing_scored_has_no_mean() -> None:
    assert Report(completions=[], weights={"score": 1.0}).totals["means"] == {"score": None}
