"""Exports: what comes along from the model's and the tokenizer's folder, and which exports are kept."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from servicekit.errors import ConfigError
from tandem_files.exports import (
    EXPORT,
    MARK,
    copy_companions,
    export_folder,
    list_exports,
    note_template,
    noted_template,
    prune_exports,
    settle,
)

TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}
TEMPLATE = "additional_chat_templates/tool_use.jinja"
# What a folder may hold that is not the trained policy's.
STALE = {
    "model-q4.gguf",
    "pytorch_model.bin",
    "consolidated.00.pth",
    "model.onnx",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "original/params.json",
    "optimizer.pt",
    "README.md",
}


def make(folder: Path, *names: str, **contents: object) -> Path:
    """Make a folder of files that hold their own path, and of JSON files (`config` is config.json)."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{folder.name}/{name}")
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def copied(model: Path, tokenizer: Path | None = None) -> dict[str, str]:
    """What comes along, by path below the export."""
    out = model.parent / "out"
    out.mkdir()
    copy_companions(model, tokenizer, out, "bfloat16", {"policy_version": 3})
    assert EXPORT.is_in(out)
    return {str(path.relative_to(out)): path.read_text() for path in out.rglob("*") if path.is_file()}


def test_a_models_own_tokenizer_comes_along_and_stale_weights_do_not(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "torch_dtype": "float16", "rope_scaling": {"type": "yarn"}}
    names = [*TOKENIZER, TEMPLATE, "LICENSE", "merges.txt", *STALE]
    found = copied(make(tmp_path / "model", *names, config=config, generation_config={"eos_token_id": [1, 2]}))
    kept = {*TOKENIZER, TEMPLATE, "LICENSE", "merges.txt", "config.json", "generation_config.json", MARK}
    assert set(found) == kept
    assert json.loads(found["config.json"]) == {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "yarn"},
    }
    assert json.loads(found[MARK]) == {"template": "model", "policy_version": 3}


def test_with_a_tokenizer_of_its_own_no_file_of_the_models_is_mixed_in(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "tokenizer.json", "vocab.json", "chat_template.jinja", config={"eos_token_id": 1})
    names = [*TOKENIZER, TEMPLATE, "model.safetensors", "config.json", "LICENSE"]
    found = copied(model, make(tmp_path / "tokens", *names))
    assert set(found) == {*TOKENIZER, TEMPLATE, "config.json", MARK}
    assert {found[name].partition("/")[0] for name in {*TOKENIZER, TEMPLATE}} == {"tokens"}
    assert json.loads(found["config.json"])["eos_token_id"] == 1


def test_a_runs_own_template_is_the_only_one(tmp_path: Path) -> None:
    note_template(tmp_path, "mine\r\n")
    tokens = make(
        tmp_path / "tokens",
        *TOKENIZER,
        TEMPLATE,
        "chat_template.json",
        tokenizer_config={"chat_template": "t", "eos_token": "é"},
    )
    out = tmp_path / "out"
    out.mkdir()
    copy_companions(make(tmp_path / "model", config={}), tokens, out, "bfloat16", {}, noted_template(tmp_path))
    assert {path.name for path in out.iterdir()} == {*TOKENIZER, "config.json", MARK}
    assert (out / "chat_template.jinja").read_bytes() == b"mine\r\n"
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"eos_token": "é"}
    note_template(tmp_path, None)
    assert noted_template(tmp_path) is noted_template(None) is None


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [(1, [1, 2], [1, 2]), ([1, 2], [2, 3], None), (None, 7, 7)],
    ids=["all-of-the-runs", "not-all", "the-run-has-none"],
)
def test_a_tokenizers_generation_config_comes_along_if_completions_still_end_there(
    tmp_path: Path, own: object, theirs: object, expected: object
) -> None:
    model = make(tmp_path / "model", config={"eos_token_id": own})
    tokens = make(tmp_path / "tokens", "tokenizer.json", generation_config={"eos_token_id": theirs})
    found = copied(model, tokens).get("generation_config.json")
    assert (None if found is None else json.loads(found)["eos_token_id"]) == expected


def test_the_models_own_generation_config_is_preferred(tmp_path: Path) -> None:
    model = make(tmp_path / "model", config={}, generation_config={"eos_token_id": 1})
    tokens = make(tmp_path / "tokens", "tokenizer.json", generation_config={"eos_token_id": [1, 2]})
    assert json.loads(copied(model, tokens)["generation_config.json"]) == {"eos_token_id": 1}


@pytest.mark.parametrize(("config", "says"), [("[]", "JSON list"), ("{", "not valid JSON")])
def test_a_damaged_config_is_named(tmp_path: Path, config: str, says: str) -> None:
    model = make(tmp_path / "model", "config.json")
    (model / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=rf"config\.json .*{says}"):
        copied(model)


def test_a_tokenizer_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tokenizer_path .*gone has no tokenizer\.json"):
        copied(make(tmp_path / "model", config={}), tmp_path / "gone")


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def test_every_file_is_as_readable_as_the_umask_says(tmp_path: Path, umask: None) -> None:
    folder = make(tmp_path / "out", MARK, TEMPLATE)
    (folder / "model.safetensors").touch(0o600)
    settle(folder)
    assert {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()} == {0o640}


def test_the_newest_exports_are_kept_and_a_users_folder_is_never_removed(tmp_path: Path) -> None:
    for iteration in (5, 10, 15, 20, 30):
        make(export_folder(tmp_path, iteration), MARK, "model.safetensors")
    users = make(export_folder(tmp_path, 1), MARK, "evaluation/results.txt")
    make(tmp_path / "exports" / "notes", MARK)
    make(tmp_path / "exports" / ".iteration-000020.partial", "model.safetensors")
    assert [number for number, _ in list_exports(tmp_path)] == [5, 10, 15, 20, 30]
    removed = prune_exports(tmp_path, newest=20, keep=2)  # resumed from before 30: that is not reached again yet
    assert removed == [export_folder(tmp_path, 5), export_folder(tmp_path, 10)]
    kept = {"iteration-000015", "iteration-000020", "iteration-000030", users.name, "notes"}
    assert {path.name for path in (tmp_path / "exports").iterdir()} == kept


def test_a_run_without_exports_has_none(tmp_path: Path) -> None:
    assert list_exports(tmp_path) == []
    with pytest.raises(ValueError, match="0"):
        prune_exports(tmp_path, newest=1, keep=0)
