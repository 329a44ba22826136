"""A run's token opens its services; whoever does not have it can ask for their health only."""

from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, Unauthenticated, rpc_errors
from servicekit.rpc.channel import open_channel
from servicekit.security.run_token import METADATA_KEY, VARIABLE
from tandem_files.run_folder import make_token, read_token
from tests.unit.servicekit.echo_service import KINDS, EchoClient, OpenClient, ServeEcho

TOKEN = "0123456789abcdef" * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", ["", "x", TOKEN[:-1], TOKEN.upper()])
async def test_a_call_without_the_runs_token_is_refused(
    serve_echo: ServeEcho, monkeypatch: pytest.MonkeyPatch, kind: str, token: str
) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    _, _, address = await serve_echo()
    async with open_channel(address, token=token) as channel:
        with pytest.raises(Unauthenticated, match="without the run's token"), rpc_errors():
            await getattr(EchoClient(channel), kind)(b"x")
    async with grpc.aio.insecure_channel(address) as bare:
        with pytest.raises(Unauthenticated), rpc_errors():
            await getattr(EchoClient(bare), kind)(b"x")


@pytest.mark.parametrize("kind", KINDS)
async def test_services_of_a_run_carry_it_by_themselves(
    serve_echo: ServeEcho, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    _, _, address = await serve_echo()
    assert await getattr(open_client(address), kind)(b"x")


async def test_health_needs_no_token(serve_echo: ServeEcho, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    server, _, address = await serve_echo()
    server.set_ready(True)
    async with grpc.aio.insecure_channel(address) as bare:
        reply = await health_pb2_grpc.HealthStub(bare).Check(health_pb2.HealthCheckRequest(service="readiness"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_without_a_token_anybody_may_call(
    serve_echo: ServeEcho, open_client: OpenClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    _, _, address = await serve_echo()
    assert await open_client(address).unary(b"x") == b"x"


async def test_a_token_that_is_not_text_is_none(serve_echo: ServeEcho, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    _, _, address = await serve_echo()
    async with grpc.aio.insecure_channel(address) as bare:
        call = bare.unary_unary("/tandem_test.v1.EchoService/Unary")
        with pytest.raises(Unauthenticated), rpc_errors():
            await call(b"x", timeout=10, metadata=[(f"{METADATA_KEY}-bin", TOKEN.encode())])


def test_only_its_owner_can_read_a_launchs_token(tmp_path: Path) -> None:
    first = make_token(tmp_path)
    assert (tmp_path / ".token").stat().st_mode & 0o777 == 0o600
    assert read_token(tmp_path) == first
    assert len(first) == 64
    assert make_token(tmp_path) != first


def test_without_a_launcher_the_token_is_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert read_token(tmp_path) == TOKEN


def test_a_short_token_is_refused_and_not_shown(tmp_path: Path) -> None:
    given = {"REDIS_URL": "redis://r", "TANDEM_RUN_ID": "t", "TANDEM_RUN_DIR": str(tmp_path), VARIABLE: "hunter2"}
    with pytest.raises(ConfigError, match=VARIABLE) as refused:
        ServiceEnvironment.from_env(given)
    assert "hunter2" not in str(refused.value)
