"""Trainer ranks and replicas as `tandem run` starts them, and rounds by the coordinator's own code in this process."""

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from coordinator.sync.weight_sync import WeightSync
from launcher.run.processes import Launch, is_rollout, is_trainer, plan_processes
from launcher.run.redis_server import server_spec, wait_ready
from launcher.run.supervisor import ProcessSpec, Supervisor
from servicekit.errors import TandemError, Unavailable
from servicekit.lifecycle.tasks import first_of
from servicekit.redis.records import COORDINATOR
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import DeadlineChannel, open_channel
from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from tandem_clients.flow import ReplicaOutcome, SyncResult
from tandem_clients.trainer import Trainer
from tandem_clients.watched_fleet import WatchedFleet
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig
from tandem_files.run_config import LAUNCHED_CONFIG
from tools.gpu_check.services.settings import RUN_ID, Scale, Shape, model_config, run_config, write_model
from weightsync.membership.rendezvous import Rendezvous
from weightsync.round.client import RoundClient
from weightsync.round.phases import Phase

# Engines import for 20 s, capture graphs for as long; several times that on busy cores.
START_S = 300.0
CALL_S = 120.0
POLL_S = 0.02
TRAINER = "trainer"

Checksums = dict[str, dict[str, str]]  # by slot, by parameter


@dataclass(frozen=True, kw_only=True)
class Strike:
    """Harm done in a phase of the next round, while all are at it."""

    phase: int
    during: Callable[[], Awaitable[None]]


class StruckTrainer(Trainer):
    """The coordinator's client of the trainer; `strike` is what happens to the fleet in the next such phase."""

    strike: Strike | None = None

    def _connect(self) -> None:
        super()._connect()
        self.rounds = StruckRounds(self, self.rounds)


class StruckRounds(RoundClient):
    """Runs phases on `trainer`, and strikes in one: it is not over before the harm is done."""

    def __init__(self, trainer: StruckTrainer, rounds: RoundClient) -> None:
        self._trainer, self._rounds = trainer, rounds

    async def run_phases(self, phases: Sequence[Phase], round_: pb.Round) -> list[pb.PhaseReport]:
        """As RoundClient."""
        strike = self._trainer.strike
        if strike is None or strike.phase not in phases:
            return await self._rounds.run_phases(phases, round_)
        self._trainer.strike = None
        call = asyncio.create_task(self._rounds.run_phases(phases, round_), name="struck phase")
        await strike.during()
        return await call


class NoRival:
    """The lease (coordinator/leader_lease.py) of rounds that no other coordinator can begin: Redis is our own."""

    fence = CoordinatorFence()
    left_s = float("inf")
    is_held = True

    def confirm(self, epoch: int, slots: Iterable[str]) -> None:
        """Always."""

    def hold(self) -> None:
        """Always."""


class ServiceFleet:
    """The processes of one shape. Use `running`; from the main thread (launcher/run/supervisor.py says why)."""

    def __init__(self, folder: Path, shape: Shape, scale: Scale) -> None:
        self.shape, self.scale = shape, scale
        self.run_dir = folder / "run"
        self.run_dir.mkdir(parents=True)
        self.model = write_model(model_config(scale, shape.experts), folder / "model")
        self.config: RunConfig = run_config(shape, scale, self.model)
        self.replicas = tuple(f"rollout-{index}" for index in range(shape.replicas))
        self.trainer = StruckTrainer("127.0.0.1:1")  # WatchedFleet says where it is
        self.supervisor = Supervisor()
        self._folder = folder
        self._specs: dict[str, ProcessSpec] = {}
        self._channels: dict[str, DeadlineChannel] = {}
        self._closing = asyncio.Event()
        self._stack = AsyncExitStack()
        for close in (self.supervisor.stop, self.trainer.close, self._close_channels):
            self._stack.push_async_callback(close)

    async def start(self) -> None:
        """Wait until all services are announced. Raises: RuntimeError: one has ended instead, with its error."""
        redis, self.redis_url = server_spec(self.run_dir / "logs" / "redis.log")
        await self.supervisor.start(redis)
        await wait_ready(self.redis_url, self.supervisor)
        self.registry = Registry(self.redis_url, RUN_ID)
        self.group = Rendezvous(self.redis_url, f"tandem:{RUN_ID}")
        self.watched = WatchedFleet(self.registry, self.trainer)
        self._stack.callback(self.registry.close)
        self._stack.push_async_callback(self.watched.close)
        self._specs = {spec.name: spec for spec in self._planned(resume=False)}
        for spec in self._specs.values():
            await self.supervisor.start(spec)
        await self.wait_up()

    def _planned(self, *, resume: bool) -> Iterable[ProcessSpec]:
        """What `tandem run` would start, but the coordinator."""
        path = self.run_dir / LAUNCHED_CONFIG
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_resolved(self.config), encoding="utf-8")
        launch = Launch(run_id=RUN_ID, run_dir=self.run_dir, redis_url=self.redis_url, resume=resume)
        for spec in plan_processes(self.config, launch, self.shape.devices(self.scale)):
            if spec.name != COORDINATOR and (self.replicas or not is_rollout(spec.name)):
                scratch = self._folder / spec.name  # receivers' sockets are below it
                scratch.mkdir(exist_ok=True)
                own = {"TMPDIR": str(scratch), "TANDEM_TEST_HOOKS": "1"}
                # numbered as nvidia-smi does
                yield replace(spec, env={**spec.env, **own, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"})

    async def wait_up(self) -> None:
        """Until every service is announced and the trainer answers."""
        first = await first_of({"up": self._announced(), "ended": self.supervisor.wait_any()})
        if first.name == "ended":
            raise RuntimeError(f"while the services started, {first.value.describe()}")

    async def _announced(self) -> None:
        async with asyncio.timeout(START_S):
            await asyncio.to_thread(self.registry.wait_for, "rollout", list(self.replicas), START_S)
            await asyncio.to_thread(self.registry.wait_for, TRAINER, [TRAINER], START_S)
            await self.until(self._all_answer, START_S, "an answer of every service")

    async def _all_answer(self) -> bool:
        """False while records of predecessors that were killed are still there."""
        try:
            await self.watched.look()
            await self.trainer.status(timeout_s=5.0)
            for name in self.replicas:
                await self.rollout(name).GetStatus(rollout_pb2.GetStatusRequest(), timeout=5.0)
            return all(len(self._sockets(name)) == self.shape.rollout_tensor for name in self.replicas)
        except (TandemError, grpc.RpcError):
            return False

    async def until(self, condition: Callable[[], Awaitable[bool]], timeout_s: float, what: str) -> None:
        """Poll a condition that nothing announces until it holds. Raises: RuntimeError: it did not come about."""
        deadline_s = time.monotonic() + timeout_s
        while not await condition():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {timeout_s:g} s for {what}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), POLL_S)

    # ---- processes ----

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send it to all processes of a service together, as when its pod or its host goes."""
        for pid in self.supervisor.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def start_again(self, names: Sequence[str], *, resume: bool = False) -> None:
        """New processes in the place of these, which may have ended; returns when they are up."""
        for name in names:
            shutil.rmtree(self._folder / name)  # with the sockets of receivers that were killed
        planned = {spec.name: spec for spec in self._planned(resume=resume)}
        await self.supervisor.replace([planned[name] for name in names])
        await self.wait_up()

    @property
    def trainer_ranks(self) -> list[str]:
        """List the names of their processes."""
        return [name for name in self._specs if is_trainer(name)]

    def ended(self) -> dict[str, str]:
        """Describe how services have ended, by name."""
        return {ended.name: ended.describe() for ended in self.supervisor.ended()}

    async def close(self) -> None:
        """End all processes."""
        self._closing.set()
        await self._stack.aclose()

    async def _close_channels(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    # ---- calls ----

    def _channel(self, role: str, name: str) -> DeadlineChannel:
        """To a service that is announced. Raises: Unavailable: it is not."""
        for record in self.registry.list(role):
            if record.name == name:
                return self._channel_to(record.address)
        raise Unavailable(f"{name} is not announced")

    def _channel_to(self, address: str) -> DeadlineChannel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    def rollout(self, name: str) -> Any:
        """A stub of the replica's service."""
        return rollout_pb2_grpc.RolloutServiceStub(self._channel("rollout", name))

    def receivers(self, name: str) -> list[Any]:
        """A stub of each rank's receiver."""
        return [weights_pb2_grpc.ShardReceiverServiceStub(self._channel_to(socket)) for socket in self._sockets(name)]

    def _sockets(self, name: str) -> list[str]:
        return [f"unix:{path}" for path in sorted((self._folder / name).glob("**/rank*.sock"))]

    async def publish(self, version: int, **sync: Any) -> SyncResult:
        """A round as a coordinator makes it, with rounds after it if it fails. sync: changes of that section."""
        settings = self.config.sync.model_copy(update=sync)
        weights = WeightSync(
            trainer=self.trainer, fleet=self.watched, group=self.group, settings=settings, lead=NoRival()
        )
        return await weights.publish(version)

    async def checksums(self, names: Sequence[str] | None = None) -> Checksums:
        """Get the digests of all parameters of these replicas from their services."""
        found: Checksums = {}
        for name in self.replicas if names is None else names:
            reply = await self.rollout(name).GetChecksums(rollout_pb2.GetChecksumsRequest(), timeout=CALL_S)
            found |= {f"{name}/{rank}": dict(shard.checksums) for rank, shard in enumerate(reply.ranks)}
        return found

    async def poison(self, names: Sequence[str] | None = None) -> Checksums:
        """Fill all parameters with NaN, so that what a round does not write shows. Returns: the digests then."""
        names = self.replicas if names is None else names
        for stub in [stub for name in names for stub in self.receivers(name)]:
            await stub.PoisonWeights(pb.PoisonWeightsRequest(), timeout=CALL_S)
        return await self.checksums(names)

    async def truth(self, folder: Path, names: Sequence[str] | None = None) -> Checksums:
        """What SGLang's own loader makes of a Hugging Face folder."""
        names = self.replicas if names is None else names
        for stub in [stub for name in names for stub in self.receivers(name)]:
            await stub.LoadFolder(pb.LoadFolderRequest(path=str(folder)), timeout=CALL_S)
        return await self.checksums(names)

    async def export(self) -> Path:
        """The trainer's policy as a Hugging Face folder."""
        version = (await self.trainer.status()).policy_version
        folder = self.run_dir / f"hf-{version}-{time.monotonic_ns()}"
        await self.trainer.export_model(folder)
        return folder


def committed(result: SyncResult, names: Sequence[str]) -> list[str]:
    """What is wrong with a publication's end, if anything."""
    return [
        f"{name}: {result.outcomes[name].value if name in result.outcomes else 'not in the round'}"
        for name in names
        if result.outcomes.get(name) is not ReplicaOutcome.COMMITTED
    ]


@asynccontextmanager
async def running(shape: Shape, scale: Scale, logs: Path | None = None) -> AsyncIterator[ServiceFleet]:
    """A fleet around a `with` block. logs: where those of its services stay; None: nowhere."""
    parent = tempfile.gettempdir()
    # a Unix socket's path has at most 107 bytes
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=parent if len(parent) <= 30 else "/tmp") as folder:
        fleet = ServiceFleet(Path(folder), shape, scale)
        try:
            await fleet.start()
            yield fleet
        finally:
            await fleet.close()
            if logs is not None:
                shutil.rmtree(logs, ignore_errors=True)
                shutil.copytree(fleet.run_dir / "logs", logs)
