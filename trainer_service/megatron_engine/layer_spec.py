"""A megatron-core decoder that needs torch only: no TransformerEngine, no Apex, on CPU and GPU alike.

Everything is mcore's local spec except two modules, put in through ModuleSpec, mcore's own extension point: its
WrappedTorchNorm refuses sequence parallelism, and its DotProductAttention builds the full score matrix.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class TorchRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose weight's gradient mcore sums over tensor-parallel ranks under sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


class CausalAttention(MegatronModule):
    """Causal core attention of right-padded rows by F.scaled_dot_product_attention.

    A padding token comes after every real one, so the causal mask alone keeps it out of all results that count.
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
        """query [S, B, heads, head_dim], key and value [S, B, groups, head_dim] -> [S, B, heads * head_dim]."""
        if kwargs.get("packed_seq_params") is not None:
            raise NotImplementedError("packed sequences are not supported; pad the rows")
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def _layer_spec(config: TransformerConfig) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=config.qk_layernorm)
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TorchRMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = CausalAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return spec


def decoder_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """This pipeline stage's layers and the final norm."""
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(config)] * get_num_layers_to_build(config), layer_norm=TorchRMSNorm
    )
