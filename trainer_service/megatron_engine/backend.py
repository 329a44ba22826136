"""Implements `StepBackend` on megatron-core: micro-batches through its pipeline schedule, and its AdamW."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor

from trainer_service.megatron_engine.adam_state import AdamState
from trainer_service.megatron_engine.attention.packing import RowPacking
from trainer_service.megatron_engine.head.policy_model import ChosenTokens
from trainer_service.micro_batches.packed import PackedRow
from trainer_service.step.backend import TokenFunction
from weightsync.transfer.devices import wait_for_device


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


class MegatronBackend:
    """The model's chunks on this rank, and AdamW.

    Args:
        on_micro_batch: called when the forward pass of one begins, or of a stage's part of one; with whether it is the
            last one before gradients are reduced.
    """

    def __init__(
        self,
        chunks: list[DistributedDataParallel],
        optimizer: ChainedOptimizer,
        adam: AdamState,
        device: torch.device,
        clip_grad: float,
        on_micro_batch: Callable[[bool], None],
    ) -> None:
        self.chunks, self.optimizer, self._adam = chunks, optimizer, adam
        self._device, self._clip_grad, self._on_micro_batch = device, clip_grad, on_micro_batch
        layers = [layer for chunk in chunks for layer in chunk.modules()]
        self._dispatchers = [layer.token_dispatcher for layer in layers if isinstance(layer, MoELayer)]
        self._run = get_forward_backward_func()

    @property
    def counts(self) -> bool:
        """Whether this rank is the first tensor-parallel one of the last stage."""
        return bool(parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0)

    def token_group(self) -> dist.ProcessGroup | None:
        """Return the context-parallel group."""
        is_split = parallel_state.get_context_parallel_world_size() > 1
        return parallel_state.get_context_parallel_group() if is_split else None

    def copies_group(self, *, with_token_group: bool) -> dist.ProcessGroup:
        """Return the data-parallel group."""
        return parallel_state.get_data_parallel_group(with_context_parallel=with_token_group)

    def load(self, rows: Sequence[PackedRow]) -> list[MicroBatchTensors]:
        """Copy micro-batches to the device."""
        return [to_device(row, self._device) for row in rows]

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
        """Compute an update's gradients in main_grad buffers, reduced over data-parallel ranks, tied embeddings, norms.

        Every data-parallel rank must call this, with equally many micro-batches.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._through(batches, on_tokens, forward_only=False)
        self._forget_graph()
        wait_for_device(self._device)  # else its time would count as the optimizer's

    def gradient_norm(self) -> float:
        """Compute the global L2 norm before clipping."""
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    def apply(self, norm: float, learning_rate: float) -> None:
        """Clip by the global norm, then step AdamW."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        for part in self.optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(part.get_parameters(), self._clip_grad, norm)
        self.optimizer.step_with_ready_grads()
        self._adam.stepped()

    def remember(self) -> None:
        """Keep the weights and AdamW's state."""
        self._adam.remember()

    def restore(self) -> None:
        """Undo the updates since then."""
        self._adam.restore()

    def gather(self) -> None:
        """Complete the parameters of an optimizer that is divided among ranks."""
        self._adam.gather()

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
        interleaved = len(self.chunks) > 1
        lasts = chain(repeat(False, len(batches) * len(self.chunks) - 1), [not forward_only])
        self._run(
            forward_step_func=partial(self._forward, on_tokens, lasts),
            data_iterator=[iter(batches) for _ in self.chunks] if interleaved else iter(batches),
            model=self.chunks if interleaved else self.chunks[0],
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
