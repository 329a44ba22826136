"""A trainer of any layout without Megatron: real SyncMembers in threads, shards read from a Hugging Face folder."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.integration.sync.rounds import RunPhase
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec
from weightsync.plans.round_plan import source_layout
from weightsync.transfer.hf_files import load_shards
from weightsync.transfer.session import SyncMember


@contextmanager
def senders(folder: Path, parallel: Parallel, redis_url: str, group: str) -> Iterator[list[RunPhase]]:
    """Every rank of a trainer, holding the folder's weights; they leave the group at the end of the block."""
    spec = ModelSpec.from_folder(folder)
    layout = source_layout(spec, parallel)
    members: list[SyncMember] = []
    try:
        for rank in range(parallel.world_size):
            tensors = {name: torch.zeros(shape) for name, shape in layout.parameters_of(rank).items()}
            load_shards(folder, spec, layout, rank, tensors)
            slot = f"trainer/{rank}"
            member = SyncMember(
                spec=spec,
                slot=slot,
                parallel=parallel,
                tensors=tensors,
                redis_url=redis_url,
                group=group,
                disk_folder=Path(tempfile.gettempdir()),
            )
            member.start()
            members.append(member)
        yield [member.run_phase for member in members]
    finally:
        for member in members:
            member.close()
