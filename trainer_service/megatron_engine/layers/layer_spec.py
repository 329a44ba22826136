"""A megatron-core decoder that needs torch only, on CPU and GPU: no TransformerEngine, no Apex.

It is mcore's local spec with two modules replaced through ModuleSpec, mcore's extension point: WrappedTorchNorm, which
refuses sequence parallelism, and DotProductAttention, which refuses packed rows and builds the full score matrix.
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from trainer_service.megatron_engine.attention.core import PackedAttention
from trainer_service.megatron_engine.layers.norm import TorchRMSNorm

# mcore 0.16.1's router tests this name, which only a successful import of TransformerEngine defines
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


def _layer_spec(config: TransformerConfig, layer: int) -> ModuleSpec:
    has_experts = config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    modules = spec.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = TorchRMSNorm
    attention = modules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return spec


def decoder_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """Make the spec of the layers of this pipeline stage, or of one of its virtual ones, and of the final norm."""
    first = get_transformer_layer_offset(config, virtual_stage)
    count = get_num_layers_to_build(config, virtual_stage)
    layers = [_layer_spec(config, layer) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchRMSNorm)
