"""Stored samples: what is written is read again, by iteration and kind; what is missing or damaged is named."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from servicekit.errors import ConfigError
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import MaskedSpan, TextSpan, plain
from tests.kit.folders import stored, write_samples

FULL = stored(
    columns='{"level": 3}',
    reward_parts={"format": 0.5, "math": 1.0},
    reward_columns=("level",),
    errors={"format": "KeyError: 'tag'"},
    version_spans=(TextSpan(end=1, text_end=1, policy_version=4), TextSpan(end=2, text_end=6, policy_version=5)),
    masked_spans=(MaskedSpan(start=1, end=2, text_start=1, text_end=6),),
    token_ids=[7, 1],
    completion="<b>\x1b[2J</b> ünï\n😀<eos>",
)


def test_a_sample_comes_back_as_it_was(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    size = write_samples(folder, 1, "train", [FULL, stored(sample=1, advantage=None)])
    assert folder.load(1, "train", [1, 0]) == [stored(sample=1, advantage=None), FULL]
    assert folder.sizes() == {1: size}


def test_a_file_of_an_older_release_is_read(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    write_samples(folder, 1, "train", [FULL])
    path = tmp_path / "samples" / "00000001.train.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["errors", "reward_columns", "masked_spans"]), path)
    assert folder.load(1, "train", [0]) == [replace(FULL, errors={}, reward_columns=(), masked_spans=())]
    assert [head.errors for head in folder.heads(1, "train")] == [{}]


def test_only_its_owner_can_open_the_folder(tmp_path: Path) -> None:
    write_samples(SampleFolder(tmp_path), 1, "train", [stored()])
    assert (tmp_path / "samples").stat().st_mode & 0o777 == 0o700


def test_places_are_those_of_the_file_beyond_one_row_group(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    write_samples(
        folder, 1, "train", [stored(k // 16, k % 16, num_tokens=k, completion=f"text {k}") for k in range(1200)]
    )
    assert [head.num_tokens for head in folder.heads(1, "train")] == list(range(1200))
    assert [sample.completion for sample in folder.load(1, "train", [1199, 3, 600])] == [
        "text 1199",
        "text 3",
        "text 600",
    ]
    assert folder.matching(1, "train", r"^text (7|1100)$") == [7, 1100]


def test_a_text_is_found_in_prompt_or_completion_in_linear_time(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    write_samples(folder, 1, "train", [stored(0), stored(1, prompt="two"), stored(2, completion="a" * 5000)])
    assert folder.matching(1, "train", "two") == [1]
    assert folder.matching(1, "train", "(a|aa)+$") == [2]  # exponential in Python's re
    with pytest.raises(ConfigError, match=r"'\(' is not a regular expression"):
        folder.matching(1, "train", "(")


def test_what_is_meant_and_what_is_missing(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    with pytest.raises(ConfigError, match=r"no stored samples: samples\.enabled is false"):
        folder.resolve(None, None)
    for number in range(1, 31):
        write_samples(folder, number, "train", [stored()])
    write_samples(folder, 0, "heldout", [stored()])
    write_samples(folder, 20, "heldout", [stored()])
    assert folder.resolve(None, None) == (30, "train")
    assert folder.resolve(None, "heldout") == (20, "heldout")
    assert folder.resolve(0, None) == (0, "heldout")
    assert folder.iterations()[20] == ["train", "heldout"]
    with pytest.raises(ConfigError, match=r"no samples of iteration 31; stored: 0, 1, 2, 3, 4, 5, \.\.\., 25, 26, 27"):
        folder.resolve(31, None)
    with pytest.raises(ConfigError, match=r"no samples of kind 'heldout' of iteration 3; stored: 0, 20"):
        folder.resolve(3, "heldout")
    with pytest.raises(ConfigError, match=r"no samples of kind 'test'; stored: heldout, train"):
        folder.resolve(None, "test")
    folder.remove(20)
    assert 20 not in folder.sizes()


def test_a_name_of_an_evaluation_set_stays_in_the_folder(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    write_samples(folder, 1, "../../aime 24", [stored()])
    assert folder.iterations() == {1: ["-aime-24"]}
    assert [path.name for path in tmp_path.iterdir()] == ["samples"]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    write_samples(folder, 1, "train", [stored()])
    path = tmp_path / "samples" / "00000001.train.parquet"
    path.write_bytes(path.read_bytes()[:40])
    for read in (lambda: folder.heads(1, "train"), lambda: folder.load(1, "train", [0])):
        with pytest.raises(ConfigError, match=r"00000001\.train\.parquet cannot be read"):
            read()


def test_odd_values_are_stored_and_are_json(tmp_path: Path) -> None:
    folder = SampleFolder(tmp_path)
    write_samples(folder, 1, "train", [stored(prompt="lone \ud800", reward_parts={"bad": math.nan}, reward=math.inf)])
    (sample,) = folder.load(1, "train", [0])
    assert sample.prompt == "lone ?"
    found = json.loads(json.dumps(plain(sample), allow_nan=False))
    assert (found["reward"], found["reward_parts"]) == (None, {"bad": None})
