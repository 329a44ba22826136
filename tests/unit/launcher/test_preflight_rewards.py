"""`tandem check` of own rewards and the rows: a call before the run, and rows that lack what a reward takes."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.data.prompts import load_prompts
from coordinator.rewards.registry import build_rewards, start_rewards
from launcher.check import trial
from launcher.check.preflight import preflight
from tandem_config.loading import draft_config, load_config
from tandem_config.problems import ConfigProblem
from tandem_files.rows.problems import DataError
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import different, write_config

pytestmark = pytest.mark.timeout(60)  # imports in worker processes

CODE = """
import asyncio, os, time, pathlib

def raises(completion):
    return [] [1]

def nan(completion, answer, prompt, num_tokens, level, truncated, finish_reason, sample_id):
    assert (completion, answer, prompt, num_tokens, level) == ("3", "3", "1+2=", 2, 7)
    assert (truncated, finish_reason, sample_id) == (False, "stop", "check.g0.row1#0")
    return float("nan")

def few(completions):
    return [1.0] * (len(completions) - 1)

def hangs(completion):
    time.sleep(100)

async def waits(completion, message):
    raise KeyError(message)

def ranks(completions):
    assert len(completions) == 1, f"{len(completions)} of them"

def dies(completion):
    os._exit(3)

def leaves_a_trace(completion, trace):
    with pathlib.Path(trace).open("a") as file:
        file.write("called ")
    return 1

def needs(completion, level, hint=None):
    return 1

def abstains(completions):
    return [None for _ in completions]

def chat(completions, **kwargs):
    return [float(c[0]["content"] == "3") for c in completions]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "edit-distance": float("nan")}
"""


def write(folder: Path, rewards: list[dict[str, Any]], rows: list[dict[str, Any]], **data: Any) -> Path:
    (folder / "mine.py").write_text(CODE)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in different(rows)))
    file = write_config(folder, data={"train": "rows.jsonl", "heldout": None} | data)
    own = [entry | {"function": f"mine.py:{entry['function']}"} for entry in rewards]
    settings = yaml.safe_load(file.read_text()) | {"reward": own}
    file.write_text(yaml.safe_dump(settings))
    return file


def check(file: Path, *overrides: str) -> list[ConfigProblem]:
    found = preflight(draft_config(file, overrides), redis_url=None)
    return [problem for problem in found if problem.key.startswith(("reward", "data", "evaluation"))]


ROW: dict[str, Any] = {"prompt": "1+2=", "answer": "3", "level": 7}


def test_a_function_that_cannot_score_is_a_warning_with_the_reason_and_the_row(tmp_path: Path) -> None:
    failing: dict[str, tuple[dict[str, Any], str]] = {
        "raises": ({}, "IndexError: list index out of range (mine.py:5)"),
        "nan": ({}, "it returned nan, which is not finite"),
        "few": ({}, "it returned 0 scores for 1 completions"),
        "hangs": ({"timeout_s": 0.3}, "it took longer than timeout_s = 0.3 s"),
        "waits": ({"args": {"message": "no such key"}}, "KeyError: no such key (mine.py:19)"),
        "ranks": ({"per": "group"}, "AssertionError: 4 of them (mine.py:22)"),
        "dies": ({}, "its worker process exited with status 3"),
    }
    rewards = [{"function": name, **settings} for name, (settings, _) in failing.items()]
    found = check(write(tmp_path, [*rewards, {"function": "needs"}], [ROW] * 9), "grpo.group_size=4")
    assert {problem.value.rpartition(":")[2]: problem.message for problem in found} == {
        name: f"tried on {tmp_path}/rows.jsonl:1, with its answer as the completion, it failed: {why}"
        for name, (_, why) in failing.items()
    }
    assert {problem.severity for problem in found} == {"warning"}
    assert found[0].key == "reward[0].function"


def test_none_is_a_warning_for_the_only_reward(tmp_path: Path) -> None:
    (found,) = check(write(tmp_path, [{"function": "abstains"}], [ROW] * 9))
    assert found.severity == "warning"
    assert "it returned None, and a completion to which no reward applies is left out" in found.message
    assert check(write(tmp_path, [{"function": "abstains"}, {"function": "needs"}], [ROW] * 9)) == []


def test_a_function_of_chat_completions_is_told_how_it_gets_them(tmp_path: Path) -> None:
    (found,) = check(write(tmp_path, [{"function": "chat"}], [ROW] * 9))
    assert found.suggestion == "set completions: messages if it takes lists of messages, as TRL gives them"
    assert check(write(tmp_path, [{"function": "chat", "completions": "messages"}], [ROW] * 9)) == []


def test_verls_function_is_taken_and_a_source_that_no_row_has_is_told(tmp_path: Path) -> None:
    assert check(write(tmp_path, [{"function": "compute_score"}], [ROW | {"data_source": "x"}] * 9)) == []
    (found,) = check(write(tmp_path, [{"function": "compute_score"}], [ROW] * 9))
    assert (found.message, found.severity) == ("takes 'data_source', which no row has, so that it gets None", "warning")
    given = {"function": "compute_score", "args": {"data_source": "gsm8k"}}
    assert check(write(tmp_path, [given], [ROW] * 9)) == []


@pytest.mark.parametrize(
    ("pattern", "skipped", "warned"),
    [("<unk>.*", False, False), ("<unk>.*", True, True), (r".*\<eos\>", False, True), ("[0-9]*", True, False)],
)
def test_a_pattern_of_a_token_that_rewards_do_not_get_is_a_warning(
    tmp_path: Path, pattern: str, skipped: bool, warned: bool
) -> None:
    file = write_config(tmp_path, reward={"kind": "format", "pattern": pattern})
    found = check(file, f"rollout.skip_special_tokens={str(skipped).lower()}")
    assert [problem.key for problem in found] == ["reward.pattern"] * warned


def test_a_check_does_not_wait_for_a_long_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_S", 0.3)
    (found,) = check(write(tmp_path, [{"function": "hangs", "timeout_s": 3600}], [ROW | {"answer": ""}] * 9))
    assert "with an empty completion, it failed: no score after 0.3 s; the whole timeout_s = 3600 s" in found.message


@pytest.mark.parametrize(("tried", "trace"), [(True, "called "), (False, "")])
def test_a_function_is_called_once_or_not_at_all(tmp_path: Path, tried: bool, trace: str) -> None:
    (tmp_path / "trace").touch()
    own = {"function": "leaves_a_trace", "args": {"trace": str(tmp_path / "trace")}, "trial": tried}
    assert check(write(tmp_path, [own], [ROW] * 9)) == []
    assert (tmp_path / "trace").read_text() == trace


LACKING: list[dict[str, Any]] = [
    ROW,
    ROW,
    {"prompt": "2+1=", "answer": "3"},
    ROW,
    {"prompt": "1+3=", "answer": "4", "hint": "x"},
    *[ROW] * 4,
]


def test_a_row_without_a_column_that_a_reward_takes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    train, heldout = check(write(tmp_path, [{"function": "needs", "name": "mine"}], LACKING, heldout="held.jsonl"))
    assert (train.key, train.value, train.severity) == ("data.train", f"{tmp_path}/rows.jsonl:3", "error")
    assert train.message == (
        "has no 'level', which the reward mine takes: fill it in, remove the row, or give the reward's parameter a "
        "default (and 1 more row with the same fault: 5)"
    )
    assert (heldout.key, heldout.value) == ("data.heldout", f"{tmp_path}/held.jsonl")
    assert heldout.message.startswith("none of its rows has 'level', which the reward mine takes: fill it in, leave")


async def test_a_coordinator_refuses_the_rows_that_the_check_refuses(tmp_path: Path) -> None:
    file = write(tmp_path, [{"function": "needs", "require_stop": True}], LACKING)
    config = load_config(file)
    prompts = load_prompts(config.data, "train", TextCodec.from_folders(config.model.path))
    with pytest.raises(DataError) as refused:
        await start_rewards(build_rewards(config), prompts.scans)
    assert f"{tmp_path}/rows.jsonl:3: has no 'level', which the reward needs takes" in str(refused.value)
