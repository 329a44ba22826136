"""Log-probs and entropies from logits whose vocabulary is split over tensor-parallel ranks.

Legend: t tokens, V true vocabulary, v columns of this rank (the padded vocabulary is v times the group's size).
megatron-core has the cross entropy only, and overwrites float32 logits in place; entropy needs them too.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class _LogprobEntropy(Function):
    """The autograd function: one MAX and one packed SUM all-reduce forward, none backward."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup, true_vocab: int
    ) -> tuple[Tensor, Tensor]:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        columns = logits.shape[-1]
        first = rank * columns
        # padded columns belong to no token: they take no part in any sum
        real = max(0, min(columns, true_vocab - first))
        x = logits[:, :real].float()
        highest = x.amax(-1) if real else logits.new_full(targets.shape, -torch.inf, dtype=torch.float32)
        if size > 1:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        x = x - highest[:, None]
        mine = (targets >= first) & (targets < first + real)
        index = torch.where(mine, targets - first, 0)[:, None]
        target = torch.where(mine, x.gather(-1, index)[:, 0], 0.0) if real else torch.zeros_like(highest)
        exp = x.exp()
        sums = torch.stack([exp.sum(-1), target, (exp * x).sum(-1)])
        if size > 1:
            dist.all_reduce(sums, group=group)
        total, target, weighted = sums
        log_total, mean = total.log(), weighted / total
        ctx.save_for_backward(x, exp.div_(total[:, None]), mean, mine, index)
        ctx.columns, ctx.dtype = columns, logits.dtype
        ctx.set_materialize_grads(False)
        return target - log_total, log_total - mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor, None, None, None]:
        """Compute d logprob / dx = onehot - p and d entropy / dx = -p (x - E[x])."""
        x, p, mean, mine, index = ctx.saved_tensors
        grad = torch.zeros_like(p)
        if grad_logprob is not None:
            grad -= p * grad_logprob[:, None]
            if x.shape[-1]:
                grad.scatter_add_(-1, index, torch.where(mine, grad_logprob, 0.0)[:, None])
        if grad_entropy is not None:
            grad -= p * (x - mean[:, None]) * grad_entropy[:, None]
        grad = torch.nn.functional.pad(grad, (0, ctx.columns - x.shape[-1]))
        return grad.to(ctx.dtype), None, None, None


def logprob_entropy(
    logits: Tensor, targets: Tensor, *, group: dist.ProcessGroup, true_vocab: int
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target, and the entropy of its distribution over the true vocabulary.

    Args:
        logits: [t, v] this rank's columns, divided by the temperature.
        targets: [t] global token ids below true_vocab.
        group: tensor-parallel group; rank r holds columns [r * v, (r + 1) * v).
    Returns: ([t], [t]) float32, in nats, differentiable, equal on all ranks of the group.
    """
    logprobs, entropies = _LogprobEntropy.apply(logits, targets, group, true_vocab)
    return logprobs, entropies
