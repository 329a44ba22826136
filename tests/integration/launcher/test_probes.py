"""Services that are frozen: the launcher kills them, because no process has ended."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from launcher.report import make_console
from launcher.run import starting
from launcher.run.starting import Probes
from launcher.run.supervisor import ProcessSpec, Supervisor
from launcher.view.run_view import RunView
from servicekit.errors import Unavailable
from servicekit.lifecycle.tasks import cancel
from servicekit.redis.registry import Registry
from tests.kit.redis import RedisProcess

pytestmark = pytest.mark.integration

RUN, ENDED_S, FROZEN_S = "probed", 20.0, 1.6
# argv: URL of Redis, role, name. Announced for a second, as long as it lives.
_SERVICE = f"""
import asyncio, sys
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.rpc.server import GrpcServer

async def main():
    url, role, name = sys.argv[1:]
    server, registry = GrpcServer(role), Registry(url, {RUN!r})
    registry.announce(ServiceRecord(role=role, name=name, address=await server.start(), worker_id=name), 1.0)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "PROBE_EVERY_S", 0.1)
    monkeypatch.setattr(starting, "_ANSWER_S", 1.0)


@asynccontextmanager
async def probed(redis_url: str, tmp_path: Path, *services: tuple[str, str]) -> AsyncIterator[Supervisor]:
    """Services of these roles and names, announced and probed."""
    supervisor, registry = Supervisor(), Registry(redis_url, RUN)
    try:
        for role, name in services:
            command = [sys.executable, "-c", _SERVICE, redis_url, role, name]
            await supervisor.start(ProcessSpec(name=name, command=command, log=tmp_path / f"{name}.log", grace_s=0.5))
        for role, name in services:
            await asyncio.to_thread(registry.wait_for, role, [name], ENDED_S)
        probes = asyncio.create_task(Probes(lambda: registry, supervisor, "", RunView(make_console(), 1)).run())
        try:
            yield supervisor
        finally:
            await cancel(probes)
    finally:
        await supervisor.stop()


@pytest.mark.parametrize(("role", "name"), [("coordinator", "coordinator"), ("rollout", "rollout-0")])
async def test_a_frozen_service_is_killed_and_no_other(
    role: str, name: str, redis_process: Callable[..., RedisProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ("rollout", "rollout-1")
    async with probed(redis_process().url, tmp_path, (role, name), other) as supervisor, asyncio.timeout(4 * ENDED_S):
        os.kill(supervisor.pids(name)[0], signal.SIGSTOP)
        ended = await supervisor.wait_any()
        assert (ended.name, ended.code) == (name, 128 + signal.SIGKILL)
        assert len(supervisor.pids("rollout-1")) == 1
    assert f"{name} has not answered for" in capsys.readouterr().out


async def test_one_that_is_frozen_for_a_moment_stays(
    redis_process: Callable[..., RedisProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(starting, "MISSES", {"rollout": 3})
    async with probed(redis_process().url, tmp_path, ("rollout", "rollout-0")) as supervisor:
        (pid,) = supervisor.pids("rollout-0")
        for _ in range(3):  # two probes without an answer each time
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(FROZEN_S)
        assert supervisor.ended() == []


async def test_that_it_cannot_look_is_told_and_ends_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def refused() -> Registry:
        raise Unavailable("no Redis")

    await Probes(refused, Supervisor(), "", RunView(make_console(), 1)).run()
    assert "services that freeze are not noticed any more: no Redis" in capsys.readouterr().out
