"""Runs micro-batches through megatron-core's pipeline schedule; the last stage gets log-probs and entropies."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from trainer_service.megatron_engine.attention.packing import RowPacking
from trainer_service.megatron_engine.head.policy_model import ChosenTokens
from trainer_service.micro_batches.packed import PackedRow


@dataclass(frozen=True, kw_only=True)
class MicroBatchTensors:
    """`PackedRow` on the device: T tokens, of which t are completion tokens."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    positions: Tensor  # [t]
    targets: Tensor  # [t]
    token_index: Tensor  # [t]
    packing: RowPacking
    counted: bool


# (micro-batch, log-probs [t], entropies [t]) -> scalar loss; called on the last stage only
TokenFunction = Callable[[MicroBatchTensors, Tensor, Tensor], Tensor]


def to_device(batch: PackedRow, device: torch.device) -> MicroBatchTensors:
    """Copy the index arrays (no copy on a CPU)."""

    def move(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatchTensors(
        input_ids=move(batch.input_ids),
        position_ids=move(batch.position_ids),
        positions=move(batch.positions),
        targets=move(batch.targets),
        token_index=move(batch.token_index),
        packing=RowPacking.of(batch, device),
        counted=batch.counted,
    )


class Schedule:
    """Runs forward and backward passes of a list of micro-batches on all ranks of a copy of the model.

    Args:
        on_micro_batch: called when the forward pass of one begins, or of a stage's part of one; with whether it is the
            last one before gradients are reduced.
    """

    def __init__(self, chunks: list[DistributedDataParallel], on_micro_batch: Callable[[bool], None]) -> None:
        self._chunks, self._on_micro_batch = chunks, on_micro_batch
        layers = [layer for chunk in chunks for layer in chunk.modules()]
        self._dispatchers = [layer.token_dispatcher for layer in layers if isinstance(layer, MoELayer)]
        self._run = get_forward_backward_func()

    def measure(
        self, batches: Sequence[MicroBatchTensors], on_tokens: Callable[[MicroBatchTensors, Tensor, Tensor], None]
    ) -> None:
        """Run forward passes without gradients."""

        def record(batch: MicroBatchTensors, logprobs: Tensor, entropies: Tensor) -> Tensor:
            if batch.counted:
                on_tokens(batch, logprobs, entropies)
            return logprobs.new_zeros(())

        with torch.no_grad():
            self._through(batches, record, forward_only=True)

    def train(self, batches: Sequence[MicroBatchTensors], on_tokens: TokenFunction) -> None:
        """Run forward and backward passes, and reduce gradients over data-parallel ranks, tied embeddings and norms.

        Every data-parallel rank must call this, with equally many micro-batches; without any, nothing is done.
        """
        self._through(batches, on_tokens, forward_only=False)
        self._forget_graph()

    def _forget_graph(self) -> None:
        """Let go of the pass's autograd graph, which mcore's token dispatchers would keep until the next pass.

        Python does not see that its nodes have hooks which refer to the model: a closed engine would never be freed.
        """
        for dispatcher in self._dispatchers:
            for name, value in vars(dispatcher).items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    setattr(dispatcher, name, None)

    def _through(self, batches: Sequence[MicroBatchTensors], on_tokens: TokenFunction, *, forward_only: bool) -> None:
        if not batches:
            return
        interleaved = len(self._chunks) > 1
        lasts = chain(repeat(False, len(batches) * len(self._chunks) - 1), [not forward_only])
        self._run(
            forward_step_func=partial(self._forward, on_tokens, lasts),
            data_iterator=[iter(batches) for _ in self._chunks] if interleaved else iter(batches),
            model=self._chunks if interleaved else self._chunks[0],
            num_microbatches=len(batches),
            # ignored: with variable_seq_lengths the stages send each other the shape of each micro-batch
            seq_length=batches[0].input_ids.shape[1],
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _forward(
        self,
        on_tokens: TokenFunction,
        lasts: Iterator[bool],
        batches: Iterator[MicroBatchTensors],
        model: torch.nn.Module,
    ) -> tuple[Any, Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
        batch = next(batches)
        self._on_micro_batch(next(lasts))
        chosen = ChosenTokens(positions=batch.positions, targets=batch.targets)
        out = model(batch.input_ids, batch.position_ids, None, labels=chosen, packed_seq_params=batch.packing)
        return out, partial(self._loss, on_tokens, batch)

    def _loss(
        self, on_tokens: TokenFunction, batch: MicroBatchTensors, found: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute the loss from log-probs and entropies. Returns: it, a token count that mcore ignores, no metrics."""
        logprobs, entropies = found
        return on_tokens(batch, logprobs, entropies), torch.zeros((), dtype=torch.int, device=logprobs.device), {}
