"""`tandem check` of chat data, mixtures and globs: what cannot be used, and what is probably not meant."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.data import scan
from launcher.check.data import answers
from launcher.check.data.answers import AnswerSample
from launcher.check.data.template import turn_lines
from launcher.check.preflight import preflight
from tandem_clients.formatting import PromptFormat
from tandem_config.loading import draft_config
from tandem_config.problems import ConfigProblem
from tandem_config.schema import DataSection
from tandem_files.rows.reading import Row
from tests.chats import QWEN, TOOLS, renderer_of, train_tokenizer
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


def test_rows_with_tools_say_how_the_template_writes_turns(tmp_path: Path) -> None:
    """And other rows do not: a conversation of one turn has none before it."""
    rows = [{"prompt": [USER | {"content": f"{n}+0="}], "answer": n, "tools": TOOLS} for n in range(8)]
    (tmp_path / "tools.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data = {"train": "tools.jsonl", "chat_template": QWEN, "max_prompt_tokens": 1000, "tools_key": "tools"}
    for tools_key, num_lines in (("tools", 2), (None, 0)):
        notes: list[str] = []
        draft = draft_config(write_config(tmp_path, data=data | {"tools_key": tools_key}))
        preflight(draft, redis_url=None, notes=notes)
        turns = [line for line in notes if "turn" in line]
        assert len(turns) == num_lines, notes
    assert "docs/turns.md" not in "".join(notes)


def test_turns_are_described_by_what_precedes_a_message() -> None:
    renderer = renderer_of(train_tokenizer([QWEN]), "qwen")
    section = DataSection.model_validate({"train": "rows.jsonl"})
    row = Row(prompt=[USER], answer="", file=Path("rows.jsonl"), number=1, tools=TOOLS, columns={})
    found = turn_lines(PromptFormat(section, renderer.codec, {"default": QWEN}, {}, ""), row)
    assert found == [
        "turns: the chat template keeps a turn's ids before tool results after a call, a question after an answer, "
        "a question after an answer between spaces, tool results after thinking and a call (tool calls: hermes)",
        "    it does not before a question after thinking and an answer ('<think>' becomes 'I'): docs/turns.md",
    ]
    for history, says in (("template", "a branch begins there"), ("keep", "it is kept")):
        lines = turn_lines(PromptFormat(section, renderer.codec, {"default": QWEN}, {}, ""), row, history)
        assert lines[:2] == found
        assert says in lines[2]
    one_answer = "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}{{ tools }}"
    found = turn_lines(PromptFormat(section, renderer.codec, {"default": one_answer}, {}, ""), row)
    assert found == ["turns: none with this chat template: one turn"]
    assert turn_lines(PromptFormat(section, renderer.codec, {"default": QWEN}, {}, ""), None) == []


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


@pytest.mark.parametrize(
    ("schedule", "rows", "under_way"),
    [("sync", 4, 0), ("one_step_off", 7, 8), ("one_step_off", 8, 0), ("async", 11, 12), ("async", 12, 0)],
)
def test_more_groups_under_way_than_different_prompts_are_named(
    tmp_path: Path, schedule: str, rows: int, under_way: int
) -> None:
    """Iterations have 4 prompts."""
    write_rows(tmp_path / "train.jsonl", rows)
    file = write_config(tmp_path, schedule={"kind": schedule}, grpo={"preset": "decoupled"})
    found = [one for one in preflight(draft_config(file), redis_url=None) if "cores" not in one.message]
    assert [(one.key, one.severity) for one in found] == [("grpo.prompts_per_iteration", "warning")] * bool(under_way)
    if under_way:
        assert (
            f"only {rows} different prompts, and with schedule.kind: {schedule} {under_way} groups" in found[0].message
        )
        assert found[0].suggestion == "3 or fewer, or more rows"


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    write_data(tmp_path / "other.jsonl", [(1, 2), (8, 8), (1, 3)])
    sets = [{"name": "new", "data": "set.json", "samples": 1}]
    rows = [{"prompt": "1+3=", "answer": "4"}, {"prompt": "9+9=", "answer": "18"}]
    (tmp_path / "set.json").write_text(json.dumps(rows))
    assert told(check(tmp_path, heldout="other.jsonl", evaluation={"sets": sets})) == [
        ("data.heldout", "2 of 3 prompts are trained on too, so what is measured on them is memorization"),
        ("evaluation.sets", "1 of 2 prompts are trained on too, so what is measured on them is memorization"),
    ]


CALLING = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
WITH_ID = {"prompt": [USER], "answer": "3", "id": 1}


def noted(folder: Path, **sections: Any) -> list[str]:
    notes: list[str] = []
    preflight(draft_config(write_config(folder, **sections)), redis_url=None, notes=notes)
    return notes


def write_json(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


@pytest.mark.parametrize(
    ("column", "template", "setting"),
    [
        ({"tools": [{"name": "f"}]}, CALLING, "data.tools_key: tools"),
        ({"tools": '[{"name": "f"}]'}, CALLING, "data.tools_key: tools"),
        ({"tools": [{"name": "f"}]}, TEMPLATE, ""),
        ({"tools": []}, CALLING, ""),
        ({"tools": "[]"}, CALLING, ""),
        ({"system": "9"}, TEMPLATE, "data.system_key: system"),
        ({"system_prompt": "9"}, TEMPLATE, "data.system_key: system_prompt"),
        ({"system": None}, TEMPLATE, ""),
        ({"system": "9", "prompt": [{"role": "system", "content": "8"}, USER]}, TEMPLATE, ""),
        ({"system": "9", "prompt": "1+2="}, TEMPLATE, ""),
    ],
)
def test_a_column_that_the_template_would_write_is_a_warning(
    tmp_path: Path, column: dict[str, Any], template: str, setting: str
) -> None:
    rows = [WITH_ID, *(WITH_ID | {"prompt": [USER | {"content": f"{n}+9="}]} | column for n in range(1, 5))]
    rows = [row | ({"prompt": f"{n}+1="} if isinstance(row["prompt"], str) else {}) for n, row in enumerate(rows)]
    train = write_json(tmp_path, *rows)
    found = [p for p in check(tmp_path, train=train, chat_template=template) if "is not used" in p.message]
    assert [(p.value, p.severity, p.suggestion) for p in found] == [
        (f"{tmp_path / train}:2", "warning", f"set {setting}, and the chat template writes it")
    ][: bool(setting)]


def test_a_setting_that_reads_the_column_ends_the_warning(tmp_path: Path) -> None:
    train = write_json(tmp_path, *({"prompt": [USER | {"content": f"{n}+9="}], "answer": 3, "system": "9",
                                    "tools": [{"name": "3"}]} for n in range(4)))  # fmt: skip
    settings = {"train": train, "chat_template": CALLING, "system_key": "system", "tools_key": "tools"}
    assert check(tmp_path, **settings) == []


@pytest.mark.parametrize(
    ("row", "data", "reward", "unused"),
    [
        ({"prompt": "1+2=", "answer": "3"}, {}, {}, []),
        ({"id": 7, "prompt": "1+2=", "answer": "1", "choices": ["2", "3"]}, {}, {}, ["choices", "id"]),
        ({"prompt": "1+2=", "answer": "3", "system": "s", "tools": []}, {}, {}, ["tools", "system"]),
        ({"prompt": "1+2=", "rm": {"style": "rule", "truth": "3"}, "extra_info": {"index": 1}},
         {"answer_key": "rm.truth"}, {}, ["rm.style", "extra_info"]),
        ({"prompt": "1+2=", "a": {"b": {"c": "3", "d": 1}}}, {"answer_key": "a.b.c"}, {}, []),
        ({"prompt": "1+2=", "answer": "3", "level": 1, "id": 7}, {},
         {"kind": "judge", "url": "http://h/v1", "model": "m", "prompt": "{{ columns.level }} {{ completion }}"},
         ["id"]),
        ({"prompt": "1+2=", "answer": "3", "level": 1}, {}, {"kind": "remote", "address": "h:1"}, []),
    ],
)  # fmt: skip
def test_columns_that_nobody_reads_are_named_in_a_line(
    tmp_path: Path, row: dict[str, Any], data: dict[str, Any], reward: dict[str, Any], unused: list[str]
) -> None:
    train = write_json(tmp_path, row)
    sections = {"data": {"train": train, **data}} | ({"reward": reward} if reward else {})
    line = f"not used: {', '.join(unused)} (columns that no data.*_key names and no reward takes)"
    assert noted(tmp_path, **sections) == [line][: bool(unused)]


def test_columns_of_all_files_are_looked_at_and_many_are_counted(tmp_path: Path) -> None:
    one = write_json(tmp_path, {"prompt": "1+2=", "answer": "3", "a": 1})
    other = {"question": "1+3=", "answer": "4", "prompt": "x", "options": ["4"]} | {f"c{n}": n for n in range(12)}
    train = [one, {"path": write_json(tmp_path, other, name="b.jsonl"), "prompt_key": "question"}]
    (line,) = noted(tmp_path, data={"train": train})
    assert line.startswith("not used: options, a, prompt, c0, c1, c2, c3, c4, c5, c6 and 5 more (")


def test_a_function_reads_what_its_parameters_name(tmp_path: Path) -> None:
    code = "def score(completion, level, hint=None): return 1.0\ndef all_of_it(completion, **columns): return 1.0\n"
    (tmp_path / "mine.py").write_text(code)
    train = write_json(tmp_path, {"prompt": "1+2=", "answer": "3", "level": 1, "hint": "x", "id": 7})
    for function, unused in (("score", ["not used: id ("]), ("all_of_it", [])):
        lines = noted(tmp_path, data={"train": train}, reward={"function": f"mine.py:{function}"})
        assert [line[: len("not used: id (")] for line in lines] == unused


THINKING = TEMPLATE + "{{ '<think>\n' }}"
PATTERNS = [
    ("format", "<think>.*</think>.*", THINKING, "'<think>'", ": '.*</think>.*'"),
    ("format", r"^\s*<think>\n.*</think>.*", THINKING, "'<think>'", ""),
    ("regex", "(?s)(?=.*<think>).*</think>", THINKING, "'<think>'", ""),
    ("regex", "(?:<think>.+</think>)+", THINKING, "'<think>'", ""),
    ("format", ".*</think>.*", THINKING, "", ""),
    ("format", "(<think>)?.*</think>.*", THINKING, "", ""),
    ("regex", "<think>|<answer>", THINKING, "", ""),
    ("regex", "<answer>(.*)</answer>", TEMPLATE + "<answer>", "'<answer>'", ": '(.*)</answer>'"),
    ("regex", r"<answer>\n(\d+)", TEMPLATE + "<answer>\n", "'<answer>'", ""),
    ("format", ".*</think>.*", TEMPLATE + "<think>\n\n</think>\n\n", "'</think>'", ""),
    ("format", "<think>.*</think>.*", TEMPLATE, "", ""),
    ("regex", r"Answer: (\d+)", TEMPLATE + " Answer:", "'Answer:'", ""),
    ("regex", r"The answer is (\d+)", TEMPLATE + " The", "'The'", ""),
]


@pytest.mark.parametrize(("kind", "pattern", "template", "begun", "advice"), PATTERNS)
def test_a_pattern_that_begins_in_the_prompt_is_a_warning(
    tmp_path: Path, kind: str, pattern: str, template: str, begun: str, advice: str
) -> None:
    train = write_messages(tmp_path)
    file = write_config(tmp_path, data={"train": train, "chat_template": template},
                        reward={"kind": kind, "pattern": pattern})  # fmt: skip
    found = [p for p in preflight(draft_config(file), redis_url=None) if p.key == "reward.pattern"]
    assert [(p.severity, f"end with {begun} already" in p.message) for p in found] == [("warning", True)][: bool(begun)]
    assert all(p.suggestion.endswith(advice) for p in found)
