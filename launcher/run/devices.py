"""Lists this machine's GPUs and assigns them to processes, without importing torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tandem_config.schema import RunConfig

_DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """`CUDA_VISIBLE_DEVICES` of the trainer ranks (shared, LOCAL_RANK picks one) and of each replica.

    `available` and `needed` count GPUs; with fewer available than needed everything runs on the CPU.
    """

    available: int
    needed: int
    trainer: str
    rollouts: tuple[str, ...]


def visible_gpus(environment: Mapping[str, str] | None = None, driver: Path = _DRIVER) -> list[str]:
    """Return the GPU ids, as CUDA_VISIBLE_DEVICES takes them: the driver's, limited by that variable."""
    chosen = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    present = [str(index) for index, _ in enumerate(driver.iterdir())] if driver.is_dir() else []
    if chosen is None or not present:
        return present
    return [part.strip() for part in chosen.split(",") if part.strip() and part.strip() != "-1"]


def plan_devices(config: RunConfig, gpus: list[str], *, trainer_ranks: int | None = None) -> DevicePlan:
    """Assign a GPU to every trainer rank, then `tensor_parallel` to every replica, in order.

    Two ranks never share a GPU: NCCL refuses that.

    Args:
        gpus: ids as from `visible_gpus`.
        trainer_ranks: None: those of the configuration.
    """
    ranks = trainer_world_size(config) if trainer_ranks is None else trainer_ranks
    width, replicas = config.rollout.tensor_parallel, config.rollout.replicas
    needed = ranks + width * replicas
    if len(gpus) < needed:
        return DevicePlan(available=len(gpus), needed=needed, trainer="", rollouts=("",) * replicas)
    starts = range(ranks, needed, width)
    return DevicePlan(
        available=len(gpus),
        needed=needed,
        trainer=",".join(gpus[:ranks]),
        rollouts=tuple(",".join(gpus[start : start + width]) for start in starts),
    )


def trainer_world_size(config: RunConfig) -> int:
    """Return the number of trainer ranks."""
    return config.trainer.world_size
