"""`tandem check` of environments and tools: loaded in a worker as the run will, and one turn before the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.check import environment
from launcher.check.preflight import preflight
from launcher.deploy.overlay.configuration import read_configuration
from tandem_config.loading import draft_config
from tests.kit.folders import different, write_config

pytestmark = pytest.mark.timeout(60)  # imports in worker processes

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


@pytest.mark.runs("tandem check")
def test_what_works_is_not(tmp_path: Path) -> None:
    for settings in ({"function": "mine.py:Good", "args": {"trace": f"{tmp_path}/trace"}}, {"tools": ["mine.py:add"]}):
        found = preflight(draft_config(write(tmp_path, **settings)), redis_url=None)
        assert [problem.message for problem in found if problem.key.startswith(("environment", "data."))] == []
    assert (tmp_path / "trace").read_text() == "closed"


def test_its_files_go_to_the_pods(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    found = read_configuration(write(tmp_path, tools=["mine.py:add", "own/tools.py:f"]))
    assert sorted(found.files) == ["mine.py", "run.yaml"]
    assert [problem.key for problem in found.problems if problem.message == "is not in the pods"] == [
        "environment.tools"
    ]
