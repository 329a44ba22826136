"""Hugging Face folders: each rank reads its own slices, and what is wrong with a folder is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from servicekit.errors import ConfigError
from tests.kit.stores import canonical_tensors, cut, empty_like_rank, same, tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.transfer.hf_files import gather_tensors, load_shards, write_folder


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
        "tandem_export.json",
        "tokenizer.json",
    ]
    types = {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "qwen3"} | types


def test_an_older_folder_is_replaced_whole(folder: Path, tmp_path: Path) -> None:
    write_folder({"a": torch.zeros(2)}, folder, tmp_path / "hf")
    (tmp_path / "hf" / "leftover").write_text("x")
    write_folder({"a": torch.ones(2)}, folder, tmp_path / "hf")
    assert not (tmp_path / "hf" / "leftover").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "template"]
    assert {path.stat().st_mode for path in (tmp_path / "hf").iterdir()} == {(folder / "config.json").stat().st_mode}


def test_a_folder_that_cannot_be_finished_leaves_the_older_one(folder: Path, tmp_path: Path) -> None:
    write_folder({"a": torch.zeros(2)}, folder, tmp_path / "hf")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()
    (folder / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json"):
        write_folder({"a": torch.ones(2)}, folder, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "template"]


def test_large_weights_are_cut_into_files_with_an_index(folder: Path, tmp_path: Path) -> None:
    """As large as they say that they are: the files are made one after the other from tensors that are read."""
    full = {name: torch.full((2,), float(place)) for place, name in enumerate("abc")}
    write_folder(full, folder, tmp_path / "hf", num_bytes={"a": 3 * 10**9, "b": 3 * 10**9, "c": 10**9})
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
    assert index == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    for name, file in index.items():
        assert torch.equal(load_file(tmp_path / "hf" / file)[name], full[name])


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


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.float64])
def test_quantized_weights_are_refused_by_tensor_file_and_type(dtype: torch.dtype, tmp_path: Path) -> None:
    spec = tiny_spec()
    full, name = canonical_tensors(spec), "model.layers.2.mlp.up_proj.weight"
    save_file(full | {name: full[name].to(dtype)}, tmp_path / "model.safetensors")
    layout = megatron_layout(spec, Parallel())
    with pytest.raises(ConfigError, match=rf"{name} in .*model\.safetensors is of type (F8_E4M3|I8|F64)"):
        load_shards(tmp_path, spec, layout, 0, empty_like_rank(layout, 0))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float, tmp_path: Path) -> None:
    spec = tiny_spec()
    full, name = canonical_tensors(spec), "model.layers.2.mlp.up_proj.weight"
    full[name][3, 4] = value
    save_file(full, tmp_path / "model.safetensors")
    layout = megatron_layout(spec, Parallel())
    with pytest.raises(ConfigError, match=f"{name} in .* has 1 values that are not finite"):
        load_shards(tmp_path, spec, layout, 0, empty_like_rank(layout, 0))


def test_a_large_sum_of_finite_weights_is_no_damage(tmp_path: Path) -> None:
    spec = tiny_spec()
    full, name = canonical_tensors(spec), "model.layers.2.mlp.up_proj.weight"
    full[name][:] = 3e38
    save_file(full, tmp_path / "model.safetensors")
    layout = megatron_layout(spec, Parallel())
    tensors = empty_like_rank(layout, 0)
    load_shards(tmp_path, spec, layout, 0, tensors)
    assert same(tensors, cut(layout, 0, full)) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_tied_model_may_have_a_copy_of_its_embedding_and_nothing_else(rank: int, tmp_path: Path) -> None:
    spec = tiny_spec(tie_word_embeddings=True)
    full = canonical_tensors(spec)
    layout = megatron_layout(spec, Parallel(tensor=2))
    head = full["model.embed_tokens.weight"].clone()
    save_file(full | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    tensors = empty_like_rank(layout, rank)
    load_shards(tmp_path, spec, layout, rank, tensors)
    assert same(tensors, cut(layout, rank, full)) == []
    head[20 * rank] += 1  # a row of this rank
    save_file(full | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="tie_word_embeddings is true, but lm_head"):
        load_shards(tmp_path, spec, layout, rank, tensors)
