"""Hugging Face folders: each rank reads its own slices, and what is wrong with a folder is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from servicekit.errors import ConfigError
from tests.weight_stores import canonical_tensors, cut, empty_like_rank, same, tiny_spec
from weightsync.hf_files import gather_tensors, load_shards, write_folder
from weightsync.layout import Parallel
from weightsync.megatron_layout import megatron_layout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A template: config and tokenizer, no weights."""
    template = tmp_path / "template"
    template.mkdir()
    (template / "config.json").write_text('{"model_type": "qwen3", "torch_dtype": "float16"}')
    (template / "tokenizer.json").write_text("{}")
    (template / "stale.safetensors").write_text("old weights")
    return template


def test_a_written_folder_is_read_back_by_every_rank(folder: Path, tmp_path: Path) -> None:
    spec = tiny_spec(tie_word_embeddings=True)
    full = canonical_tensors(spec)
    size = write_folder(full, folder, tmp_path / "hf")
    assert size == sum(tensor.numel() * 4 for tensor in full.values())
    layout = megatron_layout(spec, Parallel(tensor=2, pipeline=2))
    for rank in range(4):
        tensors = empty_like_rank(layout, rank)
        load_shards(tmp_path / "hf", spec, layout, rank, tensors)
        assert same(tensors, cut(layout, rank, full)) == []


def test_a_written_folder_has_config_and_tokenizer_but_no_old_weights(folder: Path, tmp_path: Path) -> None:
    write_folder({"a": torch.zeros(2, dtype=torch.bfloat16)}, folder, tmp_path / "hf")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "qwen3", "dtype": "bfloat16"}


def test_an_older_folder_is_replaced_whole(folder: Path, tmp_path: Path) -> None:
    write_folder({"a": torch.zeros(2)}, folder, tmp_path / "hf")
    (tmp_path / "hf" / "leftover").write_text("x")
    write_folder({"a": torch.ones(2)}, folder, tmp_path / "hf")
    assert not (tmp_path / "hf" / "leftover").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "template"]


def test_gathering_on_one_rank_gives_the_canonical_tensors() -> None:
    spec = tiny_spec("qwen2")
    full = canonical_tensors(spec)
    gathered = gather_tensors(spec, Parallel(), 0, cut(megatron_layout(spec, Parallel()), 0, full), None)
    assert gathered is not None
    assert same(gathered, full) == []


@pytest.mark.parametrize("fault", ["missing", "shape", "truncated", "empty"])
def test_what_is_wrong_with_a_folder_is_named(fault: str, folder: Path, tmp_path: Path) -> None:
    spec = tiny_spec()
    full = canonical_tensors(spec)
    name = "model.layers.2.mlp.up_proj.weight"
    if fault == "missing":
        del full[name]
    elif fault == "shape":
        full[name] = torch.zeros(3, 3)
    out = tmp_path / "hf"
    out.mkdir()
    path = out / "model.safetensors"
    if fault != "empty":
        save_file(full, path)
    if fault == "truncated":
        path.write_bytes(path.read_bytes()[:-10])
    layout = megatron_layout(spec, Parallel())
    expected = {"missing": name, "shape": name, "truncated": "model.safetensors", "empty": "no .*safetensors"}[fault]
    with pytest.raises(ConfigError, match=expected):
        load_shards(out, spec, layout, 0, empty_like_rank(layout, 0))
