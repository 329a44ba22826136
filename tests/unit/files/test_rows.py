import json
import sys
from pathlib import Path

import pytest

from tandem_files.data_rows import Row, RowsResult, read_rows


def read(path: Path, limit: int = 20) -> RowsResult:
    return read_rows(path, prompt_key="prompt", answer_key="answer", limit=limit)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


GOOD = b'{"prompt": "1+1=", "answer": "2", "source": "x"}\n'


def test_good_rows_keep_their_line_numbers(tmp_path: Path) -> None:
    result = read(
        write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + GOOD + b"\n  \n" + '{"prompt": "é", "answer": ""}'.encode())
    )
    assert result.rows == [Row(number=1, prompt="1+1=", answer="2"), Row(number=4, prompt="é", answer="")]
    assert result.problems == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "x"}', "has no 'answer': it has 'prompt'; set data.answer_key"),
        (b'{"promt": "x", "answer": "1"}', "has no 'prompt': did you mean 'promt'? set data.prompt_key"),
        (b"{}", "has no 'prompt': it has nothing;"),
        (b'{"prompt": "x", "answer": 3}', "'answer' is int (3); it must be a string"),
        (b'{"prompt": null, "answer": "3"}', "'prompt' is null"),
        (b'{"prompt": "", "answer": "3"}', "'prompt' is empty"),
        (b'{"prompt": "x", "answer": "3"', "is not valid JSON: Expecting ',' delimiter at column 30"),
        (b"[1, 2]", "holds a JSON list; expected an object"),
        (rb'{"prompt": "ab\ud83d", "answer": "3"}', r"'prompt' is not Unicode: \ud83d at character 3 is half of a"),
        (rb'{"prompt": "x", "answer": "\udc00 "}', r"'answer' is not Unicode: \udc00 at character 1"),
        (b'{"prompt": ' + b"9" * 5000 + b', "answer": "3"}', "is JSON that cannot be parsed"),
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
    lists = b"".join(b'{"prompt": [%d], "answer": "2"}\n' % n for n in range(40))
    result = read(write(tmp_path / "a.jsonl", lists + b'{"prompt": "x"}\n' + GOOD))
    assert [problem.number for problem in result.problems] == [1, 41]
    assert result.problems[0].text == (
        "'prompt' is list ([0]); it must be a string (and 39 more rows with the same fault: 2, 3, 4, 5, 6, ...)"
    )
    assert (result.problems[1].num_others, result.more_problems, len(result.rows)) == (0, 0, 1)


def test_all_kinds_of_faults_are_counted_and_the_first_described(tmp_path: Path) -> None:
    kinds = [b"{}", b"[]", b"{", b'{"prompt": "x"}', b'{"prompt": "x"}']
    result = read(write(tmp_path / "a.jsonl", b"\n".join(kinds)), limit=3)
    assert [problem.number for problem in result.problems] == [1, 2, 3]
    assert result.more_problems == 2


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_an_empty_file_is_a_problem(tmp_path: Path, content: bytes) -> None:
    (problem,) = read(write(tmp_path / "a.jsonl", content)).problems
    assert "has no rows" in str(problem)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in str(read(tmp_path / "no.jsonl").problems[0])
    assert "is not a file" in str(read(tmp_path).problems[0])
    assert "suffix '.csv'; known are .jsonl, .ndjson, .parquet" in str(
        read(write(tmp_path / "a.csv", b"x")).problems[0]
    )


def write_parquet(path: Path, columns: dict[str, list[object]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_rows(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {"id": [7, 8], "prompt": ["a", "b"], "answer": ["1", "2"]}
    result = read(write_parquet(tmp_path / "a.parquet", columns))
    assert result.rows == [Row(number=1, prompt="a", answer="1"), Row(number=2, prompt="b", answer="2")]


def test_parquet_problems(tmp_path: Path) -> None:
    nulls = read(write_parquet(tmp_path / "a.parquet", {"prompt": ["a", None], "answer": ["1", "2"]}))
    assert str(nulls.problems[0]).endswith("a.parquet:2: 'prompt' is null (None); it must be a string")
    missing = read(write_parquet(tmp_path / "b.parquet", {"question": ["a"], "answer": ["1"]}))
    assert "has no 'prompt': it has 'question', 'answer';" in str(missing.problems[0])
    broken = read(write(tmp_path / "c.parquet", json.dumps({}).encode() * 10))
    assert "is not a readable Parquet file" in str(broken.problems[0])


def test_parquet_without_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the coordinator's image."""
    path = write_parquet(tmp_path / "a.parquet", {"prompt": ["a"], "answer": ["1"]})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = read(path)
    assert result.rows == []
    assert "pyarrow, which reads it, is not installed: build the image with TANDEM_PARQUET=1" in str(result.problems[0])
