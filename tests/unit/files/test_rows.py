import datetime
import decimal
import json
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tandem_files.rows import reading
from tandem_files.rows.files import find_files
from tandem_files.rows.problems import DataError, Faults, RowProblem
from tandem_files.rows.reading import Row, RowKeys, first_record, read_rows


@dataclass
class Read:
    rows: list[Row]
    faults: Faults

    @property
    def problems(self) -> list[RowProblem]:
        return self.faults.problems


def read(path: Path, limit: int = 20, **keys: str | None) -> Read:
    result = Read(rows=[], faults=Faults(limit=limit))
    for item in read_rows(path, RowKeys(**keys)):
        if isinstance(item, Row):
            result.rows.append(item)
        else:
            result.faults.add(item)
    return result


def values(result: Read) -> list[tuple[int, object, str]]:
    return [(row.number, row.prompt, row.answer) for row in result.rows]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


GOOD = b'{"prompt": "1+1=", "answer": "2", "source": "x"}\n'


def test_good_rows_keep_their_line_numbers(tmp_path: Path) -> None:
    result = read(
        write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + GOOD + b"\n  \n" + '{"prompt": "é", "answer": ""}'.encode())
    )
    assert values(result) == [(1, "1+1=", "2"), (4, "é", "")]
    assert result.rows[0].columns["source"] == "x"
    assert result.problems == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"}', "has no 'answer': it has 'prompt'; set data.answer_key"),
        (b'{"promt": "x", "answer": "1"}', "has no 'prompt': did you mean 'promt'? set data.prompt_key"),
        (b"{}", "has no 'prompt': it has nothing;"),
        (b'{"prompt": "x", "answer": [[3]]}', "'answer' is list ([[3]]); it must be a string or a number"),
        (b'{"prompt": "x", "answer": []}', "'answer' is list ([]); it must be a string or a number"),
        (b'{"prompt": "x", "answer": {"target": ["3"]}}', "set data.answer_key to answer.target"),
        (b'{"prompt": "x", "answer": NaN}', "'answer' is float (nan)"),
        (
            b'{"prompt": "x", "answer": null}',
            "'answer' is null (None); it must be a string or a number, a truth value or a list of these (data.answer_",
        ),
        (b'{"prompt": null, "answer": "3"}', "'prompt' is null"),
        (b'{"prompt": "", "answer": "3"}', "'prompt' is empty"),
        (b'{"prompt": "x", "answer": "3"', "is not valid JSON: Expecting ',' delimiter at column 30"),
        (b"[1, 2]", "holds a JSON list; expected an object"),
        (rb'{"prompt": "ab\ud83d", "answer": "3"}', r"'prompt' is not Unicode: \ud83d at character 3 is half of a"),
        (rb'{"prompt": "x", "answer": "\udc00 "}', r"'answer' is not Unicode: \udc00 at character 1"),
        (b'{"prompt": ' + b"9" * 5000 + b', "answer": "3"}', "holds an integer of more than 4,300 digits"),
        (b"[" * 100_000, "is JSON that cannot be parsed"),
        (b'{"prompt": "\xff", "answer": "3"}', "is not valid UTF-8: byte 0xff at offset 12 of the line"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path / "a.jsonl", GOOD + line + b"\n" + GOOD)
    result = read(path)
    assert [row.number for row in result.rows] == [1, 3]
    (problem,) = result.problems
    assert str(problem).startswith(f"{path}:2: ")
    assert message in str(problem)


def test_the_same_fault_is_reported_once_with_a_count(tmp_path: Path) -> None:
    wrong = b"".join(b'{"prompt": %d, "answer": "2"}\n' % n for n in range(40))
    result = read(write(tmp_path / "a.jsonl", wrong + b'{"prompt": "x"}\n' + GOOD))
    assert [problem.number for problem in result.problems] == [1, 41]
    assert result.problems[0].text == (
        "'prompt' is int (0); it must be a string or a list of messages (and 39 more rows with the same fault: "
        "2, 3, 4, 5, 6, ...)"
    )
    assert (result.problems[1].num_others, result.faults.num_more, len(result.rows)) == (0, 0, 1)


def test_all_kinds_of_faults_are_counted_and_the_first_described(tmp_path: Path) -> None:
    kinds = [b"{}", b"[]", b"{", b'{"prompt": "x"}', b'{"prompt": "x"}']
    result = read(write(tmp_path / "a.jsonl", b"\n".join(kinds)), limit=3)
    assert [problem.number for problem in result.problems] == [1, 2, 3]
    assert result.faults.num_more == 2


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_a_problem(tmp_path: Path, content: bytes) -> None:
    (problem,) = read(write(tmp_path / "a.jsonl", content)).problems
    assert "has no rows" in str(problem)


LISTED = "{folder} holds a.csv, a.jsonl, b.jsonl, deep/, lfs.jsonl, p.jsonl.gz"
BAD_FILES = [
    ("no.jsonl", "no.jsonl: does not exist"),
    ("a.jsnl", "does not exist: did you mean a.jsonl?"),
    ("gone/*.jsonl", "gone/*.jsonl: matches no file: there is no folder {folder}/gone"),
    ("x*.jsonl", "matches no file: " + LISTED),
    ("", "is a folder: " + LISTED + "; name a file, or a glob"),
    ("a.csv", "suffix '.csv'; known are .jsonl, .ndjson, .json, .parquet"),
    ("p.jsonl.gz", "suffix '.gz'; known are .jsonl, .ndjson, .json, .parquet: unpack it first"),
    ("lfs.jsonl", "is a git-LFS pointer, not the data"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl", "a.csv", "p.jsonl.gz"):
        write(tmp_path / name, GOOD)
    write(tmp_path / "lfs.jsonl", b"version https://git-lfs.example/spec/v1\noid sha256:0\nsize 9\n")
    return tmp_path


@pytest.mark.parametrize(("name", "message"), BAD_FILES, ids=[row[0] for row in BAD_FILES])
def test_files_that_cannot_be_data(folder: Path, name: str, message: str) -> None:
    with pytest.raises(DataError) as caught:
        find_files(folder / name)
    assert message.format(folder=folder) in str(caught.value)


def test_a_glob_is_the_files_that_it_matches_in_order(folder: Path) -> None:
    assert find_files(folder / "[ab].jsonl") == [folder / "a.jsonl", folder / "b.jsonl"]
    assert [file.name for file in find_files(folder / "**" / "?.jsonl")] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    write(folder / "x[1].jsonl", GOOD)
    assert find_files(folder / "x[1].jsonl") == [folder / "x[1].jsonl"]


def test_a_file_that_is_one_long_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINE_BYTES", 1 << 10)
    with pytest.raises(DataError, match=r"a\.jsonl:2: is longer than .* is the file JSON lines"):
        read(write(tmp_path / "a.jsonl", GOOD + b"[" + GOOD.strip() * 100 + b"]"))


@pytest.mark.parametrize(("answer", "text"), [(3, "3"), (-2.5, "-2.5"), (10**30, "1" + "0" * 30), ("x", "x")])
def test_an_answer_that_is_a_number_is_its_text(tmp_path: Path, answer: object, text: str) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": "a", "answer": answer}).encode())
    assert values(read(path)) == [(1, "a", text)]


def test_columns_within_columns_and_rows_without_an_answer(tmp_path: Path) -> None:
    row = {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": 7}, "x.y": "b"}
    path = write(tmp_path / "a.jsonl", json.dumps(row).encode())
    assert values(read(path, answer="reward_model.ground_truth")) == [(1, "a", "7")]
    assert values(read(path, prompt="x.y", answer=None)) == [(1, "b", "")]
    (problem,) = read(path, answer="reward_model.groundtruth").problems
    assert "has no 'reward_model.groundtruth': did you mean 'reward_model.ground_truth'?" in problem.message


USER = {"role": "user", "content": "hi"}
TOOL_CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
BAD_MESSAGES = [
    ([], "'prompt' is an empty list"),
    (["hi"], "'prompt'[0] is str ('hi'); a message is an object with role and content"),
    ([USER, {"content": "x"}], "'prompt'[1] has no role ('content')"),
    ([{"role": "user"}], "'prompt'[0] has null (None) as content; it must be a string"),
    ([{"role": "user", "content": 3}], "has int (3) as content"),
    ([{"role": "user", "content": []}], "'prompt'[0] has an empty list of parts as content"),
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], "holds a part dict ({'type': 'text'}); a part"),
    ([{"role": "user", "content": [{"type": "audio", "text": "x"}]}], "holds a part of type 'audio'; a part of a"),
    (
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "x"}]}],
        "holds a part of type 'image': images are not supported",
    ),
    ([{"from": "robot", "value": "x"}], "'prompt'[0] is from 'robot'; known are human, user, gpt, "),
    ([USER, {"from": "gpt", "value": "4"}], "'prompt' ends with the assistant's message"),
    ([{"from": "function_call", "value": "f(1)"}, USER], "is a function_call of str ('f(1)'); it must be JSON of a"),
    (json.dumps([USER, {"from": "gpt", "value": "4"}]), "ends with the assistant's message; a prompt ends"),
    (str([USER]), "'prompt' holds messages as Python writes them; write them as JSON"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": "u"}]}],
        "'prompt'[0] holds a part of type 'image_url': images are not supported",
    ),
    ([USER, {"role": "assistant", "content": "4"}], "ends with the assistant's message"),
    ([{"role": "user", "content": "\ud800"}], r"'prompt[0].content' is not Unicode: \ud800 at character 1"),
]


@pytest.mark.parametrize(("messages", "message"), BAD_MESSAGES, ids=[row[1] for row in BAD_MESSAGES])
def test_messages_that_cannot_be_rendered(tmp_path: Path, messages: object, message: str) -> None:
    rows = [{"prompt": [USER]}, {"prompt": messages}]
    result = read(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode()), answer=None)
    (problem,) = result.problems
    assert problem.number == 2
    assert message in problem.message


def test_a_message_that_only_calls_tools_needs_no_content(tmp_path: Path) -> None:
    row = {"prompt": [USER, TOOL_CALL, {"role": "tool", "content": "4"}]}
    assert read(write(tmp_path / "a.jsonl", json.dumps(row).encode()), answer=None).problems == []


SYSTEM = {"role": "system", "content": "s"}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
FORMS = [
    ([{"from": "human", "value": "hi"}], [USER]),
    ([{"from": "system", "value": "s"}, {"from": "Human", "value": "hi", "weight": 1}], [SYSTEM, USER | {"weight": 1}]),
    ([{"from": "human", "value": "a"}, {"role": "assistant", "content": "b"}, USER],
     [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, USER]),
    ([USER, {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
      {"from": "observation", "value": "1"}],
     [USER, {"role": "assistant", "tool_calls": CALLS}, {"role": "tool", "content": "1"}]),
    ([{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}], [USER]),
    ([{"role": "user", "content": [{"text": "h"}, "i"]}], [USER]),
    ([{"role": "user", "content": {"type": "text", "text": "hi"}}], [USER]),
    ([{"from": "human", "value": [{"type": "text", "text": "hi"}]}], [USER]),
    ([{"role": "user", "content": "hi", "name": None, "tool_calls": None}], [USER]),
    (json.dumps([USER | {"name": None}]), [USER]),
    (" " + json.dumps([{"from": "human", "value": "hi"}]) + "\n", [USER]),
    ('[{"role": "user", "content": [{"type": "text", "text": "hi"}]}]', [USER]),
    ("[1, 2]", "[1, 2]"),
    ("[]", "[]"),
    ('[{"role": "CTO", "name": "Ann"}] Who is it?', '[{"role": "CTO", "name": "Ann"}] Who is it?'),
    ('[{"role": "CTO", "name": "Ann"}]', '[{"role": "CTO", "name": "Ann"}]'),
    ("[" * 100_000, "[" * 100_000),
    ("['role'] is what?", "['role'] is what?"),
]  # fmt: skip


@pytest.mark.parametrize(("prompt", "expected"), FORMS)
def test_messages_in_every_form_are_the_same_messages(tmp_path: Path, prompt: object, expected: object) -> None:
    for name, content in (
        ("a.jsonl", json.dumps({"prompt": prompt})),
        ("a.json", json.dumps([{"prompt": prompt}], indent=1)),
    ):
        result = read(write(tmp_path / name, content.encode()), answer=None)
        assert ([row.prompt for row in result.rows], result.problems) == ([expected], [])


def test_rows_with_nulls_are_alike_in_jsonl_json_and_parquet(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {
            "prompt": [USER, TOOL_CALL | {"name": None}, {"role": "tool", "content": "4"}],
            "tools": [{"name": "f", "default": None}, {"name": "g", "default": "1"}],
            "extra_info": {"a": None, "b": [1, None]},
            "note": None,
        },
        {"prompt": [USER], "tools": [{"name": "f"}], "extra_info": {"a": 1}, "note": "x"},
    ]
    write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)).encode())
    write(tmp_path / "a.json", json.dumps(rows).encode())
    write_parquet(tmp_path / "a.parquet", {name: [row[name] for row in rows] for name in rows[0]})
    one, other, parquet = (
        [(row.prompt, row.tools, row.columns) for row in read(tmp_path / name, answer=None, tools="tools").rows]
        for name in ("a.jsonl", "a.json", "a.parquet")
    )
    assert one == other == parquet
    assert one[0][0][1] == {"role": "assistant", "tool_calls": [{"id": "1"}]}
    assert (one[0][2]["extra_info"], one[0][2]["note"], one[1][2]["extra_info"]) == ({"b": [1, None]}, None, {"a": 1})


def test_dots_that_lead_into_a_list_are_named(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "hi"}]}
    path = write(tmp_path / "a.jsonl", json.dumps(row).encode())
    (problem,) = read(path, prompt="conversations.0.value", answer=None).problems
    assert "'conversations' is a list, into which dots do not lead: set data.prompt_key to conver" in problem.message


@pytest.mark.parametrize(("value", "system"), [("Be brief.", "Be brief."), (None, None), ("", None), (" ", None)])
def test_a_row_may_have_a_system_prompt(tmp_path: Path, value: object, system: str | None) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": "a", "meta": {"system": value}, "s": value}).encode())
    assert [row.system for row in read(path, answer=None, system="s").rows] == [system]


@pytest.mark.parametrize("value", [3, ["x"], {"role": "system"}])
def test_a_system_prompt_that_is_no_text_is_named(tmp_path: Path, value: object) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"prompt": "a", "s": value}).encode())
    (problem,) = read(path, answer=None, system="s").problems
    assert "a system prompt is a string, or null where a row has none" in problem.message


JSON_FILES: list[tuple[bytes, list[int], str]] = [
    (b'[{"prompt": "a"}, {"prompt": "]}"}]', [1, 2], ""),
    (b'\xef\xbb\xbf [\n {"prompt":\n "a"},\n\n {"prompt": "\\"["}\n]\n', [1, 2], ""),
    (GOOD + GOOD, [1, 2], ""),
    (b'[{"prompt": "a"}, 3, {"prompt": "a"}]', [1, 3], "a.json:2: holds a JSON int"),
    (b'[{"prompt": "a"}, {"prompt": a}]', [1], "a.json:2: is not valid JSON"),
    (b'{"rows": [{"prompt": "a"}]}', [], "a.json:1: has no 'prompt': it has 'rows'"),
    (b"[]", [], "has no rows"),
    (b"", [], "has no rows"),
]
CUT_OFF = [
    (b'[{"prompt": "a"}, {"prompt": "a"', "a.json:2: its JSON is cut off"),
    (b'[{"prompt": "a"},', "a.json: its JSON list of 1 rows is not closed"),
    (b'[{"prompt": "a"}] {"prompt": "b"}', "a.json:2: its JSON list ends before"),
]


@pytest.mark.parametrize(("content", "numbers", "message"), JSON_FILES)
def test_a_json_list_is_read_row_by_row(tmp_path: Path, content: bytes, numbers: list[int], message: str) -> None:
    result = read(write(tmp_path / "a.json", content), answer=None)
    assert [row.number for row in result.rows] == numbers
    assert message in "\n".join(map(str, result.problems))
    assert len(result.problems) == bool(message)


@pytest.mark.parametrize(("content", "message"), CUT_OFF)
def test_a_json_list_that_is_cut_off_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read(write(tmp_path / "a.json", content), answer=None)


@pytest.mark.parametrize("content", [b'[\n {"prompt": "a"},\n {"prompt": "b"}\n]\n', b'\n[{"prompt": "a"}]'])
def test_a_json_list_that_is_called_lines_is_named_once(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl:\d: is one JSON list, .*: give it the suffix \.json$"):
        read(write(tmp_path / "a.jsonl", content))


def test_images_in_a_column_of_their_own_are_refused(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "<image>what?"}], "images": ["a.png"]}
    (problem,) = read(write(tmp_path / "a.jsonl", json.dumps(row).encode()), answer=None).problems
    assert "has images in the column 'images': images are not supported" in problem.message


@pytest.mark.parametrize(
    ("tools", "message"),
    [("[{", "is a text that is no JSON"), ({"a": 1}, "tools are a list of JSON schemas"), (["f"], "JSON schemas")],
)
def test_tools_that_are_none(tmp_path: Path, tools: object, message: str) -> None:
    row = {"prompt": "a", "tools": tools}
    (problem,) = read(write(tmp_path / "a.jsonl", json.dumps(row).encode()), answer=None, tools="tools").problems
    assert message in problem.message


def write_parquet(path: Path, columns: dict[str, list[object]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_rows(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {"id": [7, 8], "prompt": ["a", "b"], "answer": ["1", "2"]}
    result = read(write_parquet(tmp_path / "a.parquet", columns))
    assert values(result) == [(1, "a", "1"), (2, "b", "2")]
    assert [row.columns["id"] for row in result.rows] == [7, 8]


def test_parquet_problems(tmp_path: Path) -> None:
    nulls = read(write_parquet(tmp_path / "a.parquet", {"prompt": ["a", None], "answer": ["1", "2"]}))
    assert str(nulls.problems[0]).endswith(
        "a.parquet:2: 'prompt' is null (None); it must be a string or a list of messages"
    )
    missing = read(write_parquet(tmp_path / "b.parquet", {"question": ["a"], "answer": ["1"]}))
    assert "has no 'prompt': it has 'question', 'answer';" in str(missing.problems[0])
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (json.dumps({}).encode() * 10, whole[: len(whole) // 2]):
        with pytest.raises(DataError, match=r"c\.parquet: is not a readable Parquet file: "):
            read(write(tmp_path / "c.parquet", content))


def test_parquet_values_are_those_of_json(tmp_path: Path) -> None:
    """As verl keeps its data; a field that only some messages have is null in the others, and is left out."""
    when = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    columns: dict[str, list[object]] = {
        "prompt": [[{"role": "system", "content": "s", "name": None}, {"role": "user", "content": "a", "name": "n"}]],
        "tools": [[{"type": "function", "function": {"name": "f", "description": None}}]],
        "reward_model": [{"style": "rule", "ground_truth": 4}],
        "extra": [{"when": when, "price": decimal.Decimal("1.50"), "raw": b"\xff", "none": None, "tags": ["x"]}],
    }
    path = write_parquet(tmp_path / "a.parquet", columns)
    (row,) = read(path, answer="reward_model.ground_truth", tools="tools").rows
    assert row.prompt == [{"role": "system", "content": "s"}, {"role": "user", "content": "a", "name": "n"}]
    assert row.tools == [{"type": "function", "function": {"name": "f"}}]
    assert row.answer == "4"
    assert row.columns["extra"] == {
        "when": "2026-01-02T03:04:05+00:00", "price": "1.5", "raw": "/w==", "tags": ["x"],
    }  # fmt: skip
    assert json.loads(json.dumps(row.columns)) == row.columns


def test_the_first_record_has_all_columns_whatever_their_names(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", b'\xef\xbb\xbf\n{"x": 1, "y": null}\n{"x": 2}\n')
    assert first_record(lines) == (2, {"x": 1, "y": None})
    assert first_record(write_parquet(tmp_path / "a.parquet", {"x": [{"a": "b"}], "y": [1]})) == (
        1,
        {"x": {"a": "b"}, "y": 1},
    )
    with pytest.raises(DataError, match=r"b.jsonl:1: is not valid JSON"):
        first_record(write(tmp_path / "b.jsonl", b"{\n"))
    with pytest.raises(DataError, match="has no rows"):
        first_record(write(tmp_path / "c.jsonl", b"\n"))


def test_answers_are_the_texts_of_the_file_and_alike_in_both_formats(tmp_path: Path) -> None:
    """(the answer in JSON, in Parquet, its text of each)."""
    single = pyarrow.float32()
    table: list[tuple[str, pyarrow.Array, str, str]] = [
        ("0.00001", pyarrow.array([0.00001]), "0.00001", "0.00001"),
        ("1e17", pyarrow.array([1e17]), "1e17", "100000000000000000"),
        ("6.0", pyarrow.array([6.0]), "6.0", "6"),
        ("0.1", pyarrow.array([0.1], single), "0.1", "0.1"),
        ("6.50", pyarrow.array([decimal.Decimal("6.50")]), "6.50", "6.5"),
        ("6", pyarrow.array([6]), "6", "6"),
        ("9" * 60, pyarrow.array(["9" * 60]), "9" * 60, "9" * 60),
        ("true", pyarrow.array([True]), "true", "true"),
        ('["Paris", "paris"]', pyarrow.array([["Paris", "paris"]]), '["Paris", "paris"]', '["Paris", "paris"]'),
        ("[1.50, 2]", pyarrow.array([[1.5, 2.0]]), '["1.50", "2"]', '["1.5", "2"]'),
        ('["x"]', pyarrow.array([["x"]]), "x", "x"),
    ]
    for place, (text, array, of_json, of_parquet) in enumerate(table):
        lines, parquet = tmp_path / f"{place}.jsonl", tmp_path / f"{place}.parquet"
        lines.write_text(f'{{"prompt": "x", "answer": {text}}}\n', encoding="utf-8")
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"], "answer": array}), parquet)
        for path, expected in ((lines, of_json), (parquet, of_parquet)):
            (row,) = read_rows(path, RowKeys())
            assert isinstance(row, Row)
            assert row.answer == expected
