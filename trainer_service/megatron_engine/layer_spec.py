"""A megatron-core decoder that needs torch only, on CPU and GPU: no TransformerEngine, no Apex.

It is mcore's local spec with two modules replaced through ModuleSpec, mcore's extension point: WrappedTorchNorm, which
refuses sequence parallelism, and DotProductAttention, which builds the full score matrix.
"""

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

# mcore 0.16.1's router tests this name, which only a successful import of TransformerEngine defines
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight's gradient mcore sums over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class CausalAttention(MegatronModule):
    """Causal core attention of right-padded rows by F.scaled_dot_product_attention.

    Padding comes after all real tokens, so the causal mask alone excludes it from all results that are used. Under
    context parallelism a rank has two of the chunks of each row (see padded.context_share): it gathers the keys and
    values of all ranks and attends with its own queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        """Attend: query [S, B, heads, head_dim], key and value [S, B, groups, head_dim] -> [S, B, heads * head_dim]."""
        if kwargs.get("packed_seq_params") is not None:
            raise NotImplementedError("packed sequences are not supported; pad the rows")
        mask = None
        if self.config.context_parallel_size > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=group) for x in (key, value))
            mask = _causal_over_ranks(query.shape[0], group.rank(), group.size(), query.device)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=grouped
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


@lru_cache(maxsize=1)  # the layers of a micro-batch ask for the same one
def _causal_over_ranks(tokens: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Make the mask of all ranks' keys for this rank's queries, [tokens, tokens * size] bool."""
    columns = torch.stack([_columns_of(tokens, other, size, device) for other in range(size)])
    return columns[rank][:, None] >= columns.flatten()[None]


def _columns_of(tokens: int, rank: int, size: int, device: torch.device) -> Tensor:
    """Return a context-parallel rank's columns of a row, [tokens]: chunks `rank` and `2 * size - 1 - rank`."""
    half = tokens // 2
    within = torch.arange(half, device=device)
    return torch.cat([within + rank * half, within + (2 * size - 1 - rank) * half])


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
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return spec


def decoder_spec(config: TransformerConfig, virtual_stage: int | None) -> TransformerBlockSubmodules:
    """Make the spec of the layers of this pipeline stage, or of one of its virtual ones, and of the final norm."""
    first = get_transformer_layer_offset(config, virtual_stage)
    count = get_num_layers_to_build(config, virtual_stage)
    layers = [_layer_spec(config, layer) for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchRMSNorm)
