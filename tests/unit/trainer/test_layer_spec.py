"""Which modules the layers have: torch's, TransformerEngine's, and what is refused where it is not installed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from servicekit.errors import ConfigError
from tandem_config.schema import TrainerSection
from tests.unit.weightsync.test_layouts import moe_spec
from trainer_service.checkpoints.files import file_of
from trainer_service.megatron_engine import build, layer_spec
from trainer_service.megatron_engine.attention.core import PackedAttention
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout


@pytest.mark.parametrize(
    ("asked", "installed", "chosen"),
    [
        ({}, True, "torch"),
        ({"layer_spec": "auto"}, False, "torch"),
        ({"layer_spec": "auto"}, True, "transformer_engine"),
        ({"layer_spec": "transformer_engine"}, True, "transformer_engine"),
        ({"layer_spec": "auto", "moe_grouped_gemm": True}, True, "transformer_engine"),
    ],
)
def test_modules_are_chosen(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], installed: bool, chosen: str
) -> None:
    monkeypatch.setattr(f"{layer_spec.__name__}.transformer_engine.HAVE_TE", installed)
    assert layer_spec.chosen_modules(TrainerSection(**asked)) == chosen


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layer_spec": "transformer_engine"}, "layer_spec: transformer_engine needs TransformerEngine"),
        ({"layer_spec": "auto", "moe_grouped_gemm": True}, "moe_grouped_gemm: true needs TransformerEngine's layers"),
    ],
)
def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], message: str) -> None:
    monkeypatch.setattr(f"{layer_spec.__name__}.transformer_engine.HAVE_TE", False)
    with pytest.raises(ConfigError, match=message):
        layer_spec.chosen_modules(TrainerSection(**asked))


def test_transformer_engine_s_layers_have_our_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TransformerEngine its part of mcore is a stand-in, which shows what is asked of it."""
    asked: dict[str, Any] = {}

    def spec(**arguments: Any) -> Any:
        asked.update(arguments)
        attention = SimpleNamespace(submodules=SimpleNamespace(core_attention="TEDotProductAttention"))
        mixture = SimpleNamespace(submodules=SimpleNamespace(router="TopKRouter"))
        return SimpleNamespace(submodules=SimpleNamespace(self_attention=attention, mlp=mixture))

    monkeypatch.setattr(layer_spec, "get_gpt_layer_with_transformer_engine_spec", spec)
    config: Any = SimpleNamespace(num_moe_experts=4, moe_layer_freq=[1], moe_grouped_gemm=True, qk_layernorm=True)
    made = layer_spec._layer_spec(config, 0, "transformer_engine")
    assert made.submodules.self_attention.submodules.core_attention is PackedAttention
    assert made.submodules.mlp.submodules.router is layer_spec.Float32Router
    assert asked == {"num_experts": 4, "moe_grouped_gemm": True, "qk_layernorm": True}


def module_of(names: list[str]) -> torch.nn.Module:
    """A module whose parameters have these names."""
    root = torch.nn.Module()
    for name in names:
        at = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, torch.nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, torch.nn.Parameter(torch.zeros(1)))
    return root


@pytest.mark.parametrize("rank", [0, 1])
def test_parameters_have_the_names_and_files_of_the_layout(rank: int) -> None:
    """TransformerEngine's own names, written out here: layer 0 has experts, layer 1 has none."""
    norm, layer = "self_attention.linear_qkv.layer_norm_weight", "decoder.layers.0"
    first = [f"{layer}.{norm}", f"{layer}.pre_mlp_layernorm.weight", f"{layer}.mlp.router.weight"]
    first += [f"{layer}.mlp.experts.linear_fc{fc}.weight{expert}" for fc in (1, 2) for expert in (0, 1)]
    second = [f"{layer}.{norm}", f"{layer}.mlp.linear_fc1.layer_norm_weight", f"{layer}.mlp.linear_fc1.weight"]
    parallel = Parallel(data=2, expert=2, pipeline=1, virtual_pipeline=1)
    whole = [*first, *(name.replace("layers.0", "layers.1") for name in second)]
    named = build.named_parameters([module_of(whole)], moe_spec())
    layout = megatron_layout(moe_spec(), parallel).parameters_of(rank)
    assert len(named) == len(whole)
    assert named.keys() <= layout.keys()
    files = {name: file_of(name, rank, parallel) for name in named}
    in_experts = {name for name, file in files.items() if file == f"experts-etp00-ep{rank:02d}-pp00.safetensors"}
    assert in_experts == {name for name in named if ".mlp.experts." in name}
    assert len(in_experts) == 4
    assert set(build.named_parameters([module_of(first), module_of(second)], moe_spec())) >= {
        f"{layer}.mlp.experts.local_experts.1.linear_fc2.weight",
        f"chunk1.{layer}.pre_mlp_layernorm.weight",
    }
