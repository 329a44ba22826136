"""Cells of the fault matrix with the real SGLang and Megatron: killed and frozen mid-transfer, and around it.

Before each publication every parameter of every replica is made NaN, so that "old" and "new" differ everywhere. What a
replica holds afterwards is either what SGLang's own loader would put there, or NaN, or it refuses to serve.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from coordinator.generate.dispatch import Rollouts
from coordinator.sync.weight_sync import WeightSync
from coordinator.take_over import take_over
from servicekit.errors import StaleVersion, TandemError
from servicekit.lifecycle.tasks import cancel
from servicekit.redis.registry import Registry
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_api.weights.v1 import weights_pb2_grpc
from tandem_clients.fleet import FixedFleet
from tandem_clients.flow import Order, Prompt, ReplicaOutcome, Sampling, SyncResult
from tandem_clients.trainer import Trainer
from tandem_clients.watched_fleet import WatchedFleet
from tandem_config.schema import RunConfig
from tests.fakes.sole_lead import SoleLead
from tests.kit.processes import START_S, Services
from tests.kit.redis import RedisProcess
from tests.kit.waiting import until
from tools.gpu_check.services.settings import BUCKET_MIB, SCALES, model_config, write_model
from weightsync.membership.rendezvous import Rendezvous
from weightsync.round.client import RoundClient
from weightsync.round.phases import COMMIT, PREPARE, TRANSFER, Phase

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

RUN_ID = "chaos"
REPLICAS = ("rollout-0", "rollout-1")
TRAINERS = ("trainer-0", "trainer-1")
CALL_S = 60.0
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
CELLS = [
    ("rollout-0", TRANSFER, KILL),
    ("rollout-1", TRANSFER, KILL),
    ("rollout-0", TRANSFER, STOP),
    ("rollout-1", TRANSFER, STOP),
    ("rollout-0", PREPARE, KILL),
    ("rollout-1", COMMIT, KILL),
    ("redis", TRANSFER, KILL),
    ("trainer-0", PREPARE, KILL),
    ("trainer-0", TRANSFER, KILL),
    ("trainer-1", TRANSFER, KILL),
]


class HarmedRounds(RoundClient):
    def __init__(self, trainer: "HarmingTrainer", rounds: RoundClient) -> None:
        self._trainer, self._rounds = trainer, rounds

    async def run_phases(self, phases: Sequence[Phase], round_: pb.Round) -> list[pb.PhaseReport]:
        return await self._trainer.run_phases(self._rounds, phases, round_)


class HarmingTrainer(Trainer):
    """Does harm while a phase is under way everywhere: all participants are called at the same time.

    In TRANSFER, once the first replica has got some of its bytes and still lacks others; in other phases the one that
    is to be killed is frozen before, because it could have done its part by then.
    """

    def __init__(self, address: str, fleet: "RealFleet", victim: str, phase: int, harm: signal.Signals) -> None:
        super().__init__(address)
        self._fleet, self._victim, self._phase, self._harm = fleet, victim, phase, harm
        self.done = False

    def _connect(self) -> None:
        super()._connect()
        self.rounds = HarmedRounds(self, self.rounds)

    async def run_phases(self, rounds: RoundClient, phases: Sequence[Phase], round_: pb.Round) -> list[pb.PhaseReport]:
        strikes = phases[0] == self._phase and not self.done
        if strikes and self._phase != TRANSFER:
            self._fleet.send_signal(self._victim, STOP)
        call = asyncio.create_task(rounds.run_phases(phases, round_))
        if strikes:
            self.done = True
            await asyncio.to_thread(self._strike)
        return await call

    def _strike(self) -> None:
        if self._phase == TRANSFER:
            with self._fleet.halted_mid_transfer():
                self._fleet.send_signal(self._victim, self._harm)
        else:
            self._fleet.send_signal(self._victim, self._harm)


class RealFleet:
    """Trainer TP 2 and two replicas, as processes that a test may end and start again."""

    def __init__(self, services: Services, redis: RedisProcess) -> None:
        self.redis, self.services = redis, services
        self.model = services.folder / "model"
        write_model(model_config(SCALES["cpu"], experts=0), self.model)
        self.services.start_trainer(self.config())
        for name in REPLICAS:
            self.services.start_rollout(name, self.config())
        self.wait_up()
        self.truth = self._load_with_sglang()
        self.poisoned: dict[str, dict[str, str]] = {}  # checksums by replica, since the last poison()

    def config(self) -> RunConfig:
        sync = {
            "bucket_mib": BUCKET_MIB,
            "transport": "collective",
            "formation_timeout_s": 20.0,
            "transfer_timeout_s": 8.0,
            "probe_timeout_s": 5.0,
            "lease_ttl_s": 5.0,
        }
        return RunConfig.model_validate(
            {
                "run": {"name": RUN_ID},
                "model": {"path": self.model},
                "data": {"train": self.model / "unused.jsonl"},
                "trainer": {"tensor_parallel": 2, "collective_timeout_s": 10.0},
                "rollout": {"max_total_tokens": 1024, "replicas": 2},
                "sync": sync,
            }
        )

    def wait_up(self) -> None:
        """Until the processes that run now are announced and answer."""
        for name in REPLICAS:
            self.services.address_of("rollout", name)
        self.services.address_of("trainer", "trainer")
        until(lambda: len(self._receivers()) == len(REPLICAS), START_S)

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """To a service and all of its processes, as when its pod or its host goes."""
        if name == "redis":
            os.kill(self.redis.pid, number)
        else:
            self.services.send_signal(name, number)

    def bring_back(self, victim: str, harm: signal.Signals) -> None:
        if victim == "redis":
            self.redis.restart()
        elif harm == STOP:
            self.send_signal(victim, signal.SIGCONT)
        elif victim in TRAINERS:
            for name in TRAINERS:
                self.services.kill(name)
            self.services.start_trainer(self.config())
        else:
            self.services.kill(victim)
            shutil.rmtree(self.services.folder / victim)
            self.services.start_rollout(victim, self.config())

    def _receivers(self) -> dict[str, weights_pb2_grpc.ShardReceiverServiceStub]:
        return {
            name: weights_pb2_grpc.ShardReceiverServiceStub(grpc.insecure_channel(address))
            for name in REPLICAS
            for address in self.services.sockets_of(name)
        }

    def poison(self) -> None:
        for stub in self._receivers().values():
            stub.PoisonWeights(pb.PoisonWeightsRequest(), timeout=CALL_S)
        self.poisoned = {name: self.checksums(name) for name in REPLICAS}

    @contextmanager
    def halted_mid_transfer(self) -> Iterator[None]:
        """Trainer rank 0 is frozen once a byte has come to the first replica; seen to be not all that it must send."""
        before, stub = self.poisoned["rollout-0"], self._receivers()["rollout-0"]

        def unwritten() -> list[str]:
            now = stub.GetChecksums(pb.GetChecksumsRequest(), timeout=CALL_S).checksums
            return [name for name in before if now[name] == before[name]]

        until(lambda: len(unwritten()) < len(before), START_S)
        self.send_signal("trainer-0", STOP)
        assert unwritten() != [], "the transfer was over before it could be harmed"
        yield
        with contextlib.suppress(ProcessLookupError):  # it was the one that was harmed
            self.send_signal("trainer-0", signal.SIGCONT)

    def checksums(self, name: str) -> dict[str, str]:
        return dict(self._receivers()[name].GetChecksums(pb.GetChecksumsRequest(), timeout=CALL_S).checksums)

    def _load_with_sglang(self) -> dict[str, str]:
        for stub in self._receivers().values():
            stub.LoadFolder(pb.LoadFolderRequest(path=str(self.model)), timeout=CALL_S)
        first, *others = [self.checksums(name) for name in REPLICAS]
        assert all(each == first for each in others)
        return first

    @asynccontextmanager
    async def coordinator(self, trainer: Trainer) -> AsyncIterator[tuple[WeightSync, WatchedFleet]]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(trainer.close)
            registry = self.services.registry
            stack.callback(registry.close)
            fleet = WatchedFleet(registry, trainer)
            stack.push_async_callback(fleet.close)
            group = Rendezvous(self.services.redis_url, f"tandem:{RUN_ID}")
            settings = self.config().sync
            yield WeightSync(trainer=trainer, fleet=fleet, group=group, settings=settings, lead=SoleLead()), fleet

    async def publish(self, trainer: Trainer, version: int = 0) -> SyncResult:
        async with self.coordinator(trainer) as (sync, _):
            return await sync.publish(version)

    def trainer(self) -> Trainer:
        """A client of the trainer that is announced now."""
        return Trainer(self.services.address_of("trainer", "trainer"))

    async def take_over(self) -> SyncResult:
        """As a coordinator does that goes on from version 0, the initial model."""
        trainer = self.trainer()
        async with self.coordinator(trainer) as (sync, _):
            return await sync.publish(await take_over(trainer, sync, 0, None))

    async def states(self) -> dict[str, int]:
        """State of every replica that answers."""
        found: dict[str, int] = {}
        async with self.coordinator(Trainer("127.0.0.1:1")) as (_, fleet):
            for replica in await fleet.look():
                with contextlib.suppress(TandemError):
                    found[replica.name] = (await replica.status(timeout_s=5.0)).state
        return found


@pytest.fixture(scope="module")
def fleet() -> Iterator[RealFleet]:
    # Not tmp_path: receivers make Unix sockets below it, and a socket's path has at most 107 bytes.
    with (
        TemporaryDirectory(prefix="chaos-") as folder,
        RedisProcess() as redis,
        Services(redis.url, Path(folder), RUN_ID) as services,
    ):
        yield RealFleet(services, redis)


@pytest.mark.parametrize(
    ("victim", "phase", "harm"),
    [pytest.param(*cell, id=f"{cell[0]}-{pb.RoundPhase.Name(cell[1])[12:].lower()}-{cell[2].name}") for cell in CELLS],
)
async def test_cell(fleet: RealFleet, victim: str, phase: int, harm: signal.Signals) -> None:
    fleet.poison()
    address = fleet.services.address_of("trainer", "trainer")
    trainer = HarmingTrainer(address, fleet, victim, phase, harm)
    living = [name for name in REPLICAS if name != victim]
    if victim in TRAINERS:
        with pytest.raises(TandemError):
            await fleet.publish(trainer)
        await check_without_a_trainer(fleet, phase)
    else:
        result = await fleet.publish(trainer)
        assert {name: result.outcomes[name].name for name in living} == dict.fromkeys(living, "COMMITTED")
        # Who is lost before COMMIT costs the others a round; from PAUSE on nobody needs Redis.
        assert (result.attempts > 1) == (victim in REPLICAS and phase != COMMIT)
    assert trainer.done
    if victim == "redis":
        fleet.bring_back(victim, harm)
    await check_no_mixture(fleet, living)
    if victim != "redis":
        fleet.bring_back(victim, harm)
    fleet.wait_up()
    await heal(fleet)


async def test_a_joiner_is_seeded_and_generates_while_the_trainer_is_frozen(fleet: RealFleet) -> None:
    before = fleet.services.address_of("rollout", "rollout-1")
    fleet.services.kill("rollout-1")
    shutil.rmtree(fleet.services.folder / "rollout-1")
    async with fleet.coordinator(fleet.trainer()) as (sync, members):
        await sync.publish(0)
        assert [replica.name for replica in members.serving()] == ["rollout-0"]
        fleet.services.start_rollout("rollout-1", fleet.config())
        with contextlib.closing(fleet.services.registry) as found:
            await asyncio.to_thread(until, lambda: before not in addresses_of("rollout-1", found), START_S)
            await asyncio.to_thread(until, lambda: addresses_of("rollout-1", found), START_S)
        for name in TRAINERS:
            fleet.send_signal(name, STOP)
        begun_s = time.monotonic()
        seeding = asyncio.create_task(sync.run_seeding())
        try:
            await asyncio.to_thread(until, lambda: len(members.serving()) == len(REPLICAS), START_S, interval_s=0.01)
            served_s = time.monotonic() - begun_s
            (joiner,) = [replica for replica in members.serving() if replica.name == "rollout-1"]
            sampling = Sampling(temperature=1.0, max_new_tokens=1, stop_token_ids=())
            order = Order(policy_version=0, num_completions=1, sampling=sampling)
            rollouts = Rollouts(fleet=FixedFleet([joiner]), max_groups_per_call=1, timeout_s=CALL_S)
            prompts = {"g": Prompt(row=1, token_ids=array("I", [7, 8, 9]), answer="")}
            (group,) = (await rollouts.generate(prompts, order)).groups
            print(f"serves after {served_s:.2f} s, first token after {time.monotonic() - begun_s:.2f} s")
            assert len(group.completions[0].token_ids) == 1
        finally:
            await cancel(seeding)
            for name in TRAINERS:
                fleet.send_signal(name, signal.SIGCONT)
    assert {name: fleet.checksums(name) for name in REPLICAS} == dict.fromkeys(REPLICAS, fleet.truth)
    await heal(fleet)


def addresses_of(name: str, registry: Registry) -> list[str]:
    return [record.address for record in registry.list("rollout") if record.name == name]


async def test_a_restarted_trainer_takes_over_replicas_that_are_ahead(fleet: RealFleet) -> None:
    """Last in this file: versions only grow. A rank that is not rank 0 dies while version 5 is served, 5 again sent."""
    trainer = fleet.trainer()
    await trainer.restore(None, 5)
    await fleet.publish(trainer, 5)
    fleet.poison()
    address = fleet.services.address_of("trainer", "trainer")
    with pytest.raises(TandemError):
        await fleet.publish(HarmingTrainer(address, fleet, "trainer-1", TRANSFER, KILL), 5)
    assert set((await fleet.states()).values()) == {pb.REPLICA_STATE_POISONED}
    fleet.bring_back("trainer-1", KILL)
    fleet.wait_up()
    await wait_answers(fleet)
    with pytest.raises(StaleVersion):
        await fleet.publish(fleet.trainer(), 0)
    result = await fleet.take_over()
    assert result.policy_version == 6
    assert result.outcomes == dict.fromkeys(REPLICAS, ReplicaOutcome.COMMITTED)
    assert {name: fleet.checksums(name) for name in REPLICAS} == dict.fromkeys(REPLICAS, fleet.truth)


async def wait_answers(fleet: RealFleet) -> None:
    """Until the record of the trainer before has run out, and the one that runs now answers."""
    async with asyncio.timeout(START_S):
        while True:
            trainer = fleet.trainer()
            with contextlib.suppress(TandemError):
                await trainer.status(timeout_s=5.0)
                return
            await trainer.close()


async def check_without_a_trainer(fleet: RealFleet, phase: int) -> None:
    """Lost in TRANSFER, it leaves the replicas with some of its bytes, and refusing; before, with what they had."""
    states = await fleet.states()
    untouched = {name for name in REPLICAS if fleet.checksums(name) == fleet.poisoned[name]}
    assert all(fleet.checksums(name) != fleet.truth for name in REPLICAS)
    if phase == TRANSFER:
        assert states == dict.fromkeys(REPLICAS, pb.REPLICA_STATE_POISONED)
        assert "rollout-0" not in untouched
    else:
        assert pb.REPLICA_STATE_POISONED not in states.values()
        assert untouched == set(REPLICAS)


async def check_no_mixture(fleet: RealFleet, living: list[str]) -> None:
    """A replica that serves holds the new weights, or what it had before."""
    states: dict[str, int] = {}
    async with asyncio.timeout(START_S):
        while not set(living) <= set(states):
            states = await fleet.states()
    for name in living:
        if states[name] == pb.REPLICA_STATE_SERVING:
            assert fleet.checksums(name) in (fleet.truth, fleet.poisoned[name])


async def heal(fleet: RealFleet) -> None:
    """One publication makes the fleet whole again, once everybody is back."""
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(TandemError):  # a predecessor's record or lease may not have run out yet
                result = await fleet.publish(fleet.trainer())
                if [name for name, each in result.outcomes.items() if each is ReplicaOutcome.COMMITTED] == list(
                    REPLICAS
                ):
                    break
    assert {name: fleet.checksums(name) for name in REPLICAS} == dict.fromkeys(REPLICAS, fleet.truth)
