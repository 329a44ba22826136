"""What a step asks of a training engine: passes over micro-batches, gradients, the optimizer."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from trainer_service.micro_batches.packed import PackedRow


class MicroBatch(Protocol):
    """A `PackedRow` on the device, which has t completion tokens."""

    @property
    def token_index(self) -> Tensor:
        """Their places among all completion tokens of the step, [t]."""

    @property
    def counted(self) -> bool:
        """Whether it is more than a filler of the pipeline."""


# (micro-batch, log-probs [t], entropies [t]) -> scalar loss
TokenFunction = Callable[[Any, Tensor, Tensor], Tensor]
B = TypeVar("B", bound=MicroBatch)


class StepBackend(Protocol[B]):
    """A rank of an engine. Every rank calls every method, in the same order.

    Log-probs and entropies are given to functions where the last layers are; `counts` says which rank's are added up.
    """

    @property
    def counts(self) -> bool:
        """Whether this rank is the one, among those that compute the same tokens, whose sums count."""

    def token_group(self) -> dist.ProcessGroup | None:
        """Return the ranks that share a sample's tokens; None: this one has them all."""

    def copies_group(self, *, with_token_group: bool) -> dist.ProcessGroup:
        """Return the ranks that hold the same part of the model's copies; with those that share a sample's tokens."""

    def load(self, rows: Sequence[PackedRow]) -> list[B]:
        """Copy micro-batches to the device."""

    def measure(self, batches: Sequence[B], on_tokens: Callable[[B, Tensor, Tensor], None]) -> None:
        """Run forward passes without gradients."""

    def train(self, batches: Sequence[B], on_tokens: TokenFunction) -> None:
        """Compute an update's gradients, reduced over ranks; zeros if no micro-batch has one."""

    def gradient_norm(self) -> float:
        """Compute the global L2 norm of the gradients before clipping; NaN or inf if any gradient is."""

    def apply(self, norm: float, learning_rate: float) -> None:
        """Clip the gradients by their norm and step the optimizer, which has momentum where they are zero too."""

    def remember(self) -> None:
        """Keep the weights and the optimizer's state for `restore`."""

    def restore(self) -> None:
        """Undo the updates since `remember`, bit by bit."""

    def gather(self) -> None:
        """Complete the parameters on every rank, before anything but a forward pass reads them."""
