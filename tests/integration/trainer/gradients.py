"""The gradients of each update of an engine, before they are clipped, by the names of Hugging Face folders."""

from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.megatron_engine.zero import _group_of, own_parts
from weightsync.transfer.hf_files import gather_tensors


def record(engine: MegatronEngine, folder: Path) -> None:
    """Write the gradients of update i of the step that follows to folder / f"{i}.safetensors"; on all ranks."""
    backend, updates = engine._backend, count()
    train = backend.train

    def recorded(*arguments: object) -> None:
        train(*arguments)  # type: ignore[arg-type]
        gathered = gather_tensors(engine.spec, engine.parallel, dist.get_rank(), _local(engine), dist.group.WORLD)
        if gathered is not None:
            folder.mkdir(exist_ok=True)
            save_file(gathered, folder / f"{next(updates)}.safetensors")

    backend.train = recorded  # type: ignore[method-assign, assignment]


def stop_recording(engine: MegatronEngine) -> None:
    """Undo `record`."""
    del engine._backend.train


def _local(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Return the gradients of this rank's parameters, by megatron-core's names."""
    parts = own_parts(engine._backend.optimizer)
    local = {name: parameter.main_grad for name, parameter in engine._parameters.items()}
    if parts is None:
        return local
    for name, parameter in engine._parameters.items():
        # this rank has the sum over all ranks in its own part only
        whole = torch.zeros_like(local[name])
        if parameter in parts:
            parts[parameter].of(whole).copy_(parts[parameter].of(local[name]))
        dist.all_reduce(whole, group=_group_of(name))
        local[name] = whole
    return local
