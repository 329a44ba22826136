"""`tandem check` of chat data, mixtures and globs: what cannot be used, and what is probably not meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.data import scan
from launcher.check.data import answers
from launcher.check.data.answers import AnswerSample
from launcher.check.preflight import preflight
from tandem_config.loading import draft_config
from tandem_config.problems import ConfigProblem
from tandem_files.rows.reading import Row
from tests.kit.folders import write_config, write_data, write_rows

USER = {"role": "user", "content": "1+2="}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def check(folder: Path, **data: Any) -> list[ConfigProblem]:
    """What is found in these data (cores of the machine apart)."""
    sections = {"evaluation": data.pop("evaluation")} if "evaluation" in data else {}
    found = preflight(draft_config(write_config(folder, data=data, **sections)), redis_url=None)
    return [problem for problem in found if "cores" not in problem.message]


def only(folder: Path, **data: Any) -> ConfigProblem:
    (problem,) = check(folder, **data)
    return problem


def write_messages(folder: Path, *last: object) -> str:
    rows = [{"prompt": [USER | {"content": f"{n}+0="}], "answer": 3} for n in range(8)]
    rows += [{"prompt": messages, "answer": 3} for messages in last]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return "chat.jsonl"


def test_messages_and_a_mixture_of_files_have_no_problems(tmp_path: Path) -> None:
    train = [{"path": write_messages(tmp_path), "weight": 2}, {"path": "train.jsonl", "weight": 1}]
    assert check(tmp_path, train=train, chat_template=TEMPLATE) == []


def test_messages_without_a_template_are_named_once(tmp_path: Path) -> None:
    problem = only(tmp_path, train=write_messages(tmp_path))
    assert (problem.key, problem.value) == ("data.train", str(tmp_path / "chat.jsonl") + ":1")
    assert f"need a chat template: {tmp_path / 'model'} has none; set data.chat_template" in problem.message
    assert "and 7 more rows with the same fault" in problem.message


def test_a_row_that_the_template_fails_on_is_named_with_the_reason(tmp_path: Path) -> None:
    strict = "{% if messages[1] is defined %}{{ raise_exception('one only') }}{% endif %}" + TEMPLATE
    problem = only(tmp_path, train=write_messages(tmp_path, [USER, USER]), chat_template=strict)
    assert problem.value.endswith("chat.jsonl:9")
    assert problem.message == "the chat template fails on its messages: one only"


def test_a_template_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    problem = only(tmp_path, chat_template="chatml")
    assert (problem.key, problem.value, problem.severity) == ("data.chat_template", "chatml", "error")
    assert problem.message == "is neither a path that ends in .jinja, nor the text of a template, nor one of auto, none"
    gone = only(tmp_path, chat_template="gone.jinja")
    assert (gone.value, gone.message) == (str(tmp_path / "gone.jinja"), "cannot be read: No such file or directory")


def test_arguments_that_the_template_never_looks_at_are_a_warning(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if think is defined %}1{% endif %}"
    assert check(tmp_path, chat_template=template, chat_template_kwargs={"think": 1}) == []
    problem = only(tmp_path, chat_template=template, chat_template_kwargs={"thinc": 1})
    assert (problem.key, problem.value, problem.severity) == ("data.chat_template_kwargs", "thinc: 1", "warning")


def test_a_template_that_writes_the_date_is_a_warning(tmp_path: Path) -> None:
    template = "{{ day | default(strftime_now('%d')) }}" + TEMPLATE
    problem = only(tmp_path, train=write_messages(tmp_path), chat_template=template)
    assert (problem.severity, "change from day to day" in problem.message) == ("warning", True)
    lazy = "{% if not day is defined %}{% set day = strftime_now('%d') %}{% endif %}" + TEMPLATE
    settings = {"chat_template": lazy, "chat_template_kwargs": {"day": "1"}}
    assert check(tmp_path, train=write_messages(tmp_path), **settings) == []


def test_what_is_left_out_of_a_mixture_is_said_by_source(tmp_path: Path) -> None:
    write_data(tmp_path / "a.jsonl", [*((1, n) for n in range(6)), (100, 2)])
    write_data(tmp_path / "b.jsonl", [*((2, n) for n in range(6)), (100, 2), (100, 3)])
    settings = {"max_prompt_tokens": 5, "overlong_prompts": "drop"}
    found = check(tmp_path, train=["a.jsonl", {"path": "b.jsonl", "name": "hard"}], **settings)
    assert [problem.message for problem in found] == [
        "3 of 15 prompts exceed data.max_prompt_tokens (5) (a: 1, hard: 2); the first has 6 tokens; they are left out"
    ]


def test_a_held_out_file_that_a_glob_trains_on_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for number, name in enumerate(("a", "b")):
        write_data(tmp_path / "all" / f"{name}.jsonl", [(number, n) for n in range(8)])
    problem = only(tmp_path, train="all/*.jsonl", heldout="all/b.jsonl")
    assert (problem.key, problem.value, problem.severity) == (
        "data.heldout",
        str(tmp_path / "all" / "b.jsonl"),
        "warning",
    )
    same = only(tmp_path, train="all/*.jsonl", heldout="all/*.jsonl")
    assert "is a training file, so the held-out accuracy" in same.message


@pytest.mark.parametrize("name", ["all", "all/x*.jsonl"])
def test_a_folder_or_a_glob_without_files_lists_what_is_there(tmp_path: Path, name: str) -> None:
    (tmp_path / "all").mkdir()
    write_rows(tmp_path / "all" / "a.jsonl")
    problem = only(tmp_path, train=name)
    assert problem.value == str(tmp_path / name)
    assert f"{tmp_path / 'all'} holds a.jsonl" in problem.message


def test_a_pass_that_takes_long_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scan, "_BATCH_ROWS", 2)
    monkeypatch.setattr(scan, "_PROGRESS_S", 0.0)
    assert check(tmp_path) == []
    assert f"reading {tmp_path / 'train.jsonl'}: 50%" in capsys.readouterr().err


def test_answers_of_many_rows_are_sampled_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_MAX_KEPT", 10)
    sample = AnswerSample()
    rows = [Row(file=Path("a"), number=n, prompt="", answer=str(n), columns={}) for n in range(100)]
    sample.add([(row, None) for row in rows])
    assert sample.step == 16
    assert [number for (_, number), _ in sample.answers] == list(range(0, 100, 16))


def told(problems: list[ConfigProblem]) -> list[tuple[str, str]]:
    return [(problem.key, problem.message) for problem in problems]


def test_repeated_prompts_are_counted(tmp_path: Path) -> None:
    """As the published parquet files of AIME (x 32) and DAPO-Math (x 100) are made."""
    write_data(tmp_path / "dapo.jsonl", [(n, 1) for n in range(5)] * 100)
    write_data(tmp_path / "aime.jsonl", [(n, 2) for n in range(3)] * 32)
    write_data(tmp_path / "some.jsonl", [(1, 3), (2, 3), (1, 3)])
    sets = [{"name": "some", "data": "some.jsonl", "samples": 2, "temperature": 1.0}]
    found = check(tmp_path, train="dapo.jsonl", heldout="aime.jsonl", evaluation={"sets": sets})
    assert told(found) == [
        ("data.train", "500 rows hold 5 different prompts, each of them 100 times"),
        ("data.heldout", "96 rows hold 3 different prompts, each of them 32 times"),
        ("evaluation.sets", "3 rows hold 2 different prompts, one of them 2 times"),
    ]
    assert "samples, in evaluation.sets" in found[1].suggestion


def test_an_iteration_of_more_prompts_than_are_different_is_told(tmp_path: Path) -> None:
    write_data(tmp_path / "a.jsonl", [(n, 1) for n in range(3)] * 100)
    assert [message for key, message in told(check(tmp_path, train="a.jsonl")) if key.startswith("grpo")] == [
        "data.train has only 3 different prompts, so an iteration sees some prompts more than once"
    ]


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    write_data(tmp_path / "other.jsonl", [(1, 2), (8, 8), (1, 3)])
    sets = [{"name": "new", "data": "set.json", "samples": 1}]
    rows = [{"prompt": "1+3=", "answer": "4"}, {"prompt": "9+9=", "answer": "18"}]
    (tmp_path / "set.json").write_text(json.dumps(rows))
    assert told(check(tmp_path, heldout="other.jsonl", evaluation={"sets": sets})) == [
        ("data.heldout", "2 of 3 prompts are trained on too, so what is measured on them is memorization"),
        ("evaluation.sets", "1 of 2 prompts are trained on too, so what is measured on them is memorization"),
    ]
