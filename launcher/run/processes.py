"""Plans the service processes of a run: their commands and environments."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from launcher.run.devices import DevicePlan
from launcher.run.supervisor import ProcessSpec
from servicekit.redis.records import COORDINATOR
from servicekit.security.run_token import VARIABLE
from tandem_config.schema import RunConfig
from tandem_files.run_config import LAUNCHED_CONFIG
from tandem_files.run_folder import read_token

EVALUATOR = "evaluator"
# Stop order: the coordinator first, so that no service gets new work while it stops.
_SERVICE_STAGE, _COORDINATOR_STAGE = 1, 2
# The coordinator's is added to run.stop_timeout_s, in which it saves what is finished. An engine ends within 2 s of
# processor time: on a machine whose processors other programs use, that takes half a minute.
_COORDINATOR_GRACE_S, _SERVICE_GRACE_S = 15.0, 30.0
# What a replica samples may end, or is handed over, before that (rollout_service/app.py, DRAIN_S).
_HAND_OVER_S = 25.0


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Settings that all processes of a launch share.

    Attributes:
        run_id: name of the run in Redis.
        run_dir: its folder, with the configuration and the token of the launch.
    """

    run_id: str
    run_dir: Path
    redis_url: str
    resume: bool

    def environment(self) -> dict[str, str]:
        """Return the variables with addresses, ids and token; all other settings are in the configuration file."""
        return {
            "REDIS_URL": self.redis_url,
            "TANDEM_RUN_ID": self.run_id,
            "TANDEM_RUN_DIR": str(self.run_dir),
            VARIABLE: read_token(self.run_dir),
            "TANDEM_BIND_HOST": "127.0.0.1",
            "TANDEM_ADVERTISE_HOST": "127.0.0.1",
            # Overrides the user's shell: with fixed ports, two processes could not share this machine.
            "TANDEM_GRPC_PORT": "0",
            "TANDEM_METRICS_PORT": "0",
            "TANDEM_HEALTH_PORT": "",
            # Several processes share the cores: with more threads each, they are up to 10 times slower.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONUNBUFFERED": "1",
        }


def is_trainer(name: str) -> bool:
    """Whether a process of this name is a rank of the trainer."""
    return name.startswith("trainer-")


def is_rollout(name: str) -> bool:
    """Whether a process of this name is a replica."""
    return name.startswith("rollout-")


def plan_processes(config: RunConfig, launch: Launch, devices: DevicePlan) -> list[ProcessSpec]:
    """Plan the trainer ranks, the rollout replicas and the coordinator, in the order of their start."""
    world_size = config.trainer.world_size
    trainers = [_trainer_rank(launch, rank, world_size, devices) for rank in range(world_size)]
    rollouts = [_rollout(config, launch, index, devices) for index in range(config.rollout.replicas)]
    return [*trainers, *rollouts, _coordinator(config, launch)]


def plan_evaluation(config: RunConfig, launch: Launch, devices: DevicePlan) -> list[ProcessSpec]:
    """Plan the replicas of `tandem evaluate`, and the process that evaluates with them."""
    rollouts = [_rollout(config, launch, index, devices) for index in range(config.rollout.replicas)]
    evaluator = ProcessSpec(
        name=EVALUATOR,
        command=_module(launch, "coordinator.standalone", resume=False),
        log=launch.run_dir / "logs" / f"{EVALUATOR}.log",
        stage=_COORDINATOR_STAGE,
        env={**launch.environment(), **_device("")},
        grace_s=_SERVICE_GRACE_S,
    )
    return [*rollouts, evaluator]


def _trainer_rank(launch: Launch, rank: int, world_size: int, devices: DevicePlan) -> ProcessSpec:
    env = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    return ProcessSpec(
        name=f"trainer-{rank}",
        command=_module(launch, "trainer_service", resume=True),
        log=launch.run_dir / "logs" / f"trainer-{rank}.log",
        stage=_SERVICE_STAGE,
        # Without these the ranks rendezvous through the registry; those of a torchrun would lead elsewhere.
        unset=("MASTER_ADDR", "MASTER_PORT"),
        env={**launch.environment(), **env, **_device(devices.trainer)},
        grace_s=_SERVICE_GRACE_S,
    )


def _rollout(config: RunConfig, launch: Launch, index: int, devices: DevicePlan) -> ProcessSpec:
    name = f"rollout-{index}"
    # One process runs all hosts of an engine: they start and end together.
    module = "rollout_service" if config.rollout.nodes == 1 else "rollout_service.local_hosts"
    return ProcessSpec(
        name=name,
        command=[*_module(launch, module, resume=False), "--name", name],
        log=launch.run_dir / "logs" / f"{name}.log",
        stage=_SERVICE_STAGE,
        env={**launch.environment(), **_device(devices.rollouts[index])},
        grace_s=_HAND_OVER_S + _SERVICE_GRACE_S,
    )


def _coordinator(config: RunConfig, launch: Launch) -> ProcessSpec:
    return ProcessSpec(
        name=COORDINATOR,
        command=_module(launch, "coordinator", resume=True),
        log=launch.run_dir / "logs" / f"{COORDINATOR}.log",
        stage=_COORDINATOR_STAGE,
        env={
            **launch.environment(),
            **_device(""),
            "TANDEM_WEB_PORT": os.environ.get("TANDEM_WEB_PORT", "0"),
        },
        grace_s=config.run.stop_timeout_s + _COORDINATOR_GRACE_S,
    )


def _module(launch: Launch, module: str, *, resume: bool) -> list[str]:
    # -P: a folder called `coordinator` in the user's working directory must not be imported instead of ours.
    command = [sys.executable, "-P", "-m", module, "--config", str(launch.run_dir / LAUNCHED_CONFIG)]
    return [*command, "--resume"] if resume and launch.resume else command


def _device(gpus: str) -> dict[str, str]:
    """Return what makes a process compute on these GPUs, or on the CPU, and refuse to start on the other."""
    return {"CUDA_VISIBLE_DEVICES": gpus, "TANDEM_DEVICE": "cuda" if gpus else "cpu"}
