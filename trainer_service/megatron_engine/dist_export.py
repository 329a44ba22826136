"""Writes a checkpoint's weights in the format of megatron-core's dist_checkpointing, which Megatron-LM reads.

The model is built at one rank and filled from the shards of any layout. mcore saves it itself, under the names that its
own `sharded_state_dict` gives. Needs memory for the whole model.
"""

import importlib.util
import shutil
from contextlib import ExitStack
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state

from servicekit.errors import ConfigError
from tandem_files.atomic import check_room, replace_folder, sync_file, sync_folder
from trainer_service.checkpoints.files import WEIGHTS
from trainer_service.checkpoints.shards import SavedShards
from trainer_service.checkpoints.states import SavedStates
from trainer_service.checkpoints.writing import partial_of
from trainer_service.megatron_engine import build
from trainer_service.megatron_engine.head.policy_model import PolicyModel
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.model.spec import ModelSpec

# Megatron-LM's names of a checkpoint that is no iteration of a run of its own, and of the file that says which to read.
RELEASE, TRACKER = "release", "latest_checkpointed_iteration.txt"
# Version of Megatron-LM's own part of the format.
_CHECKPOINT_VERSION = 3.0
_TIMEOUT_S = 600.0


def write_dist(folder: Path, spec: ModelSpec, out: Path) -> int:
    """Write the weights of a trainer checkpoint as `OUT/release/`; `OUT` appears when it is complete.

    Args:
        folder: the trainer's part of a checkpoint, whose digests were compared.
        out: on a disk with room for the model.
    Returns: its bytes.
    Raises: ConfigError: the checkpoint is of another model, or mcore's writer lacks a package; OSError.
    """
    if importlib.util.find_spec("psutil") is None:  # its writer processes would end, and the save would never do
        raise ConfigError("megatron-core's dist_checkpointing needs the package psutil: pip install psutil")
    partial = partial_of(out)
    shutil.rmtree(partial, ignore_errors=True)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with ExitStack() as stack:
            model = _filled(SavedShards(folder, spec, stack), spec)
            check_room(out, sum(parameter.nbytes for parameter in model.parameters()))
            (partial / RELEASE).mkdir(parents=True)
            state = {"model": model.sharded_state_dict(), "checkpoint_version": _CHECKPOINT_VERSION, "iteration": 0}
            dist_checkpointing.save(state, str(partial / RELEASE))
        (partial / TRACKER).write_text(f"{RELEASE}\n", encoding="utf-8")
        for path in (partial, *partial.rglob("*")):
            if path.is_dir():
                sync_folder(path)
            else:
                sync_file(path)
        replace_folder(partial, out)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
        shutil.rmtree(partial, ignore_errors=True)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())


def _filled(shards: SavedShards, spec: ModelSpec) -> PolicyModel:
    """Build the model at one rank, with the weights of a checkpoint."""
    one = Parallel()
    build.initialize_parallel(one, 0, _TIMEOUT_S)
    config = build.transformer_config(spec, one, getattr(torch, shards.meta["dtype"]), sequence_parallel=False)
    chunks = build.build_chunks(spec, config, 1.0, torch.device("cpu"))
    tensors = {f"{WEIGHTS}/{name}": value.data for name, value in build.named_parameters(chunks, spec).items()}
    SavedStates(shards, spec, megatron_layout(spec, one), 0, tensors).fill()
    return chunks[0]
