"""The modules of a megatron-core decoder: those that need torch only, or TransformerEngine's (trainer.layer_spec).

torch: mcore's local spec with two modules replaced through ModuleSpec, mcore's extension point: WrappedTorchNorm, which
refuses sequence parallelism, and DotProductAttention, which refuses packed rows and builds the full score matrix.
transformer_engine: its norms and linear layers, of which some are fused, around the same core attention.
Both: the router of a mixture of experts is `Float32Router`.
"""

from typing import Literal

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from servicekit.errors import ConfigError
from tandem_config.schema import TrainerSection
from trainer_service.megatron_engine.attention.core import PackedAttention
from trainer_service.megatron_engine.layers.norm import TorchRMSNorm

Modules = Literal["torch", "transformer_engine"]

# mcore 0.16.1's router tests this name, which only a successful import of TransformerEngine defines
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class Float32Router(TopKRouter):
    """Chooses experts by float32 probabilities, as transformers and SGLang do.

    mcore rounds softmax's result to the logits' type before it chooses: in bfloat16 close probabilities become equal,
    and trainer and engine would use different experts. The logits themselves, the gate's product, stay bfloat16.
    """

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [tokens, experts] weights, in the logits' type, and which experts are chosen."""
        weights, chosen = super().routing(logits.float(), padding_mask=padding_mask)
        return weights.to(logits.dtype), chosen


def chosen_modules(trainer: TrainerSection) -> Modules:
    """Choose the modules of trainer.layer_spec. Raises: ConfigError: TransformerEngine is asked for and missing."""
    installed = bool(transformer_engine.HAVE_TE)
    if trainer.layer_spec == "transformer_engine" and not installed:
        raise ConfigError(
            "trainer.layer_spec: transformer_engine needs TransformerEngine, which cannot be imported here: install "
            "transformer-engine[pytorch] for this CUDA and torch, or set trainer.layer_spec: torch"
        )
    modules: Modules = "transformer_engine" if installed and trainer.layer_spec != "torch" else "torch"
    if trainer.moe_grouped_gemm and modules == "torch":
        raise ConfigError(
            f"trainer.moe_grouped_gemm: true needs TransformerEngine's layers, and trainer.layer_spec: "
            f"{trainer.layer_spec} gives torch's here: install it and set trainer.layer_spec: transformer_engine, or "
            "leave trainer.moe_grouped_gemm out"
        )
    return modules


def _torch_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(num_experts=num_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    modules = spec.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = TorchRMSNorm
    attention = modules.self_attention.submodules
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return spec


def _transformer_engine_layer(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    return get_gpt_layer_with_transformer_engine_spec(
        num_experts=num_experts, moe_grouped_gemm=config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
    )


def _layer_spec(config: TransformerConfig, layer: int, modules: Modules) -> ModuleSpec:
    make = _torch_layer if modules == "torch" else _transformer_engine_layer
    has_experts = config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])
    spec = make(config, config.num_moe_experts if has_experts else None)
    spec.submodules.self_attention.submodules.core_attention = PackedAttention
    if has_experts:
        spec.submodules.mlp.submodules.router = Float32Router
    return spec


def decoder_spec(
    config: TransformerConfig, virtual_stage: int | None, modules: Modules = "torch"
) -> TransformerBlockSubmodules:
    """Make the spec of the layers of this pipeline stage, or of one of its virtual ones, and of the final norm."""
    first = get_transformer_layer_offset(config, virtual_stage)
    count = get_num_layers_to_build(config, virtual_stage)
    layers = [_layer_spec(config, layer, modules) for layer in range(first, first + count)]
    norm = TorchRMSNorm if modules == "torch" else transformer_engine.TENorm
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)
