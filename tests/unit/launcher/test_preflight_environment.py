"""`tandem check` of environments and tools: loaded in a worker as the run will, and one turn before the run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.check import environment
from launcher.check.preflight import preflight
from launcher.deploy.overlay.configuration import read_configuration
from servicekit.rpc.probe import probe
from servicekit.security.run_token import VARIABLE
from tandem_config.loading import draft_config
from tests.kit.folders import different, write_config
from tests.kit.processes import free_port
from tests.kit.waiting import until

pytestmark = pytest.mark.timeout(120)  # imports in worker processes

CODE = """
import asyncio, pathlib

class Good:
    def __init__(self, trace=None):
        self.trace = trace
    def reset(self, row, seed):
        assert row["prompt"].startswith(row["messages"][0]["content"]) and row["columns"]["level"] == 7
        assert (row["answer"], seed) == ("3", 0)
        return []
    def step(self, turn):
        assert (turn.text, turn.tool_calls, turn.index) == ("", [], 0)
        return [], 1.0, True
    def close(self):
        self.trace and pathlib.Path(self.trace).write_text("closed")

class Raises(Good):
    def step(self, turn):
        return int(turn.text)

class Bad(Good):
    def step(self, turn):
        return 1.0

class Hangs(Good):
    async def step(self, turn):
        await asyncio.sleep(3600)

class Lost(Good):
    def reset(self, row, seed):
        raise ConnectionError("no database")

class Says(Good):
    def __init__(self, first=0, **reply):
        self.first, self.reply, self.trace = first, reply, None
    def reset(self, row, seed):
        return [{"role": "user", "content": "1+2"}] * self.first
    def step(self, turn):
        return {**self.reply, "done": False}

def add(a: int) -> int:
    return a
"""


def write(folder: Path, **settings: Any) -> Path:
    rows = [{"prompt": "1+2=", "answer": "3", "level": 7}] * 9
    (folder / "mine.py").write_text(CODE)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in different(rows)))
    template = (
        "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '=' }}{% endfor %}{{ tools }}"
    )
    data = {"train": "rows.jsonl", "heldout": None, "prompt_as": "user_message", "chat_template": template}
    file = write_config(folder, data=data)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"environment": settings}))
    return file


@pytest.mark.parametrize(
    ("settings", "severity", "text"),
    [
        ({"function": "mine.py:Raises"}, "warning",
         "tried on {folder}/rows.jsonl:1, with an empty turn: ValueError: invalid literal for int() with base 10: ''"),
        ({"function": "mine.py:Hangs"}, "warning", "no reply after 0.5 s; its turn_timeout_s was not waited for"),
        ({"function": "mine.py:Bad"}, "error", "an empty turn: step returned a float, not (messages, reward, done)"),
        ({"function": "mine.py:Lost"}, "warning", "tried on {folder}/rows.jsonl:1: ConnectionError: no database ("),
        ({"function": "mine.py:Says", "args": {"token_ids": [3, 999999]}}, "error",
         "an empty turn: step returned the token id 999999, which the tokenizer lacks"),
        ({"function": "mine.py:Goof"}, "error", "{folder}/mine.py has no Goof; did you mean Good?"),
        ({"tools": ["mine.py:Good"]}, "error", "the tool in {folder}/mine.py is a type, not a function"),
    ],
)  # fmt: skip
def test_what_does_not_work_is_named(
    tmp_path: Path, settings: dict[str, Any], severity: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "Hangs" in str(settings):
        monkeypatch.setattr(environment, "MOST_S", 0.5)
    found = preflight(draft_config(write(tmp_path, **settings)), redis_url=None)
    (problem,) = (problem for problem in found if problem.key.startswith("environment."))
    assert (problem.key.partition(".")[2], problem.severity) == (next(iter(settings)), severity)
    assert text.format(folder=tmp_path) in problem.message


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"first": 99}, ("data.max_prompt_tokens", "error", "environment says first, the prompt of {}:1 has 40")),
        ({"first": 12}, ("grpo.max_new_tokens", "error", "(57 tokens) and grpo.max_new_tokens (16) exceed")),
        ({"conversation": [{"role": "user", "content": "1+2" * 9}]},
         ("grpo.max_new_tokens", "warning", "tokens ({}:1, with an empty turn): no turn after it has room")),
        ({"messages": [{"role": "user", "content": "1+2"}]}, None),
    ],
)  # fmt: skip
def test_what_an_environment_says_must_fit(tmp_path: Path, args: dict[str, Any], expected: Any) -> None:
    reply = {"messages": [{"role": "user", "content": "1"}]} if "first" in args else {}
    file = write(tmp_path, function="mine.py:Says", args=args | reply)
    limits = {"grpo": {"max_new_tokens": 16}, "data": {"max_prompt_tokens": 64}}
    sections = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(sections | {key: sections[key] | limits[key] for key in limits}))
    found = preflight(draft_config(file), redis_url=None)
    keys = ("environment", "data.max_prompt_tokens", "grpo.max_new_tokens")
    problems = [each for each in found if each.key.startswith(keys)]
    assert [(each.key, each.severity) for each in problems] == ([] if expected is None else [expected[:2]])
    assert all(expected[2].format(tmp_path / "rows.jsonl") in each.message for each in problems), problems


@pytest.mark.runs("tandem check")
def test_what_works_is_not(tmp_path: Path) -> None:
    good = {"function": "mine.py:Good", "args": {"trace": f"{tmp_path}/trace"}}
    for settings, unused in ((good, False), ({"tools": ["mine.py:add"]}, True)):  # reset gets every column
        notes: list[str] = []
        found = preflight(draft_config(write(tmp_path, **settings)), redis_url=None, notes=notes)
        assert any(note.startswith("not used: level") for note in notes) is unused
        assert [problem.message for problem in found if problem.key.startswith(("environment", "data."))] == []
    assert (tmp_path / "trace").read_text() == "closed"


def test_its_files_go_to_the_pods(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    found = read_configuration(write(tmp_path, tools=["mine.py:add", "own/tools.py:f"]))
    assert sorted(found.files) == ["mine.py", "run.yaml"]
    assert [problem.key for problem in found.problems if problem.message == "is not in the pods"] == [
        "environment.tools"
    ]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """`address = serving(*options)`: a process that serves the code, once it does."""
    with ExitStack() as stack:

        def start(*options: str, **variables: str) -> str:
            address = f"127.0.0.1:{(port := free_port())}"
            command = [sys.executable, "-m", "environment_service", *options, "--workers", "1"]
            environ = os.environ | {"TANDEM_GRPC_PORT": str(port)} | variables
            process = stack.enter_context(subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL))
            stack.callback(process.kill)
            until(lambda: not probe("readiness", {"TANDEM_GRPC_PORT": str(port)}), 60)
            return address

        yield start


def found_at(folder: Path, **settings: Any) -> list[tuple[str, str, str]]:
    """The problems of a server."""
    found = preflight(draft_config(write(folder, **settings)), redis_url=None)
    return [(each.key, each.severity, each.message) for each in found if each.key.startswith("environment")]


def test_a_server_is_tried_as_code_is(tmp_path: Path, serving: Callable[..., str]) -> None:
    write(tmp_path)
    good = serving("--function", f"{tmp_path}/mine.py:Good", "--args", json.dumps({"trace": f"{tmp_path}/trace"}))
    assert found_at(tmp_path, address=good) == []
    assert (tmp_path / "trace").read_text() == "closed"
    ((key, severity, text),) = found_at(tmp_path, address=serving("--function", f"{tmp_path}/mine.py:Bad"))
    assert (key, severity) == ("environment.address", "error")
    assert "with an empty turn: step returned a float, not (messages, reward, done)" in text


def test_tools_of_a_server_are_in_prompts_and_give_no_reward(tmp_path: Path, serving: Callable[..., str]) -> None:
    write(tmp_path)
    address = serving("--tools", f"{tmp_path}/mine.py:add")
    assert found_at(tmp_path, address=address) == []
    file = write(tmp_path, address=address)
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"reward": {"kind": "environment"}}))
    draft = draft_config(file)
    tools, problems = environment.load_environment(draft.config, draft.usable) if draft.config else (None, [])
    assert tools is not None
    assert [tool["function"]["name"] for tool in tools.schemas or ()] == ["add"]
    assert [each.message for each in problems] == ["the reward environment needs a class: tools give no reward"]


def test_a_server_that_cannot_be_asked_here_is_a_warning(
    tmp_path: Path, serving: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is started with the run, or that wants the run's token."""
    monkeypatch.setattr(environment, "_REACH_S", 0.3)
    ((key, severity, text),) = found_at(tmp_path, address="127.0.0.1:1")
    assert (key, severity, text.startswith("cannot be tried now: ")) == ("environment.address", "warning", True)
    monkeypatch.setattr(environment, "_REACH_S", 30.0)
    address = serving("--function", f"{tmp_path}/mine.py:Good", **{VARIABLE: "a-token-of-this-run"})
    ((key, severity, text),) = found_at(tmp_path, address=address)
    assert (key, severity) == ("environment.address", "warning")
    assert f"environment server {address}: Unauthenticated: " in text
