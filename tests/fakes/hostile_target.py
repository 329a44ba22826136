"""`python -m tests.fakes.hostile_target trainer|rollout|reward|coordinator|worker|ranks FOLDER`: over fake engines.

In a process of its own, as services are (the metrics of two do not fit into one). Prints its address, then for each
line of its standard input what is left of requests, and serves until that ends. Nothing finds cycles in it.
"""

import asyncio
import gc
import json
import socket
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from servicekit.logs import configure_logging
from servicekit.rpc.server import GrpcServer
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from trainer_service.engine import StepResult
from trainer_service.micro_batches.checks import Limits
from trainer_service.micro_batches.samples import Samples
from weightsync.layouts.layout import Parallel
from weightsync.plans.participants import Participants


class Engine:
    """A trainer's engine that computes nothing."""

    policy_version = 0
    on_gpus = False
    limits = Limits(vocab_size=128, max_positions=64, max_tokens=64)
    parallel = Parallel(tensor=2)

    def load(self, folder: Path) -> None:
        self.policy_version = 0

    def check_checkpoint(self, folder: Path) -> None:
        raise AssertionError(f"{folder}: no request can name a checkpoint here")

    def renumber(self, policy_version: int) -> None:
        self.policy_version = policy_version

    saving = None

    def save(self, folder: Path) -> int:
        return 0

    export = begin_save = save

    def train_step(self, samples: Samples, num_updates: int) -> StepResult:
        self.policy_version += 1
        return StepResult(metrics={"loss": 0.0, "grad_norm": 0.0}, performance={}, seconds={})

    def logprobs(self, samples: Samples, *, reference: bool = False) -> tuple[Any, Any]:
        return np.zeros(samples.num_completion_tokens, np.float32), np.zeros(samples.num_completion_tokens, np.float32)


def run_phase(phase: Any, round_: weights_pb2.Round) -> weights_pb2.PhaseReport:
    """Takes any round, lists its ranks and waits for them as a real one does."""
    assert len(Participants.of_round(round_).slots) <= 2**16
    assert timedelta(seconds=round_.formation_timeout_s + round_.transfer_timeout_s) > timedelta()
    return weights_pb2.PhaseReport()


# A single rank; a fleet of one replica, of which there is nothing to say; a run that has not begun.
WIRE: Any = SimpleNamespace(rank=0, world_size=1, broadcast=lambda *command: None)
FLEET: Any = SimpleNamespace(serving=lambda: ["rollout-0"], troubles=lambda: ["rollout-0"])
PROGRESS: Any = SimpleNamespace(iteration=0, policy_version=0, last_progress_s=0.0, troubles=())


def trainer(folder: Path, server: GrpcServer) -> None:
    """TrainerService, one rank."""
    from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
    from trainer_service.ranks.commands import Commander
    from trainer_service.ranks.handlers import CommandHandlers
    from trainer_service.ranks.publish import Publisher
    from trainer_service.servicer import TrainerServicer
    from weightsync.round.client import SERVICE

    commander, engine = Commander(), Engine()
    handlers = CommandHandlers(engine, Publisher(run_phase, lambda: nullcontext({})), folder).table()  # type: ignore[arg-type]
    threading.Thread(target=commander.run, args=(WIRE, handlers), daemon=True).start()
    servicer = TrainerServicer(commander, max_samples=8, run_dir=folder)
    servicer.serve_engine(engine)  # type: ignore[arg-type]
    name = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"].full_name
    server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer, name)
    server.add(weights_pb2_grpc.add_RoundServiceServicer_to_server, servicer, SERVICE)


def coordinator(folder: Path, server: GrpcServer) -> None:
    """CoordinatorService of a run that has nothing to do."""
    from coordinator.servicer import FULL_NAME, CoordinatorServicer
    from coordinator.watch.control import RunControl
    from coordinator.watch.events import EventLog
    from tandem_api.coordinator.v1 import coordinator_pb2_grpc

    events = EventLog()
    servicer = CoordinatorServicer(
        run="r",
        total_iterations=3,
        control=RunControl(events),
        events=events,
        progress=PROGRESS,
        fleet=FLEET,
        overview=dict,
    )
    server.add(coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server, servicer, FULL_NAME)


def reward(folder: Path, server: GrpcServer) -> None:
    """RewardService, of a scorer that is loaded."""
    from examples.reward_server.server import LastNumber
    from reward_service.servicer import FULL_NAME, RewardServicer
    from tandem_api.reward.v1 import reward_pb2_grpc

    servicer = RewardServicer(LastNumber())
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, FULL_NAME)
    asyncio.get_running_loop().create_task(servicer.load())


async def environment(server: GrpcServer) -> None:
    """EnvironmentService, of a tool, whose worker has started."""
    from coordinator.environments.pool import EnvironmentPool
    from coordinator.environments.remote import SERVICE
    from environment_service.servicer import EnvironmentServicer
    from tandem_api.environment.v1 import environment_pb2_grpc
    from tandem_config.sections.environment import EnvironmentSection

    section = EnvironmentSection(tools=("examples.calculator.tools:calculate",), workers=1)
    servicer = EnvironmentServicer(EnvironmentPool(section), "calculate")
    server.add(environment_pb2_grpc.add_EnvironmentServiceServicer_to_server, servicer, SERVICE)
    await servicer.load()


def worker(folder: Path, server: GrpcServer) -> None:
    """RolloutWorkerService of a host that nobody has joined yet, and that ends for none."""
    from rollout_service.hosts.host_ranks import HostRanks
    from rollout_service.hosts.membership import WorkerMembership
    from rollout_service.hosts.servicer import WorkerServicer
    from tandem_api.rollout.v1 import worker_pb2, worker_pb2_grpc
    from tests.unit.rollout.fake_engine import FakeRanks
    from weightsync.round.client import SERVICE

    servicer = WorkerServicer(WorkerMembership("r-1", HostRanks(host=1, nodes=2, tensor_parallel=2), 60.0), "w")
    servicer.serve_ranks(FakeRanks())
    name = worker_pb2.DESCRIPTOR.services_by_name["RolloutWorkerService"].full_name
    server.add(worker_pb2_grpc.add_RolloutWorkerServiceServicer_to_server, servicer, name)
    server.add(weights_pb2_grpc.add_RoundServiceServicer_to_server, servicer, SERVICE)


def serve_ranks() -> tuple[grpc.Server, str]:
    """ShardReceiverService of a rank, in threads, at a port instead of a Unix socket."""
    from rollout_service.sglang_engine.receiver import ShardReceiver, add_receiver
    from servicekit.rpc.sync_server import start_sync_server

    member: Any = SimpleNamespace(run_phase=run_phase, load_published=lambda folder, at_least, **_: at_least)
    member.checksums, member.poison = dict, lambda: 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    return start_sync_server(add_receiver, ShardReceiver(member, lambda folder: None), address), address


def requests_alive() -> dict[str, int]:
    """Messages that only requests have, by name."""
    kinds = [type(one).__name__ for one in gc.get_objects() if isinstance(one, Message)]
    return dict(Counter(kind for kind in kinds if kind.endswith("Request") or kind in ("SampleChunk", "PromptGroup")))


async def main() -> None:
    """Serves what the command line names."""
    configure_logging("hostile-target")
    name, folder = sys.argv[1], Path(sys.argv[2])
    if name == "rollout":
        from tests.unit.rollout.test_servicer import Served

        served = Served()
        await served.start()
        server, address = served.server, served.address
    elif name == "ranks":
        threaded, address = serve_ranks()
    else:
        server = GrpcServer(name)
        if name == "environment":
            await environment(server)
        makes = {"trainer": trainer, "reward": reward, "coordinator": coordinator, "worker": worker}
        if name in makes:
            makes[name](folder, server)
        address = await server.start()
    print(address, flush=True)
    gc.collect()
    gc.disable()
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(requests_alive()), flush=True)
    if name == "ranks":
        threaded.stop(0).wait()
    else:
        await server.drain(0.0)


if __name__ == "__main__":
    asyncio.run(main())
