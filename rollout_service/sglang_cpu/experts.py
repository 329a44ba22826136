"""Expert parallelism in SGLang's torch-native mixture of experts, which supports only the rank's own experts."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear, silu


def leave_out_foreign_experts(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, runner_config: Any
) -> torch.Tensor:
    """Skip experts of other ranks, whose id is -1, on which the wrapped `moe_forward_native` fails.

    Returns: [T, hidden] the sum over this rank's experts; SGLang adds up the ranks' sums.
    """
    if not (topk_output.topk_ids < 0).any():
        return original(layer, x, topk_output, runner_config)
    if runner_config.activation != "silu":
        raise NotImplementedError(f"expert parallelism on CPU with activation {runner_config.activation}")
    return local_experts(x, layer.w13_weight, layer.w2_weight, topk_output.topk_weights, topk_output.topk_ids)


def local_experts(
    x_TH: torch.Tensor, w13_EFH: torch.Tensor, w2_EHF: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor
) -> torch.Tensor:
    """Compute the gated SiLU experts of one rank (T tokens, K choices each, E experts).

    Args:
        ids_TK: experts of each token; -1 for those of other ranks.
    Returns: [T, hidden].
    """
    total_TH = torch.zeros(x_TH.shape, dtype=weights_TK.dtype)
    for expert in range(w13_EFH.shape[0]):
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        if len(token) > 0:
            gate, up = linear(x_TH[token], w13_EFH[expert]).chunk(2, dim=-1)
            out = linear(silu(gate) * up, w2_EHF[expert])
            total_TH.index_add_(0, token, out.to(total_TH.dtype) * weights_TK[token, choice, None])
    return total_TH.to(x_TH.dtype)
