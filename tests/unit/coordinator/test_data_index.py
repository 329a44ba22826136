"""The launcher's index of the rows: the coordinator finds what a pass would find, and never that of other data."""

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from coordinator.data.prompts import PromptSet, load_prompts
from coordinator.data.scan import Scanner
from coordinator.data.scan_cache import FOLDER, RowIndex, write_indices
from launcher.check.preflight import preflight
from tandem_config.loading import draft_config, load_config
from tandem_config.schema import RunConfig
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import write_config

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Two weighted files, one of them Parquet, with a prompt that is too long; the launcher has checked them."""
    monkeypatch.setattr("coordinator.data.scan_cache._TICK_S", -60.0)  # they have just been written
    rows = [{"prompt": "1+2=" if number % 7 else "1+2=" * 4, "answer": str(number)} for number in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[20:]), tmp_path / "b.parquet")
    sources = [{"path": "a.jsonl", "weight": 2.0}, {"path": "b.parquet", "weight": 1.0}]
    settings = {"train": sources, "max_prompt_tokens": 8, "overlong_prompts": "drop", "chat_template": TEMPLATE}
    file = write_config(tmp_path, data=settings | {"prompt_as": "user_message", "heldout": None})
    indices = check(file)
    assert len(indices) == 2
    write_indices(tmp_path, indices)
    return load_config(file)


def check(file: Path) -> list[RowIndex]:
    indices: list[RowIndex] = []
    preflight(draft_config(file), redis_url=None, indices=indices)
    return indices


def load(config: RunConfig, run_dir: Path | None, **changes: Any) -> PromptSet:
    section = config.data.model_copy(update=changes)
    return load_prompts(section, "train", TextCodec.from_folders(config.model.path), run_dir)


def without_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    def scan(*_: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(Scanner, "scan", scan)


def test_prompts_of_an_index_are_those_of_a_pass(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load(config, None)
    without_passes(monkeypatch)
    found = load(config, tmp_path)
    assert list(found) == list(whole)
    assert (found.num_prompts, found.dropped) == (25, whole.dropped)
    for mine, theirs in zip(found.scans, whole.scans, strict=True):
        theirs.overlong.clear()
        assert mine == theirs
    assert [prompt.answer for prompt in found.sources[1].read([2, 0])] == ["23", "20"]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_prompt_tokens": 9},
        {"system_prompt": "1"},
        {"chat_template": TEMPLATE + "="},
        {"chat_template_kwargs": {"a": 1}},
        {"prompt_as": "text"},
        {"answer_key": "prompt"},
        {"overlong_prompts": "error"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_settings_have_no_index(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    without_passes(monkeypatch)
    with pytest.raises(AssertionError, match="read again"):
        load(config, tmp_path, **changes)


@pytest.mark.parametrize("keep_time", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_file_of_equal_size_that_has_changed_has_no_index(
    config: RunConfig, tmp_path: Path, keep_time: bool, in_place: bool
) -> None:
    path = tmp_path / "a.jsonl"
    before, content = path.stat(), path.read_text().replace("1+2=", "2+2=")
    assert len(content) == before.st_size
    new = path if in_place else tmp_path / "new"
    new.write_text(content)
    if keep_time:
        os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.replace(path)
    assert load(config, tmp_path).sources[0][0].text == "2+2="


def test_another_tokenizer_has_no_index(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model" / "tokenizer.json"
    path.write_text(path.read_text().replace('"<unk>"', '"<none>"'))
    without_passes(monkeypatch)
    with pytest.raises(AssertionError, match="read again"):
        load(config, tmp_path)


def test_a_damaged_index_is_not_used(config: RunConfig, tmp_path: Path) -> None:
    whole = list(load(config, None))
    for index in (tmp_path / FOLDER).iterdir():
        index.write_bytes(index.read_bytes()[:-40])
    assert list(load(config, tmp_path)) == whole


def test_files_that_have_just_been_written_get_no_index(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.data.scan_cache._TICK_S", 60.0)
    assert check(tmp_path / "tiny.yaml") == []
