"""Log-probs and entropies of hidden states, whose vocabulary is split over tensor-parallel ranks, chunk by chunk.

Legend: t tokens, c tokens of a chunk, h hidden size, v columns of this rank (the padded vocabulary is v times the
group's size), r those of them that belong to tokens. A chunk is [c, r].

The logits of all tokens, [t, v], never exist together: the backward pass computes each chunk's again, unless a single
chunk has all tokens. At most two float32 chunks are held, forward and backward. Logits are never rounded to bfloat16,
which has a step of 0.25 at 32: log-probs of two engines would differ by more than the engines do.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

# Columns that a CPU multiplies at a time: 2,048 rows of a weight 3,584 wide are 28 MiB in float32.
_CPU_COLUMNS = 2048


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """Columns of the vocabulary on this rank: ids from `first` on, `real` of them; the rest of a weight is padding."""

    group: dist.ProcessGroup  # tensor-parallel
    first: int
    real: int
    temperature: float

    @classmethod
    def of(cls, group: dist.ProcessGroup, columns: int, true_vocab: int, temperature: float) -> "VocabShard":
        """Take `columns` columns of each rank in turn; those from true_vocab on belong to no token."""
        first = dist.get_rank(group) * columns
        real = max(0, min(columns, true_vocab - first))
        return cls(group=group, first=first, real=real, temperature=temperature)

    def find(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return [t] whether a target is here, and [t, 1] its column, 0 if it is not."""
        mine = (targets >= self.first) & (targets < self.first + self.real)
        return mine, torch.where(mine, targets - self.first, 0)[:, None]

    def logits(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Multiply and divide by the temperature: [c, r], at least float32, and never anything less."""
        x = _multiply(hidden, weight[: self.real])
        return x if self.temperature == 1.0 else x.div_(self.temperature)


def _multiply(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply [c, h] by [r, h]: [c, r], at least float32.

    GPUs multiply bfloat16 into float32 as fast as into bfloat16. CPUs have no such product, and are slow at bfloat16: a
    part of the weight after the other is widened (256 tokens, 32,768 columns of 896: 0.22 s in place of 1.5 s).
    """
    wide = _wide(hidden.dtype)
    if hidden.dtype == wide:
        return torch.mm(hidden, weight.t())
    if hidden.is_cuda:
        return torch.mm(hidden, weight.t(), out_dtype=wide)
    hidden, x = hidden.to(wide), hidden.new_empty(len(hidden), len(weight), dtype=wide)
    for columns in _chunks(len(weight), _CPU_COLUMNS):
        torch.mm(hidden, weight[columns].to(wide).t(), out=x[:, columns])
    return x


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    """Cut the tokens; no tokens are one empty chunk."""
    return (slice(start, min(start + chunk, tokens)) for start in range(0, max(1, tokens), chunk))


class _LogprobEntropy(Function):
    """The autograd function: one MAX and one packed SUM all-reduce of [t] forward, none backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, chunk: int
    ) -> tuple[Tensor, Tensor]:
        mine, index = shard.find(targets)
        sums = torch.empty(4, hidden.shape[0], dtype=_wide(hidden.dtype), device=hidden.device)
        for rows in _chunks(hidden.shape[0], chunk):
            x = shard.logits(hidden[rows], weight)
            sums[:, rows] = _shift_and_sum(x, index[rows])
            ctx.kept = x if hidden.shape[0] <= chunk else None
            del x  # or it would live beside the next chunk
        total, target, weighted, shift = _over_ranks(sums, mine, shard.group)
        log_total, mean = total.log(), weighted / total
        # the last two as the chunks: relative to this rank's highest logit
        ctx.save_for_backward(hidden, weight, mine, index, sums[0], log_total - shift, mean - shift)
        ctx.shard, ctx.chunk = shard, chunk
        ctx.set_materialize_grads(False)
        return target - log_total, log_total - mean

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden, weight, mine, index, highest, log_total, mean = ctx.saved_tensors
        tokens, shard = hidden.shape[0], ctx.shard
        grad_logprob = torch.zeros_like(mean) if grad_logprob is None else grad_logprob
        at_target = torch.where(mine, grad_logprob, 0.0)[:, None]
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for rows in _chunks(tokens, ctx.chunk):
            x, ctx.kept = ctx.kept, None
            if x is None:
                x = shard.logits(hidden[rows], weight).sub_(highest[rows, None])
            by_entropy = None if grad_entropy is None else grad_entropy[rows, None]
            x = _gradient(x, log_total[rows, None], mean[rows, None], grad_logprob[rows, None], by_entropy)
            if shard.real:
                x.scatter_add_(-1, index[rows], at_target[rows])
            x = x.div_(shard.temperature).to(hidden.dtype)
            torch.mm(x, weight[: shard.real], out=grad_hidden[rows])
            grad_weight = _add_to_weight(weight, x, hidden[rows], last=rows.stop == tokens)
        return grad_hidden, grad_weight, None, None, None


def _shift_and_sum(x: Tensor, index: Tensor) -> Tensor:
    """Subtract each token's highest logit, m, from its logits x [c, r], in place.

    Returns: [4, c] m; sum of exp(x - m); x - m in the column `index`; sum of exp(x - m) (x - m).
    """
    if x.shape[-1] == 0:
        sums = x.new_zeros(4, x.shape[0])
        sums[0] = torch.finfo(x.dtype).min  # all columns of this rank are padding
        return sums
    highest = x.amax(-1)
    x.sub_(highest[:, None])
    exp = x.exp()
    total, target = exp.sum(-1), x.gather(-1, index)[:, 0]
    return torch.stack([highest, total, target, exp.mul_(x).sum(-1)])


def _over_ranks(sums: Tensor, mine: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine all ranks' sums [4, t]; the results are relative to the highest logit of all of them, M.

    Returns: [t] each: sum of exp(x - M); the target's x - M; sum of exp(x - M) (x - M); m - M of this rank.
    """
    highest, total, target, weighted = sums
    if group.size() == 1:
        return total, target, weighted, torch.zeros_like(highest)
    of_all = highest.clone()
    dist.all_reduce(of_all, dist.ReduceOp.MAX, group=group)
    shift = highest - of_all
    scale = shift.exp()
    packed = torch.stack([total * scale, torch.where(mine, target + shift, 0.0), (weighted + total * shift) * scale])
    dist.all_reduce(packed, group=group)
    return packed[0], packed[1], packed[2], shift


def _gradient(x: Tensor, log_total: Tensor, mean: Tensor, by_logprob: Tensor, by_entropy: Tensor | None) -> Tensor:
    """Compute the gradient of the logits [c, r] in place, but for the targets' own: all others are [c, 1].

    d logprob / dx = onehot - p and d entropy / dx = -p (x - E[x]).
    """
    if by_entropy is None:
        return x.sub_(log_total).exp_().mul_(-by_logprob)
    p = (x - log_total).exp_()
    return p.mul_(x.sub_(mean).mul_(by_entropy).add_(by_logprob).neg_())


def _add_to_weight(weight: Tensor, grad: Tensor, hidden: Tensor, *, last: bool) -> Tensor | None:
    """Add grad [c, r] x hidden [c, h] to the weight's gradient. Returns: what the backward pass returns, if last.

    All chunks but the last are added to `main_grad`, mcore's buffer of the gradient, in its float32. The last one's is
    returned as any gradient is, so that mcore's hooks see the parameter and add it.
    """
    total = torch.zeros_like(weight) if last else weight.main_grad
    part = total[: grad.shape[1]]
    if part.dtype == grad.dtype:
        part.addmm_(grad.t(), hidden)
    else:
        part += grad.t() @ hidden
    return total if last else None


def logprob_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, shard: VocabShard, chunk: int
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target, and the entropy of its distribution over the true vocabulary.

    Args:
        hidden: [t, h], equal on all ranks of the group; its gradient is this rank's part of the sum over them.
        weight: [v, h], this rank's rows of the output layer.
        targets: [t] global token ids below the true vocabulary.
        chunk: tokens whose logits may exist together, >= 1. With more tokens than these, `weight.main_grad` gets a
            part of the gradient: a float tensor of the weight's shape, as mcore's DDP gives to parameters.
    Returns: ([t], [t]) float32, in nats, differentiable, equal on all ranks of the group.
    """
    logprobs, entropies = _LogprobEntropy.apply(hidden, weight, targets, shard, chunk)
    return logprobs, entropies
