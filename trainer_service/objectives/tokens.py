"""What an objective reads of a micro-batch's completion tokens, and what it returns.

Legend: t completion tokens of a micro-batch that are the policy's, S samples of the step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def _of_one_rank(sums: Tensor) -> None:
    """Leave the sums as they are: this rank has all tokens of its samples."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """The samples that a micro-batch's tokens belong to; it holds all or none of a sample's completion tokens.

    Attributes:
        owner: [t] index of each token's sample.
        lengths: [S] completion tokens of each sample that are the policy's.
        add_ranks: add up [S] sums, in place, over the ranks that share a sample's tokens (context parallelism).
    """

    owner: Tensor
    lengths: Tensor
    add_ranks: Callable[[Tensor], None] = _of_one_rank

    def sums(self, values: Tensor) -> Tensor:
        """Add up [t] values over each sample's completion tokens, without a gradient. Returns: [t], by token."""
        return self._sums(values)[self.owner].to(values.dtype)

    def means(self, values: Tensor) -> Tensor:
        """Average [t] values over each sample's completion tokens, without a gradient. Returns: [t], by token."""
        return (self._sums(values) / self.lengths)[self.owner].to(values.dtype)

    def _sums(self, values: Tensor) -> Tensor:
        # float64: the order of the addends, which atomics on a GPU change, does not show in float32
        sums = values.new_zeros(self.lengths.shape, dtype=torch.float64)
        sums.index_add_(0, self.owner, values.detach().double())
        self.add_ranks(sums)
        return sums


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """A micro-batch's completion tokens, [t] each."""

    logprobs: Tensor  # log pi_theta, differentiable
    old_logprobs: Tensor  # log pi at the start of the step
    rollout_logprobs: Tensor  # log pi as the engine sampled from it
    advantages: Tensor
    sequences: Sequences


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The loss and its details per completion token, [t] each."""

    loss: Tensor  # differentiable
    ratio: Tensor  # pi_theta / pi_old, of the token or of its sequence, detached
    clipped_low: Tensor  # bool: the lower bound was active
    clipped_high: Tensor  # bool: the upper bound was active
