"""Ten times what a service serves, offered for a minute: bounded memory, early refusals, and no restart afterwards."""

import asyncio
import itertools
import json
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from servicekit.errors import Overloaded, from_rpc_error
from servicekit.rpc.arrays import packed
from servicekit.rpc.channel import open_channel
from tandem_api.environment.v1 import environment_pb2, environment_pb2_grpc
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from tests.unit.trainer.batches import message

TIMES, DEADLINE_S = 10, 30.0
# Clients of the first look at what a service serves: as many as a run's own streams, or calls.
CLIENTS, LOOK_S = 32, 4.0
# Beyond what it takes when the load has just begun: arenas of the allocator, buffers of connections.
MOST_MIB = 48
# What an asyncio client may hear that still writes to a call that has ended: https://github.com/grpc/grpc/issues/36066
UNHEARD, MOST_UNHEARD = "Internal: Internal error from Core", 0.1
# What a client of the page sees that needs a second to write its request while others wait.
CLOSED = "closed"
ROW = json.dumps({"text": "x" * 2**14})
numbers = itertools.count()


@dataclass
class Service:
    """A service of which a call is offered, and what must be answered meanwhile.

    Attributes:
        call: a call that works; raises Overloaded.
        control: what the run itself must be able to ask, whatever is offered.
    """

    call: Callable[[], Awaitable[Any]]
    control: Callable[[], Awaitable[Any]]


def rollout(channel: Any) -> Service:
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)
    sampling = rollout_pb2.SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4)
    prompt = packed("prompt_ids_u32", [1] * 60)

    async def call() -> None:
        stream = stub.Generate(timeout=DEADLINE_S)
        try:
            await stream.write(rollout_pb2.GenerateRequest(sampling=sampling))
            groups = [rollout_pb2.PromptGroup(group_id="g", prompt_ids_u32=prompt, num_completions=1)]
            await stream.write(rollout_pb2.GenerateRequest(groups=groups, min_policy_version=1))
            while isinstance(reply := await stream.read(), rollout_pb2.GenerateResponse):
                if reply.groups:
                    return
        except asyncio.InvalidStateError:  # it has ended: reading says why
            await stream.read()
        finally:
            stream.cancel()

    async def control() -> None:
        await stub.GetStatus(rollout_pb2.GetStatusRequest(), timeout=5)
        pause = rollout_pb2.PauseGenerationRequest(mode=weights_pb2.PAUSE_MODE_KEEP_KV)
        await stub.PauseGeneration(pause, timeout=5)
        await stub.ResumeGeneration(rollout_pb2.ResumeGenerationRequest(), timeout=5)

    return Service(call, control)


def trainer(channel: Any) -> Service:
    stub = trainer_pb2_grpc.TrainerServiceStub(channel)

    async def call() -> None:
        head = trainer_pb2.TrainStepHeader(step_id=f"s{next(numbers)}", num_updates=1, num_samples=2)
        requests = [trainer_pb2.TrainStepRequest(header=head), trainer_pb2.TrainStepRequest(chunk=message())]
        await stub.TrainStep(iter(requests), timeout=DEADLINE_S)

    async def control() -> None:
        await stub.GetStatus(trainer_pb2.GetStatusRequest(), timeout=5)

    return Service(call, control)


def environment(channel: Any) -> Service:
    stub = environment_pb2_grpc.EnvironmentServiceStub(channel)

    async def call() -> None:
        name = f"e{next(numbers)}"
        request = environment_pb2.ResetRequest(episode=name, owner="t", row_json=ROW, seed=1, lifetime_s=60)
        await stub.Reset(request, timeout=DEADLINE_S)
        await stub.Close(environment_pb2.CloseRequest(episode=name), timeout=DEADLINE_S)

    async def control() -> None:
        await stub.Describe(environment_pb2.DescribeRequest(), timeout=5)

    return Service(call, control)


def page(address: str) -> Service:
    host, _, port = address.rpartition(":")

    async def call() -> None:
        async with asyncio.timeout(DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            try:
                writer.write(f"GET /run.json HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
                head = (await reader.read()).partition(b"\r\n\r\n")[0]
            finally:
                writer.close()
        if b" 503 " in head:
            assert b"\r\nRetry-After: 1" in head
            raise Overloaded("503")
        if not head:
            raise ConnectionAbortedError
        assert b" 200 " in head

    return Service(call, lambda: asyncio.sleep(0))


KINDS: dict[str, Callable[[Any], Service]] = {"rollout": rollout, "trainer": trainer, "environment": environment}


@dataclass
class Load:
    """What came of the calls."""

    service: Service
    outcomes: Counter[str] = field(default_factory=Counter)
    under_way: set[asyncio.Task[None]] = field(default_factory=set)

    async def one(self) -> None:
        try:
            await self.service.call()
            self.outcomes["served"] += 1
        except Overloaded:
            self.outcomes["refused"] += 1
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            is_busy = isinstance(failure, Overloaded)
            assert not is_busy or failure.after_s > 0
            self.outcomes["refused" if is_busy else f"{type(failure).__name__}: {str(failure)[:80]}"] += 1
        except ConnectionError:
            self.outcomes[CLOSED] += 1

    async def closed(self, clients: int, seconds: float) -> float:
        """Calls of so many clients, each after the other. Returns: served ones a second."""
        end_s, before = time.monotonic() + seconds, self.outcomes["served"]

        async def client() -> None:
            while time.monotonic() < end_s:
                await self.one()

        await asyncio.gather(*(client() for _ in range(clients)))
        return (self.outcomes["served"] - before) / seconds

    async def offer(self, rate: float, seconds: float, watch: Callable[[], None]) -> None:
        """Calls at a rate, whatever becomes of them."""
        begun_s, offered = time.monotonic(), 0
        while (passed_s := time.monotonic() - begun_s) < seconds:
            while offered < rate * passed_s:
                task = asyncio.create_task(self.one())
                self.under_way.add(task)
                task.add_done_callback(self.under_way.discard)
                offered += 1
            self.outcomes["offered"] = offered
            watch()
            await asyncio.sleep(0.02)


async def overload(name: str, address: str, process: psutil.Process, seconds: float) -> dict[str, Any]:
    """Offer a service ten times of what it serves. Returns: figures."""
    channel = open_channel(address)
    service = page(address) if name == "page" else KINDS[name](channel)
    served_s = await Load(service).closed(CLIENTS, LOOK_S)
    rss: list[tuple[float, float]] = []
    begun_s = time.monotonic()

    def watch() -> None:
        now_s = time.monotonic() - begun_s
        if not rss or now_s - rss[-1][0] > 0.5:
            rss.append((now_s, process.memory_info().rss / 2**20))

    async def controlled() -> float:
        """Returns: the slowest of the run's own calls."""
        slowest_s = 0.0
        while time.monotonic() - begun_s < seconds:
            before_s = time.monotonic()
            await service.control()
            slowest_s = max(slowest_s, time.monotonic() - before_s)
            await asyncio.sleep(0.5)
        return slowest_s

    load, before = Load(service), process.memory_info().rss / 2**20
    control = asyncio.create_task(controlled())
    await load.offer(TIMES * served_s, seconds, watch)
    slowest_s = await control
    ended_s = time.monotonic()
    await asyncio.gather(*load.under_way)
    while True:  # as soon as what was there has ended it serves again
        again = Load(service)
        await again.one()
        if again.outcomes["served"]:
            break
        assert time.monotonic() - ended_s < DEADLINE_S
    recovered_s = time.monotonic() - ended_s
    after_s = await Load(service).closed(CLIENTS, LOOK_S)
    await channel.close()
    early = max(mib for at_s, mib in rss if at_s <= seconds / 4)
    return {
        "service": name,
        "served_s": round(served_s, 1),
        "offered": load.outcomes["offered"],
        "offered_s": round(load.outcomes["offered"] / seconds, 1),
        "served_meanwhile_s": round(load.outcomes["served"] / seconds, 1),
        "refused_s": round(load.outcomes["refused"] / seconds, 1),
        "others": {kind: n for kind, n in load.outcomes.items() if kind not in ("offered", "served", "refused")},
        "slowest_control_s": round(slowest_s, 2),
        "recovered_s": round(recovered_s, 2),
        "served_afterwards_s": round(after_s, 1),
        "rss_mib": [
            round(one) for one in (before, early, max(mib for _, mib in rss), process.memory_info().rss / 2**20)
        ],
    }


def check(found: dict[str, Any], figures: Path) -> None:
    with figures.open("a", encoding="utf-8") as file:
        file.write(json.dumps(found) + "\n")
    unheard = found["others"].pop(UNHEARD, 0) + found["others"].pop(CLOSED, 0)
    assert not found["others"]
    assert unheard <= MOST_UNHEARD * found["offered"]
    assert found["refused_s"] > found["served_meanwhile_s"] > found["served_s"] / 10
    assert found["served_afterwards_s"] > found["served_s"] / 2
    assert found["slowest_control_s"] < 5
    _, early, most, _ = found["rss_mib"]
    assert most < early + MOST_MIB


async def tried(name: str, spawn: Any, folder: Path, seconds: float) -> dict[str, Any]:
    process = spawn("tests.fakes.busy_target", name, str(folder), stdout=subprocess.PIPE)
    while not (line := await asyncio.to_thread(process.stdout.readline)).startswith("127."):
        assert line, "it has ended"
    drained = asyncio.create_task(asyncio.to_thread(process.stdout.read))
    try:
        return await overload(name, line.strip(), psutil.Process(process.pid), seconds)
    finally:
        process.terminate()
        await drained


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("name", ["rollout", "trainer", "environment", "page"])
async def test_ten_times_the_load_for_a_minute(
    name: str, spawn: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = await tried(name, spawn, tmp_path, seconds=60.0)
    print(found)
    check(found, tmp_path_factory.getbasetemp() / "overload.jsonl")


async def test_ten_times_the_load_for_some_seconds(
    spawn: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    found = await tried("rollout", spawn, tmp_path, seconds=6.0)
    print(found)
    check(found, tmp_path_factory.getbasetemp() / "overload.jsonl")
