"""TransformerEngine's names for Megatron's parameters, against megatron-core's own word on which are the same."""

from pathlib import Path

import pytest
import torch

from servicekit.errors import ConfigError
from tests.kit.stores import canonical_tensors, cut, empty_like_rank, same, tiny_spec
from tests.unit.weightsync.test_layouts import moe_spec
from trainer_service.megatron_engine import cpu_shim
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.megatron_names import in_local_spelling
from weightsync.transfer.hf_files import gather_tensors, load_shards, write_folder

CHUNKS = Parallel(pipeline=2, virtual_pipeline=2)
# As TransformerEngine's modules name them: written out here, not derived from the rules.
FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def respelled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A rank's parameters as a dense Megatron with TransformerEngine's layer spec names them."""
    out = {}
    for name, tensor in tensors.items():
        for local, fused in FUSED.items():
            name = name.replace(local, fused)
        out[name] = tensor
    return out


def test_the_layer_norms_are_those_that_megatron_maps_onto_each_other() -> None:
    """Megatron's local spec says under which (fused) names a checkpoint has its layer norms."""
    assert cpu_shim.install() in (True, False)  # megatron.core imports on a host without CUDA only after it
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    same_keys = get_gpt_layer_local_spec().submodules.sharded_state_dict_keys_map
    assert {f"{local}weight": f"{fused}weight" for local, fused in same_keys.items()} == FUSED
    for local, fused in FUSED.items():
        assert in_local_spelling(tiny_spec(), {f"decoder.layers.1.{fused}": 0}) == {f"decoder.layers.1.{local}": 0}


@pytest.mark.parametrize("fc", ["fc1", "fc2"])
def test_experts_of_a_grouped_gemm_are_numbered_behind_their_weight(fc: str) -> None:
    prefix = "chunk1.decoder.layers.0.mlp.experts."
    names = {f"{prefix}linear_{fc}.weight{expert}": expert for expert in (0, 11)}
    expected = {f"{prefix}local_experts.{expert}.linear_{fc}.weight": expert for expert in (0, 11)}
    assert in_local_spelling(moe_spec(), names) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fused_trainer_has_every_parameter_of_the_layout(rank: int) -> None:
    spec = tiny_spec()
    layout = megatron_layout(spec, CHUNKS)
    mine = cut(layout, rank, canonical_tensors(spec))
    fused = respelled(mine)
    assert set(fused) != set(mine)
    assert sum("chunk1.decoder" in name and "layer_norm_weight" in name for name in fused) == 2
    back = in_local_spelling(spec, fused)
    assert set(back) == set(layout.parameters_of(rank))
    assert all(back[name] is tensor for name, tensor in mine.items())


def test_names_that_need_no_change_come_back_as_they_are() -> None:
    mine = empty_like_rank(megatron_layout(tiny_spec(), Parallel()), 0)
    assert in_local_spelling(tiny_spec(), mine) is mine


def test_a_parameter_under_both_names_is_refused() -> None:
    local, fused = (f"decoder.layers.0.{name}" for name in ("input_layernorm.weight", FUSED["input_layernorm.weight"]))
    with pytest.raises(ConfigError, match=f"{local} and {fused} are one parameter"):
        in_local_spelling(tiny_spec(), {local: 0, fused: 1})


def test_import_and_export_work_under_fused_names(tmp_path: Path) -> None:
    spec = tiny_spec()
    full = canonical_tensors(spec)
    (tmp_path / "template").mkdir()
    (tmp_path / "template" / "config.json").write_text("{}")
    write_folder(full, tmp_path / "template", tmp_path / "hf")
    layout = megatron_layout(spec, Parallel())
    fused = respelled(empty_like_rank(layout, 0))
    load_shards(tmp_path / "hf", spec, layout, 0, fused)
    assert same(fused, respelled(cut(layout, 0, full))) == []
    exported = gather_tensors(spec, Parallel(), 0, fused, None)
    assert exported is not None
    assert same(exported, full) == []
