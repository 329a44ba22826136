"""Which modules the layers have: torch's, TransformerEngine's, and what is refused where it is not installed."""

from types import SimpleNamespace
from typing import Any

import pytest

from servicekit.errors import ConfigError
from tandem_config.schema import TrainerSection
from trainer_service.megatron_engine.attention.core import PackedAttention
from trainer_service.megatron_engine.layers import layer_spec


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
        return SimpleNamespace(submodules=SimpleNamespace(self_attention=attention))

    monkeypatch.setattr(layer_spec, "get_gpt_layer_with_transformer_engine_spec", spec)
    config: Any = SimpleNamespace(num_moe_experts=4, moe_layer_freq=[1], moe_grouped_gemm=True, qk_layernorm=True)
    made = layer_spec._layer_spec(config, 0, "transformer_engine")
    assert made.submodules.self_attention.submodules.core_attention is PackedAttention
    assert asked == {"num_experts": 4, "moe_grouped_gemm": True, "qk_layernorm": True}
