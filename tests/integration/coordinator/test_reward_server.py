"""The example reward server as a process, called as a run calls it: health, reflection, token, restart, drain."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from coordinator.rewards.base import Reward, ScoredText
from coordinator.rewards.registry import build_reward
from reward_service.servicer import FULL_NAME
from servicekit.security.run_token import VARIABLE
from servicekit.security.tls import Identity
from tandem_config.sections.rewards.servers import RemoteReward
from tests.house.repository import REPO
from tests.kit.certificates import Authority, files_of, variables
from tests.kit.processes import free_port

pytestmark = pytest.mark.integration

SERVER = REPO / "examples/reward_server/server.py"
TOKEN = "a-token-of-this-run"
ITEMS = [
    ScoredText(completion=said, answer="#### 12", truncated=False, num_tokens=tokens, sample_id=f"i0.g0.row1#{place}")
    for place, (said, tokens) in enumerate([("3 * 4 = 12", 8), ("It is 13", 8), ("12", 64), ("12.0", 32)])
]
SCORES = [1.0, 0.0, 0.95, 1.0]


class Servers(ExitStack):
    """Starts the example, or another server; what it starts is killed in the end."""

    def __init__(self, folder: Path, *command: str) -> None:
        super().__init__()
        self.folder = folder
        self.command = command or (str(SERVER),)

    def start(self, port: int, **variables: str) -> "subprocess.Popen[bytes]":
        environ = os.environ | {"TANDEM_GRPC_PORT": str(port)} | variables
        with (self.folder / f"log-{port}").open("ab") as log:
            process = self.enter_context(subprocess.Popen([sys.executable, *self.command], env=environ, stderr=log))
        self.callback(process.kill)
        return process


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with Servers(tmp_path) as started:
        yield started


@pytest.fixture
async def remote() -> AsyncIterator[Any]:
    """`reward = remote(port, identity, **settings)`, not started."""
    async with AsyncExitStack() as stack:

        def make(port: int, identity: Identity | None = None, **settings: Any) -> Reward:
            settings = {"address": f"127.0.0.1:{port}", "batch_size": 2} | settings
            section = RemoteReward(kind="remote", **settings)
            reward = build_reward(section, max_new_tokens=8, identity=identity)
            stack.push_async_callback(reward.close)
            return reward

        yield make


@pytest.mark.runs("python examples/reward_server/server.py")
async def test_a_run_waits_for_the_server_and_gets_its_scores(servers: Servers, remote: Any) -> None:
    reward = remote(port := free_port())
    starting = asyncio.create_task(reward.start(["prompt"]))
    process = servers.start(port)
    await starting
    scores = await reward.score(ITEMS)
    assert scores.values == pytest.approx(SCORES)
    assert scores.parts.values["right"] == [1.0, 0.0, 1.0, 1.0]
    assert scores.parts.values["short"] == [1.0, 1.0, 0.5, 1.0]
    assert await services(port) >= {FULL_NAME, "grpc.health.v1.Health"}
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 30) == 0


async def services(port: int) -> set[str]:
    """What the server's reflection lists."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        replies = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([request]))
        async for reply in replies:
            return {service.name for service in reply.list_services_response.service}
    return set()


async def test_a_restart_costs_a_pause_and_no_score(servers: Servers, remote: Any) -> None:
    first = servers.start(port := free_port())
    reward = remote(port, retries=20)
    await reward.start([])
    first.kill()
    await asyncio.to_thread(first.wait, 30)
    scoring = asyncio.create_task(reward.score(ITEMS))
    servers.start(port)
    assert (await scoring).values == pytest.approx(SCORES)


async def test_a_server_that_stays_away_fails_the_first_calls_in_time_and_the_rest_immediately(
    servers: Servers, remote: Any
) -> None:
    process = servers.start(port := free_port())
    reward = remote(port, retries=1, open_after=2, concurrency=1, open_s=0.2, max_error_share=1.0)
    await reward.start([])
    process.kill()
    await asyncio.to_thread(process.wait, 30)
    scores = await reward.score(ITEMS * 2)
    assert [("tried 2 times" in scores.errors[place]) for place in range(8)] == [True] * 4 + [False] * 4
    assert f"not sent, because the last 2 calls of 127.0.0.1:{port} failed" in scores.errors[7]
    servers.start(port)
    async with asyncio.timeout(60):
        while (await reward.score(ITEMS[:1])).errors:  # noqa: ASYNC110 - the call is what lets it close
            await asyncio.sleep(0.05)


async def test_a_server_with_the_runs_token_refuses_others(
    servers: Servers, remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.start(port := free_port(), **{VARIABLE: TOKEN})
    monkeypatch.setenv(VARIABLE, TOKEN)
    await remote(port).start([])
    with pytest.raises(ValueError, match=r"Unauthenticated: .*without the run's token"):
        await remote(port, security="none").start([])


async def test_mutual_tls_needs_a_certificate_of_the_role_reward(servers: Servers, remote: Any, tmp_path: Path) -> None:
    authority = Authority("test authority")
    files = {role: files_of(tmp_path, authority, role) for role in ("reward", "coordinator", "trainer")}
    port, other = free_port(), free_port()
    servers.start(port, **variables(files["reward"]))
    identity = Identity(files["coordinator"], "coordinator")
    reward = remote(port, identity)
    await reward.start([])
    assert (await reward.score(ITEMS)).values == pytest.approx(SCORES)
    refused = servers.start(other, **variables(files["trainer"]))
    assert await asyncio.to_thread(refused.wait, 60) == 2
    line = json.loads((tmp_path / f"log-{other}").read_text().splitlines()[-1])
    assert "reward.tandem" in line["error"]
