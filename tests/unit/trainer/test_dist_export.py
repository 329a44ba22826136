"""Weights in the format of megatron-core's dist_checkpointing: mcore's own model reads them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# First: it prepares megatron-core for this device, which was not to be imported before.
from trainer_service.megatron_engine import build

# isort: split
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from typer.testing import CliRunner

from launcher.cli import app
from tests.kit.checkpoints import write_trainer_checkpoint
from tests.kit.folders import write_config
from tests.kit.stores import canonical_tensors, cut, same, tiny_spec
from trainer_service.megatron_engine.dist_export import write_dist
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import ModelSpec
from weightsync.transfer.tensors import poison_tensors

# it builds models, and mcore writes in processes of its own
pytestmark = pytest.mark.timeout(120)
SPECS = {
    "qwen3": tiny_spec(),
    "tied": tiny_spec(tie_word_embeddings=True),
    "experts": tiny_spec(
        "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, norm_topk_prob=True
    ),
}


@pytest.fixture
def alone() -> Iterator[None]:
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def of_mcore(spec: ModelSpec, dtype: torch.dtype) -> GPTModel:
    """mcore's own model, as Megatron-LM builds it, at one rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    build.initialize_parallel(Parallel(), 0, 60.0)
    config = build.transformer_config(spec, Parallel(), dtype, sequence_parallel=False)
    layer = get_gpt_layer_local_spec(num_experts=spec.num_experts or None, qk_layernorm=True, normalization="RMSNorm")
    model = GPTModel(
        config,
        layer,
        vocab_size=spec.vocab_size,
        max_sequence_length=spec.max_positions,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
    )
    return model.to(dtype)  # as Megatron-LM's Float16Module does: norms are made in float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", SPECS)
def test_mcore_loads_what_any_layout_has_saved(tmp_path: Path, alone: None, family: str, dtype: torch.dtype) -> None:
    spec, full = SPECS[family], {name: value.to(dtype) for name, value in canonical_tensors(SPECS[family]).items()}
    write_trainer_checkpoint(tmp_path / "trainer", spec, Parallel(tensor=2, pipeline=2), full)
    assert write_dist(tmp_path / "trainer", spec, tmp_path / "out") > sum(value.nbytes for value in full.values())
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    model = of_mcore(spec, dtype)
    held = {name: parameter.data for name, parameter in model.named_parameters()}
    poison_tensors(held)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(tmp_path / "out" / "release"))
    model.load_state_dict(loaded["model"])
    assert same(held, cut(megatron_layout(spec, Parallel()), 0, full, dtype)) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "trainer"]


def test_the_command_writes_for_megatron_and_replaces_its_own_only(
    tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    config, out = write_config(tmp_path), tmp_path / "out"
    spec = ModelSpec.from_folder(tmp_path / "model")
    full = canonical_tensors(spec)
    checkpoint = write_trainer_checkpoint(tmp_path / "trainer", spec, Parallel(tensor=2), full)
    options = ["--checkpoint", str(checkpoint), "-c", str(config), "--format", "dist", "--out"]

    def export(folder: Path) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["export", *options, str(folder)])
        return result.exit_code, result.output

    for _ in range(2):  # an earlier one is replaced
        code, output = export(out)
        assert (code, output.startswith(f"checkpoint {checkpoint} is in {out} (")) == (0, True), output
    assert sorted(path.name for path in out.iterdir()) == ["latest_checkpointed_iteration.txt", "release"]
    model = of_mcore(spec, torch.float32)
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(out / "release"))
    model.load_state_dict(loaded["model"])
    held = {name: parameter.data for name, parameter in model.named_parameters()}
    assert same(held, cut(megatron_layout(spec, Parallel()), 0, full, torch.float32)) == []
    for name, file in (("model", "config.json"), ("thesis", "text.tex")):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / file).touch()
        code, output = export(folder)
        assert (code, "holds something else than an export in the format dist" in output) == (2, True), output
        assert (folder / file).is_file()
