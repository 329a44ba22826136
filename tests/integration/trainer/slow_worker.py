"""One rank of the tests of ranks that are slow at work of their own. Arguments: those of parity_worker.

One rank of two takes SLOW_S longer at each of MOMENTS, and device groups wait for DEVICE_S.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from tandem_config.schema import RunConfig
from tests.integration.trainer.parity_worker import run_all
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, make_samples
from trainer_service.checkpoints import writing
from trainer_service.checkpoints.states import SavedStates
from trainer_service.measure import meter
from trainer_service.megatron_engine import adam_state, checkpoint, engine
from trainer_service.step import offload as states
from weightsync.transfer.transports.packing import Packer

DEVICE_S, SLOW_S = 2.0, 3.5
# What is slow, and on which rank: the other one waits for it in the next collective.
MOMENTS: dict[str, tuple[Any, str, int]] = {
    "reading the model": (engine, "load_shards", 1),
    "measuring the device": (meter, "measured_flops_per_s", 0),
    "page-locking memory": (adam_state.AdamState, "remember", 1),
    "writing a checkpoint": (checkpoint, "write_file", 0),
    "page-locking copies": (writing.HostCopies, "reserve", 1),
    "publishing it": (checkpoint, "publish", 0),
    "comparing digests": (checkpoint, "damages", 1),
    "reading a checkpoint": (SavedStates, "fill", 0),
    "taking tensors": (Packer, "unpack", 0),
    "writing the model": (engine, "write_folder", 0),
    "bringing memory back": (states._Memory, "bring", 1),
}


def run_case(case: dict[str, Any], out: Path) -> None:
    from megatron.core import parallel_state  # after the engine, which prepares it for CPUs

    sections = {
        "model": {"path": case["model"]},
        "trainer": CONFIG["trainer"] | case["trainer"],
        "grpo": CONFIG["grpo"],
    }
    out.mkdir(exist_ok=True)
    made = engine.MegatronEngine(RunConfig.model_validate(CONFIG | sections), torch.device("cpu"), out)
    for group in [dist.group.WORLD, *(parallel_state._global_process_group_list or [])]:
        if group is not None and dist.get_rank(group) >= 0:
            _set_pg_timeout(timedelta(seconds=DEVICE_S), group)
    seen: list[str] = []
    for moment in case["moments"]:
        be_slow(moment, *MOMENTS[moment], seen)
    made.load(Path(case["model"]))
    made.train_step(make_samples(), NUM_UPDATES)
    made.save(out / "checkpoint")
    made.begin_save(out / "beside")
    made.load_checkpoint(out / "checkpoint")
    made.export(out / "export")
    made.train_step(make_samples(), NUM_UPDATES)
    (out / f"rank{dist.get_rank()}.txt").write_text("\n".join(seen))
    made.close()


def be_slow(moment: str, owner: Any, name: str, rank: int, seen: list[str]) -> None:
    """Take longer the first time, on one rank; `seen` gets the moment."""
    if dist.get_rank() != rank:
        return
    quick: Callable[..., Any] = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        if moment not in seen:
            seen.append(moment)
            time.sleep(SLOW_S)
        return quick(*args, **kwargs)

    setattr(owner, name, slow)


if __name__ == "__main__":
    run_all(run_case)
