"""Checks what the machine has: engines installed, Redis reachable, enough GPUs or cores."""

import importlib.util
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launcher.run.devices import DevicePlan, plan_devices
from launcher.run.redis_server import find_server
from servicekit.cuda import WITHOUT_COMPILERS, Compilers, Gpus, compilers_here, find_gpus
from servicekit.errors import ConfigError, Unavailable
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from weightsync.membership.nccl_settings import STAGED_ADVICE, STAGED_MAY_HANG

_ENGINES = (("megatron", "trainer"), ("sglang", "rollout"), ("torch", "trainer"))


def check_host(
    config: RunConfig, redis_url: str | None, *, trainer_ranks: int | None = None
) -> Iterator[ConfigProblem]:
    """Check this machine: engines, Redis, cache folder, GPUs or cores; what only makes a run slow is a warning.

    Args:
        redis_url: REDIS_URL if the user gave one.
        trainer_ranks: None: those of the configuration.
    """
    for package, extra in _ENGINES:
        if importlib.util.find_spec(package) is None:
            yield problem(
                "environment",
                package,
                "is not installed in this Python environment",
                f"pip install 'tandem[{extra}]', or `make venv` in the repository",
            )
    yield from _check_layer_spec(config)
    yield from check_redis(redis_url)
    yield from _check_home()
    gpus = find_gpus()
    plan = plan_devices(config, gpus.usable, trainer_ranks=trainer_ranks)
    yield from check_devices(gpus, plan, os.environ.get("TANDEM_DEVICE") or "auto")
    yield from check_compilers(compilers_here()) if plan.on_gpus else _check_cores(config, trainer_ranks)
    yield from _check_staged(config, plan)


def _check_layer_spec(config: RunConfig) -> Iterator[ConfigProblem]:
    """Report what a trainer of this environment refuses; a warning for a run in pods, which have one of their own."""
    asked = config.trainer.layer_spec == "transformer_engine" or config.trainer.moe_grouped_gemm
    if asked and importlib.util.find_spec("transformer_engine") is None:
        yield problem(
            "trainer.layer_spec",
            config.trainer.layer_spec,
            "TransformerEngine is not installed in this Python environment",
            "install transformer-engine[pytorch] for this CUDA and torch, or set trainer.layer_spec: torch "
            "and leave trainer.moe_grouped_gemm out",
            severity="warning" if config.fleet.kind == "kubernetes" else "error",
        )


def _check_staged(config: RunConfig, plan: DevicePlan) -> Iterator[ConfigProblem]:
    """Report what PREPARE refuses on GPUs (weightsync/transfer/transports/links.py): an error if the run uses GPUs.

    A warning for a run in pods, which may have GPUs where this machine has none. On CPUs it cannot hang.
    """
    on_gpus, in_pods = plan.on_gpus, config.fleet.kind == "kubernetes"
    sync, over_nccl = config.sync, config.sync.transport in ("auto", "collective")
    if sync.install != "staged" or sync.allow_staged_nccl or not over_nccl or config.rollout.tensor_parallel == 1:
        return
    if on_gpus or in_pods:
        yield problem(
            "sync.install",
            sync.install,
            f"{STAGED_MAY_HANG}: on GPUs the first weight sync refuses it",
            STAGED_ADVICE,
            severity="error" if on_gpus else "warning",
        )


def _check_home() -> Iterator[ConfigProblem]:
    """Check that torch and SGLang can write their caches: without them they end with a traceback."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home())
    existing = next(parent for parent in (home, *home.parents) if parent.exists())
    if not is_writable(existing):
        yield problem(
            "XDG_CACHE_HOME" if os.environ.get("XDG_CACHE_HOME") else "HOME",
            home,
            f"{existing} is not writable, and the engines keep caches there",
            "set HOME to a folder of your own, e.g. HOME=/tmp/home",
        )


def is_writable(folder: Path) -> bool:
    """Whether files can be created in `folder`: tried, because permission bits say nothing of a read-only mount."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_redis(redis_url: str | None) -> Iterator[ConfigProblem]:
    """Check that the server of REDIS_URL answers or, without one, that a Redis server is installed."""
    try:
        if redis_url is None:
            find_server()
        else:
            # Imported here: it takes 0.1 s and most runs start their own server.
            from servicekit.redis import client as redis_client

            redis_client.connect(redis_client.with_tls_files(redis_url, os.environ)).close()
    except (ConfigError, Unavailable) as error:
        hint = "unset REDIS_URL to let Tandem start its own server" if redis_url is not None else ""
        yield problem("REDIS_URL", "", str(error), hint)


def check_devices(gpus: Gpus, plan: DevicePlan, wanted: str) -> Iterator[ConfigProblem]:
    """Say that a run computes on the CPU beside GPUs, and why; an error if TANDEM_DEVICE asks for them.

    Args:
        wanted: TANDEM_DEVICE.
    """
    if wanted not in ("auto", "cuda", "cpu"):
        yield problem("TANDEM_DEVICE", wanted, "is none of auto, cuda and cpu")
    if plan.on_gpus or not (gpus.present or wanted == "cuda"):
        return
    if gpus.why_not:
        why, advice = (
            f"the run cannot use them: {gpus.why_not}",
            "change that as requirements/gpu.md says",
        )
    elif gpus.present:
        why = f"the run needs {plan.needed}, one per trainer rank and rollout rank"
        advice = "lower trainer.* and rollout.* parallel sizes, or use a machine with more GPUs"
    else:
        why, advice = "the driver shows none here", "see requirements/gpu.md; CUDA_VISIBLE_DEVICES must not hide them"
    asked = wanted == "cuda"
    yield problem(
        "environment",
        f"{gpus.present} GPUs",
        why + (", and TANDEM_DEVICE=cuda asks for them" if asked else ", so it will run on the CPU"),
        advice + ("" if asked else ", or set TANDEM_DEVICE=cpu"),
        severity="error" if asked else "warning",
    )


def check_compilers(found: Compilers) -> Iterator[ConfigProblem]:
    """Say what of a toolkit is missing, by name, and which toolkits were found and do not fit."""
    if found.missing:
        yield problem(
            "environment",
            ", ".join(found.missing),
            f"not found: {WITHOUT_COMPILERS}",
            "install what requirements/gpu.md names",
        )
    if found.ignored:
        used = "none is used" if found.toolkit is None else f"{found.toolkit} is used"
        yield problem(
            "environment",
            "nvcc",
            f"{'; '.join(found.ignored)}: {used}",
            "set CUDA_HOME to a toolkit of torch's CUDA, or leave it out",
            severity="warning",
        )


def _check_cores(config: RunConfig, trainer_ranks: int | None) -> Iterator[ConfigProblem]:
    """Compare processes with cores; trainer and rollouts take turns, so each side is counted alone."""
    cores = len(os.sched_getaffinity(0))
    sides = {
        "trainer.tensor_parallel": (
            config.trainer.tensor_parallel,
            config.trainer.world_size if trainer_ranks is None else trainer_ranks,
        ),
        "rollout.tensor_parallel": (
            config.rollout.tensor_parallel,
            config.rollout.replicas * config.rollout.tensor_parallel,
        ),
    }
    for key, (value, processes) in sides.items():
        if processes > cores:
            yield problem(
                key,
                value,
                f"{processes} {key.partition('.')[0]} processes on {cores} cores will wait for each other",
                "expect a slow run, or lower the parallel sizes",
                severity="warning",
            )
