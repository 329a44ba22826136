"""The section `environment`: a class or tools, absent unless given."""

from pathlib import Path
from typing import Any

import pytest

from tandem_config.comparing.agreeing import agreed_settings
from tandem_config.comparing.described import described
from tandem_config.comparing.resuming import compare, mark_of
from tandem_config.loading import draft_config, dump_resolved
from tandem_config.schema import RunConfig

CLASS = "environment: {function: mine.py:Env, args: {depth: 3}}"
TOOLS = "environment: {tools: [mine.py:add, package.tools:look], max_turns: 3}"


def drafted(folder: Path, text: str, *options: str) -> tuple[RunConfig, list[tuple[str, str, str]]]:
    """Returns the configuration, and its problems."""
    (folder / "run.yaml").write_text(f"model: {{path: m}}\ndata: {{train: rows.jsonl}}\n{text}\n", encoding="utf-8")
    draft = draft_config(folder / "run.yaml", options)
    assert draft.config is not None
    found = [(problem.key, problem.value, problem.message) for problem in draft.problems]
    return draft.config, found


@pytest.mark.parametrize(
    ("text", "key", "value", "message"),
    [
        ("environment: {max_turns: 3}", "environment", "{'max_turns': 3}", "has neither function, tools nor address"),
        ("environment: {function: a.py:A, tools: [a.py:f]}", "environment", "{'function'", "has both function and"),
        ("environment: {tools: [a.py:f], args: {d: 3}}", "environment", "{'tools'", "has args, which tools do not get"),
        ("environment: {address: 'a:1', args: {d: 3}}", "environment", "{'address'", "which the server has itself"),
        ("environment: {address: 'a:1', tools: [a.py:f]}", "environment", "{'address'", "has both tools and address"),
        ("environment: {address: 'http://a:1'}", "environment.address", "http://a:1", "is no address"),
        ("environment: {address: 'a:1', security: mtls}", "environment.security", "mtls", "must be one of"),
        ("environment: {function: a.py}", "environment.function", "a.py", "needs the form FILE.py:NAME"),
        ("environment: {tools: [a/b:f]}", "environment.tools", "['a/b:f']", "'a/b' is neither a .py file nor a module"),
        ("environment: {tools: a.py:f}", "environment.tools", "a.py:f", "must be a list"),
        ("environment: {function: a.py:A, max_turn: 3}", "environment.max_turn", "3", "unknown key"),
        ("environment: {function: a.py:A, max_turns: 0}", "environment.max_turns", "0", "must be greater than 0"),
        ("environment: {function: a.py:A, on_error: leave_out}", "environment.on_error", "leave_out", "must be one of"),
        ("environment: 5", "environment", "5", "must be a section with keys"),
    ],
)
def test_each_mistake_is_named(tmp_path: Path, text: str, key: str, value: str, message: str) -> None:
    _, (problem,) = drafted(tmp_path, text)
    assert problem[0] == key
    assert problem[1].startswith(value.replace("a/b:f", f"{tmp_path}/a/b:f") if "//" in value else value)
    assert message in problem[2]


@pytest.mark.parametrize("text", ["", "environment:", "environment: null", "environment: {}"])
def test_there_is_none_unless_it_is_given(tmp_path: Path, text: str) -> None:
    config, problems = drafted(tmp_path, text)
    assert (config.environment, problems) == (None, [])
    assert [key for key in described(config) if key.startswith("environment")] == []


def test_code_is_relative_to_what_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = drafted(tmp_path, CLASS)
    assert config.environment is not None
    assert (config.environment.function, config.environment.label) == (f"{tmp_path}/mine.py:Env", "Env")
    monkeypatch.chdir(tmp_path.parent)
    config, _ = drafted(tmp_path, "", "environment.tools=[own.py:add]", "environment.workers=3")
    assert config.environment is not None
    assert (config.environment.tools, config.environment.workers) == ((f"{tmp_path.parent}/own.py:add",), 3)


@pytest.mark.parametrize("text", ["", CLASS, TOOLS, "environment: {address: 'a:1', security: none}"])
def test_a_resolved_file_loads_to_the_same(tmp_path: Path, text: str) -> None:
    config, _ = drafted(tmp_path, text)
    (tmp_path / "resolved.yaml").write_text(dump_resolved(config), encoding="utf-8")
    assert draft_config(tmp_path / "resolved.yaml").config == config


def test_a_resume_may_change_limits_and_nothing_else(tmp_path: Path) -> None:
    given: dict[str, Any] = {"function": "/a/mine.py:Env"}
    base = {"model": {"path": Path("m")}, "data": {"train": Path("d")}}
    config, none = (RunConfig.model_validate(base | more) for more in ({"environment": given}, {}))

    def differences(environment: dict[str, Any], saved: RunConfig = config) -> tuple[list[str], list[str]]:
        found = compare(mark_of(saved, "run"), RunConfig.model_validate(base | {"environment": environment}), None)
        return found.refused, found.changed

    assert differences({"function": "/elsewhere/mine.py:Env"}) == ([], [])
    assert differences(given | {"workers": 7}) == ([], ["environment.workers: 2 in the checkpoint, 7 in the run"])
    served = RunConfig.model_validate(base | {"environment": {"address": "a:1"}})
    moved = ["environment.address: a:1 in the checkpoint, b:2 in the run"]
    assert differences({"address": "b:2"}, served) == ([], moved)
    assert differences(given | {"max_turns": 3})[0] == ["environment.max_turns: 8 in the checkpoint, 3 in the run"]
    assert differences(given, none)[0] == ["environment.function: not set in the checkpoint, mine.py:Env in the run"]
    tools = RunConfig.model_validate(base | {"environment": {"tools": ("/a/t.py:f", "m:g")}})
    assert described(tools)["environment.tools"] == '["t.py:f", "m:g"]'
    assert [key for key in agreed_settings(config) if key.startswith("environment")] == [
        "environment.function", "environment.args", "environment.tools", "environment.max_turns",
        "environment.history",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "key", "said"),
    [
        (f"{CLASS}\ngrpo: {{stop: [end]}}", "grpo.stop", "not possible where they have several turns"),
        (
            f"{CLASS}\nevaluation: {{sets: [{{name: hard, data: hard.jsonl, repetition_penalty: 1.1}}]}}",
            "evaluation.sets",
            "hard: a repetition_penalty is not possible",
        ),
        ("environment: {tools: [t.py:add]}\nreward: {kind: environment}", "reward.kind", "tools give no reward"),
        ("reward: [{kind: exact_match}, {kind: environment}]", "reward[1].kind", "there is no environment"),
        (f"{CLASS}\nreward: {{kind: environment}}", "", ""),
        (f"{CLASS}\nreward: {{kind: exact_match}}", "", ""),
        ("environment: {address: 'a:1'}\nreward: {kind: environment}", "", ""),
        ("environment: {tools: [t.py:add]}", "", ""),
    ],
)
def test_what_does_not_go_with_it_is_named(tmp_path: Path, settings: str, key: str, said: str) -> None:
    data = "data: {train: rows.jsonl, heldout: held.jsonl}"
    (tmp_path / "run.yaml").write_text(f"model: {{path: m}}\n{data}\n{settings}\n", encoding="utf-8")
    problems = draft_config(tmp_path / "run.yaml").problems
    assert [(one.key, one.severity) for one in problems] == ([(key, "error")] if key else [])
    assert all(said in one.message for one in problems)
