"""Announcing a process: over a killed predecessor, beside a live one, until a stop."""

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

from servicekit.errors import AlreadyExists, ConfigurationSkew
from servicekit.lifecycle.announcing import announce
from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.redis.registry import Registry

DEADLINE_S = 20.0


def record(worker_id: str, address: str = "127.0.0.1:1") -> ServiceRecord:
    return ServiceRecord(role="rollout", name="rollout-0", address=address, worker_id=worker_id)


def lose(registry: Registry) -> None:
    """The registry's process dies: no more heartbeats, no withdrawal."""
    assert registry._lease is not None
    registry._lease.stop()


def no_loss(why: str) -> None:
    raise AssertionError(why)


@pytest.fixture
def registries(redis_server: str) -> Iterator[tuple[Registry, Registry]]:
    owner, successor = Registry(redis_server, "run-1"), Registry(redis_server, "run-1")
    yield owner, successor
    owner.close()
    successor.close()


@pytest.fixture
def address() -> Iterator[str]:
    """Of a process that may be frozen: it takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


async def test_the_name_of_a_process_that_was_killed_is_free_at_once(registries: tuple[Registry, Registry]) -> None:
    owner, successor = registries
    owner.announce(record("w1"), 300)
    lose(owner)
    announced = announce(successor, record("w2"), 300, asyncio.Event(), no_loss)
    assert await asyncio.wait_for(announced, DEADLINE_S)
    assert [each.worker_id for each in successor.list("rollout")] == ["w2"]
    assert not successor.remove_refusing("rollout", "rollout-1")


async def test_the_name_of_a_process_that_may_live_is_waited_for(
    registries: tuple[Registry, Registry], address: str
) -> None:
    owner, successor = registries
    owner.announce(record("w1", address), 300)
    lose(owner)
    with pytest.raises(AlreadyExists, match="held by worker 'w1'"):
        await announce(successor, record("w2"), 0.1, asyncio.Event(), no_loss)
    assert [each.address for each in successor.list("rollout")] == [address]
    owner.announce(record("w1", address), 0.5)
    lose(owner)
    assert await announce(successor, record("w2"), 30, asyncio.Event(), no_loss)


async def test_services_with_another_configuration_get_time_to_go(redis_server: str, address: str) -> None:
    old = Registry(redis_server, "run-1", settings=AgreedSettings({"run.seed": "0"}))
    new = Registry(redis_server, "run-1", settings=AgreedSettings({"run.seed": "7"}))
    trainer = ServiceRecord(role="trainer", name="trainer", address=address, worker_id="w1")
    try:
        old.announce(trainer, 300)
        with pytest.raises(ConfigurationSkew, match=r"than trainer at .*: run\.seed: 7 here, 0 there"):
            await announce(new, record("w2"), 0.1, asyncio.Event(), no_loss)
        announcing = asyncio.create_task(announce(new, record("w2"), 30, asyncio.Event(), no_loss))
        await asyncio.to_thread(old.withdraw)
        assert await asyncio.wait_for(announcing, DEADLINE_S)
    finally:
        old.close()
        new.close()


async def test_a_stop_ends_the_wait(registries: tuple[Registry, Registry], address: str) -> None:
    owner, successor = registries
    owner.announce(record("w1", address), 300)
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.1, stop.set)
    assert not await asyncio.wait_for(announce(successor, record("w2"), 300, stop, no_loss), DEADLINE_S)
    assert [each.worker_id for each in successor.list("rollout")] == ["w1"]


async def test_the_loss_of_the_name_is_said_once(registries: tuple[Registry, Registry]) -> None:
    owner, successor = registries
    lost, heard = list[str](), threading.Event()

    def hear(why: str) -> None:
        lost.append(why)
        heard.set()

    assert await announce(owner, record("w1"), 0.6, asyncio.Event(), hear)
    await announce(successor, record("w2"), 300, asyncio.Event(), no_loss)  # nothing answers at the owner's address
    assert await asyncio.to_thread(heard.wait, DEADLINE_S)
    assert len(lost) == 1
    assert "held by worker 'w2'" in lost[0]
