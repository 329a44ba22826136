"""Finds the tensors of each state in megatron-core's objects."""

from collections.abc import Sequence
from pathlib import Path

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from tandem_config.schema import OffloadSection
from trainer_service.megatron_engine.agreement import RankAgreement
from trainer_service.megatron_engine.offload.states import EngineState, Offload


def build_offload(
    settings: OffloadSection,
    chunks: Sequence[DistributedDataParallel],
    optimizer: ChainedOptimizer,
    device: torch.device,
    folder: Path | None,
    agreement: RankAgreement,
) -> Offload:
    """Set up what is offloaded; AdamW's state must be filled in (AdamState).

    Args:
        folder: of files that hold a CPU's bytes; None: the folder of temporary files.
    Raises: ConfigError: the host has no room.
    """
    offload = Offload(device, folder, agreement)
    parameters = [parameter.data for chunk in chunks for parameter in chunk.parameters()]
    if settings.parameters:
        offload.add(EngineState.PARAMETERS, parameters)
    if settings.gradients:
        # every update begins with zeros
        buffers = [buffer for chunk in chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        offload.add(EngineState.GRADIENTS, [buffer.grad_data for buffer in buffers], keep=False)
    if settings.optimizer:
        # float32 parameters are AdamW's own: they are the state above
        offload.add(EngineState.OPTIMIZER, _optimizer_tensors(optimizer), beside=parameters)
    return offload


def _optimizer_tensors(optimizer: ChainedOptimizer) -> list[Tensor]:
    """Return what AdamW holds: masters and moments; step counts, a few bytes which are read at any time, are not."""
    parts = [part.optimizer for part in optimizer.chained_optimizers]
    masters = [master.data for part in parts for group in part.param_groups for master in group["params"]]
    states = [value for part in parts for state in part.state.values() for value in state.values()]
    return [tensor for tensor in [*masters, *states] if isinstance(tensor, Tensor) and tensor.dim() > 0]
