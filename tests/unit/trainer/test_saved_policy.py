"""A checkpoint's policy is put together from the shards of all ranks; what does not fit is named."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from servicekit.errors import ConfigError
from tests.kit.checkpoints import write_trainer_checkpoint
from tests.kit.stores import canonical_tensors, same, tiny_spec
from tests.unit.weightsync.test_layouts import moe_spec
from trainer_service.checkpoints.files import META
from trainer_service.checkpoints.policy import SavedPolicy
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

LAYOUTS = {
    "tp2": (tiny_spec(), Parallel(tensor=2)),
    "tp2-pp2-tied": (tiny_spec(tie_word_embeddings=True), Parallel(tensor=2, pipeline=2)),
    "virtual": (tiny_spec("qwen2"), Parallel(pipeline=2, virtual_pipeline=2)),
    "first": (tiny_spec("llama"), Parallel(pipeline=2, first_stage_layers=1)),
    "dp2-cp2": (tiny_spec(), Parallel(tensor=2, data=2, context=2)),
    "ep2-pp2": (moe_spec(), Parallel(data=2, pipeline=2, expert=2)),
    "ep2-etp2": (moe_spec(), Parallel(tensor=2, data=2, expert=2, expert_tensor=2)),
}


def read(folder: Path, spec: ModelSpec) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    with ExitStack() as stack:
        saved = SavedPolicy(folder, spec, stack)
        return dict(saved), saved.num_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tensors_are_those_that_the_ranks_held(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    spec, parallel = LAYOUTS[name]
    full = {each: tensor.to(dtype) for each, tensor in canonical_tensors(spec).items()}
    write_trainer_checkpoint(tmp_path / "trainer", spec, parallel, full)
    tensors, num_bytes = read(tmp_path / "trainer", spec)
    assert same(tensors, full) == []
    assert list(tensors) == list(full)
    assert num_bytes == {each: tensor.nbytes for each, tensor in full.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write_trainer_checkpoint(
        tmp_path / "trainer", tiny_spec(), Parallel(tensor=2), canonical_tensors(tiny_spec())
    )


@pytest.mark.parametrize(
    ("fault", "says"),
    [("lacks", "lacks weights/{}"), ("shape", r"has weights/{} as F32 \[9, 9\], this run needs F32 \[16, 12\]")],
)
def test_a_shard_with_other_parameters_is_named(saved: Path, fault: str, says: str) -> None:
    path, name = saved / "shard-tp01-pp00.safetensors", "decoder.layers.3.mlp.linear_fc2.weight"
    held = load_file(path) | {f"weights/{name}": torch.zeros(9, 9)}
    if fault == "lacks":
        del held[f"weights/{name}"]
    save_file(held, path)
    with pytest.raises(ConfigError, match=rf"shard-tp01-pp00\.safetensors {says.format(name)}"):
        read(saved, tiny_spec())


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_shard_that_cannot_be_read_is_named(saved: Path, damage: str) -> None:
    path = saved / "shard-tp00-pp00.safetensors"
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:99])
    with pytest.raises(ConfigError, match=r"shard-tp00-pp00\.safetensors cannot be read"):
        read(saved, tiny_spec())


def test_a_checkpoint_of_another_model_is_refused(saved: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"another model than model\.path: model\.vocab_size: 33 in .*, 34 in the run"
    ):
        read(saved, tiny_spec(vocab_size=34))


WHY_NOT = (
    r"has no meta\.json|cannot be read|checkpoint format (99|'list')|lacks dtype, parallel, policy_version: restore"
)


@pytest.mark.parametrize("meta", [None, "{", "[]", json.dumps({"format": 99}), json.dumps({"format": 1, "model": {}})])
def test_what_is_no_checkpoint_is_refused(saved: Path, meta: Any) -> None:
    (saved / META).unlink()
    if meta is not None:
        (saved / META).write_text(meta)
    with pytest.raises(ConfigError, match=WHY_NOT):
        read(saved, tiny_spec())
