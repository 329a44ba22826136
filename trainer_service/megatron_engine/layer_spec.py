"""The modules of a megatron-core decoder: those that need torch only, or TransformerEngine's (trainer.layer_spec).

torch: mcore's local spec with two modules replaced through ModuleSpec, mcore's extension point: WrappedTorchNorm, which
refuses sequence parallelism, and DotProductAttention, which refuses packed rows and builds the full score matrix.
transformer_engine: its norms and linear layers, of which some are fused, around the same core attention.
Both: the router of a mixture of experts is `Float32Router`.
"""

from typing import Any, Literal

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
from torch import Tensor
from torch.autograd import Function

from servicekit.errors import ConfigError
from tandem_config.schema import TrainerSection
from trainer_service.megatron_engine.attention.core import PackedAttention

Modules = Literal["torch", "transformer_engine"]
# Types in which a CPU computes as the inputs are; for others, and on GPUs, torch's own operator is better.
_COMPOSED = (torch.float32, torch.float64)

# mcore 0.16.1's router tests this name, which only a successful import of TransformerEngine defines
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight's gradient mcore sums over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        if x.device.type != "cpu" or x.dtype not in _COMPOSED:
            return super().forward(x)
        out: Tensor = _RMSNorm.apply(x, self.weight, self.eps)
        return out


class _RMSNorm(Function):
    """y = w x / rms(x) in half the passes over memory that torch makes on a CPU, where no kernel of its own exists."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, weight, scale = ctx.saved_tensors
        products = (grad * normed).flatten(0, -2)
        # the part of the gradient along x, which normalising takes away
        along = torch.mv(products, weight).div_(normed.shape[-1]).view_as(scale)
        return (grad * weight).addcmul_(normed, along, value=-1).mul_(scale), products.sum(0), None


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
