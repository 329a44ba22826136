"""The distributed optimizer (ZeRO-1): which part of each parameter this rank trains, and how the parts come together.

mcore lays the parameters of a data-parallel group into buckets, flat, and gives each rank an equal part of every
bucket: of its gradient, of AdamW's moments and of the float32 values that AdamW steps. After a step the ranks gather
the parameters, immediately or (trainer.overlap_param_gather) as the next forward pass comes to them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from trainer_service.checkpoints.files import EXPERTS
from trainer_service.checkpoints.parts import FlatPart, Held, values_of

STEP = "step/"


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnPart:
    """What this rank trains of a parameter: the elements of `trained` [n], from `start` on in the flat parameter.

    Attributes:
        trained: what AdamW steps: a part of the parameter itself, or of its float32 master.
    """

    start: int
    trained: Tensor

    def of(self, parameter: Tensor) -> Tensor:
        """Return a view of the same elements of a parameter, whose type may be another one."""
        return parameter.view(-1)[self.start : self.start + self.trained.numel()]


def own_parts(optimizer: ChainedOptimizer) -> dict[Tensor, OwnPart] | None:
    """Return this rank's part of each parameter that it has one of; None: AdamW has whole parameters."""
    divided = [part for part in optimizer.chained_optimizers if isinstance(part, DistributedOptimizer)]
    if not divided:
        return None
    return {
        parameter: OwnPart(start=part._get_model_param_range_map(parameter)["param"].start, trained=trained)
        for part in divided
        for whole, cut in (
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        )
        for parameters, trained_ones in zip(whole, cut, strict=True)
        for parameter, trained in zip(parameters, trained_ones, strict=True)
    }


def gathered(tensors: Mapping[str, Held]) -> Iterator[tuple[str, Tensor]]:
    """Gather the parts, one tensor at a time, and first the step counts, in place; every rank must take all of them.

    Yields: name and whole tensor, on the parts' device. It has its values on the first rank of each group, which writes
        checkpoints, and any on the others.
    """
    parts = {name: value for name, value in tensors.items() if isinstance(value, FlatPart)}
    if parts:
        _share_steps(tensors)
    for name, part in parts.items():
        yield name, _gather(part, _group_of(name))


def _gather(part: FlatPart, group: dist.ProcessGroup) -> Tensor:
    """Sum the parts as integers, each in its place among zeros: then no bit changes, not even the sign of a zero."""
    whole = torch.zeros(part.shape, dtype=part.values.dtype, device=part.values.device)
    whole.view(-1)[part.start : part.start + part.values.numel()] = part.values
    dist.reduce(whole.view(torch.int32), dist.get_global_rank(group, 0), group=group)
    return whole


def _share_steps(tensors: Mapping[str, Held]) -> None:
    """Give all ranks of a group the step counts of parameters of which they have no part."""
    groups: dict[dist.ProcessGroup, list[Tensor]] = {}
    for name, value in tensors.items():
        if name.startswith(STEP):
            groups.setdefault(_group_of(name), []).append(values_of(value))
    device = next(value.values.device for value in tensors.values() if isinstance(value, FlatPart))
    for group, counts in groups.items():
        # AdamW's are on the device, those of parameters of which this rank has no part on the host
        most = torch.stack([count.to(device) for count in counts])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
        for count, number in zip(counts, most, strict=True):
            count.copy_(number)


def _group_of(name: str) -> dist.ProcessGroup:
    """Return the ranks that share a parameter, and so divide its optimizer state."""
    if EXPERTS in name:
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def finish_gathering(chunks: Sequence[DistributedDataParallel]) -> None:
    """Wait until this rank has all parameters of the last update; every rank must call this.

    With trainer.overlap_param_gather parts of other ranks are those of before the update until a forward pass needs
    them, or this is called.
    """
    for group in _bucket_groups(chunks):
        if group.param_gather_handle is not None or not group.param_gather_dispatched:
            group.start_param_sync(force_sync=True)


def gather_next(chunks: Sequence[DistributedDataParallel]) -> None:
    """Have parameters gathered before they are read next, because AdamW has changed this rank's parts of them.

    mcore notes that while it reduces gradients, and an update without a micro-batch has none: AdamW's momentum and
    weight decay move parameters nevertheless.
    """
    for group in _bucket_groups(chunks):
        if group.ddp_config.overlap_param_gather:  # else AdamW's step has gathered them
            group.param_gather_dispatched = False


def gather_again(chunks: Sequence[DistributedDataParallel]) -> None:
    """Gather the parameters after this rank's parts of them were written; every rank must call this."""
    finish_gathering(chunks)
    for group in _bucket_groups(chunks):
        group.start_param_sync(force_sync=True)


def _bucket_groups(chunks: Sequence[DistributedDataParallel]) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups
