"""Mutual TLS on real sockets: who gets in, and what happens when certificates change."""

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from servicekit import errors
from servicekit.errors import rpc_errors
from servicekit.metrics import TLS_EXPIRY
from servicekit.rpc.channel import open_channel
from servicekit.rpc.server import GrpcServer
from servicekit.security.certificates import role_name
from servicekit.security.tls import Identity, operator_identity
from tests.kit.certificates import DAY, Authority, files_of, utc_now, variables, write_files
from tests.unit.servicekit.echo_service import KINDS, SERVICE, Echo, EchoClient, OpenClient, ServeEcho, add_echo

# What the fixtures below give.
MakeIdentity = Callable[..., Identity]
Serve = Callable[..., Awaitable[tuple[str, Echo]]]
Connect = Callable[..., EchoClient]


class Clock:
    """Seconds and the date, moved by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.days = 0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime.datetime:
        return utc_now() + self.days * DAY

    def pass_a_second(self) -> None:
        self.seconds += 1.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def identity(tmp_path: Path, authority: Authority, clock: Clock) -> MakeIdentity:
    """`identity("trainer")`, with files of its own, by default of the one authority."""

    def make(
        role: str, *, issuer: Authority = authority, believes: Authority = authority, names: list[str] | None = None
    ) -> Identity:
        pair = issuer.issue([role_name(role)] if names is None else names)
        files = write_files(tmp_path / f"{role}-{issuer.subject.rfc4514_string()}", pair, believes.pem)
        return Identity(files, role, clock=clock, now=clock.now)

    return make


@pytest.fixture
async def serve(identity: MakeIdentity) -> AsyncIterator[Serve]:
    """`address, servicer = await serve()`: a trainer with TLS."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(own: Identity | None = None, **options: Any) -> tuple[str, Echo]:
            server, servicer = GrpcServer("echo", identity=own or identity("trainer"), **options), Echo()
            server.add(add_echo, servicer, SERVICE)
            address = await server.start()
            stack.push_async_callback(server.drain, 0)
            return address, servicer

        yield start


@pytest.fixture
async def client() -> AsyncIterator[Connect]:
    """`client(address, identity, peer="trainer")`: closed after the test."""
    async with contextlib.AsyncExitStack() as stack:

        def connect(address: str, own: Identity, peer: str = "trainer") -> EchoClient:
            channel = open_channel(address, identity=own, peer=peer)
            stack.push_async_callback(channel.close)
            return EchoClient(channel)

        yield connect


@pytest.mark.parametrize("role", ["coordinator", "operator"])
@pytest.mark.parametrize("kind", KINDS)
async def test_those_who_may_are_answered_at_an_ip_address(
    serve: Serve, identity: MakeIdentity, client: Connect, role: str, kind: str
) -> None:
    address, _ = await serve()
    assert await getattr(client(address, identity(role)), kind)(b"b")


@pytest.mark.parametrize("kind", KINDS)
async def test_other_roles_are_refused_by_name(
    serve: Serve, identity: MakeIdentity, client: Connect, kind: str
) -> None:
    address, _ = await serve()
    message = rf"/{SERVICE}/.* by rollout\.tandem; certificates for coordinator\.tandem or operator\.tandem"
    with pytest.raises(errors.PermissionDenied, match=message), rpc_errors():
        await getattr(client(address, identity("rollout")), kind)(b"b")


async def test_a_caller_without_a_certificate_does_not_get_in(serve: Serve, authority: Authority) -> None:
    address, _ = await serve()
    bare = grpc.ssl_channel_credentials(authority.pem)
    options = [("grpc.ssl_target_name_override", "trainer.tandem")]
    async with grpc.aio.secure_channel(address, bare, options=options) as channel:
        with pytest.raises(errors.Unavailable), rpc_errors():
            await EchoClient(channel).unary(b"b")


async def test_a_plain_caller_does_not_get_in(serve: Serve, open_client: OpenClient) -> None:
    address, servicer = await serve()
    with pytest.raises(errors.Unavailable), rpc_errors():
        await open_client(address).unary(b"wait")
    assert not servicer.entered.is_set()


async def test_a_caller_of_another_authority_does_not_get_in(
    serve: Serve, identity: MakeIdentity, client: Connect, authority: Authority
) -> None:
    address, _ = await serve()
    stranger = identity("coordinator", issuer=(other := Authority("theirs")), believes=other)
    stranger._material = type(stranger._material)(**{**vars(stranger._material), "authorities": authority.pem})
    with pytest.raises(errors.Unavailable), rpc_errors():
        await client(address, stranger).unary(b"b")


async def test_a_server_of_another_authority_is_not_believed(
    serve: Serve, identity: MakeIdentity, client: Connect
) -> None:
    other = Authority("theirs")
    address, _ = await serve(identity("trainer", issuer=other, believes=other))
    with pytest.raises(errors.Unavailable, match=r"trusted authority.*TANDEM_TLS_CA"), rpc_errors():
        await client(address, identity("coordinator")).unary(b"b")


async def test_a_server_of_another_role_is_not_believed(serve: Serve, identity: MakeIdentity, client: Connect) -> None:
    address, _ = await serve(identity("rollout"))
    with pytest.raises(errors.Unavailable, match="certificate is for another name"), rpc_errors():
        await client(address, identity("coordinator"), peer="trainer").unary(b"b")


async def test_a_server_with_an_expired_certificate_says_so_and_is_not_believed(
    serve: Serve, identity: MakeIdentity, client: Connect, clock: Clock, tmp_path: Path, authority: Authority
) -> None:
    files = write_files(
        tmp_path / "short", authority.issue(["trainer.tandem"], begins=-3 * DAY, ends=-DAY), authority.pem
    )
    clock.days = -2
    own = Identity(files, "trainer", clock=clock, now=clock.now)
    address, _ = await serve(own)
    clock.days, clock.seconds = 0, 1.0
    caller = client(address, identity("coordinator"))
    with capture_logs() as lines:
        for _ in range(2):
            with pytest.raises(errors.Unavailable, match=r"certificate has expired.*clock"), rpc_errors():
                await caller.unary(b"b")
    told = [line for line in lines if line["log_level"] == "error"]
    assert [line["event"] for line in told] == ["certificate expired, peers refuse it"]
    assert (told[0]["subject"], str(files.certificate) in told[0]["file"]) == ("CN=trainer.tandem", True)


async def test_a_plain_server_is_named_to_a_caller_with_tls(
    serve_echo: ServeEcho, identity: MakeIdentity, client: Connect
) -> None:
    _, _, address = await serve_echo()
    with pytest.raises(errors.Unavailable, match="speaks no TLS"), rpc_errors():
        await client(address, identity("coordinator")).unary(b"b")


async def test_new_certificates_of_a_new_authority_are_taken_over_without_a_restart(
    tmp_path: Path, authority: Authority, clock: Clock, serve: Serve, client: Connect
) -> None:
    folders = {role: tmp_path / role for role in ("trainer", "coordinator")}
    own = {role: Identity(files_of(tmp_path, authority, role), role, clock=clock) for role in folders}
    address, servicer = await serve(own["trainer"])
    caller = client(address, own["coordinator"])
    running = asyncio.create_task(caller.unary(b"wait"))
    await servicer.entered.wait()

    following = Authority("following")
    for role, folder in folders.items():
        write_files(folder, following.issue([role_name(role)]), following.pem)
    clock.pass_a_second()

    with capture_logs() as lines:
        assert await caller.unary(b"new connection, new certificates") == b"new connection, new certificates"
    # The server looks at its files in a handshake: the caller has not gone on with the old connection.
    changed = {line["subject"] for line in lines if line["event"] == "certificate changed"}
    assert changed == {"CN=coordinator.tandem", "CN=trainer.tandem"}
    assert own["trainer"].material().authorities == following.pem
    stale = client(address, Identity(files_of(tmp_path, authority, "operator"), "operator", clock=clock))
    with pytest.raises(errors.Unavailable), rpc_errors():  # who still has the old ones is not believed any more
        await stale.unary(b"b")
    servicer.gate.set()
    assert await running == b"wait"  # what ran on the old connection has gone on


async def test_wrong_new_files_are_refused_and_the_old_ones_stay(
    tmp_path: Path, authority: Authority, clock: Clock, serve: Serve, client: Connect
) -> None:
    files = files_of(tmp_path, authority, "coordinator")
    own = Identity(files, "coordinator", clock=clock)
    address, _ = await serve()
    before = own.material()
    write_files(tmp_path / "coordinator", authority.issue(["rollout.tandem"]), authority.pem)
    clock.pass_a_second()
    with capture_logs() as lines:
        assert own.material() is before
        clock.pass_a_second()
        assert own.material() is before
    assert [line["event"] for line in lines] == ["new certificate refused, the old one stays in use"]
    assert "is for rollout.tandem, not for coordinator.tandem" in lines[0]["error"]
    files.key.unlink()
    clock.pass_a_second()
    assert own.material() is before
    assert await client(address, own).unary(b"b") == b"b"
    write_files(tmp_path / "coordinator", authority.issue(["coordinator.tandem"]), authority.pem)
    clock.pass_a_second()
    assert own.material() is not before


async def test_files_are_looked_at_once_a_second(tmp_path: Path, authority: Authority, clock: Clock) -> None:
    own = Identity(files_of(tmp_path, authority, "trainer"), "trainer", clock=clock)
    before = own.material()
    files_of(tmp_path, authority, "trainer")
    assert own.material() is before
    clock.pass_a_second()
    assert own.material() is not before


async def test_the_metric_tells_when_the_certificate_expires(identity: MakeIdentity) -> None:
    own = identity("trainer")
    assert next(iter(TLS_EXPIRY.collect())).samples[0].value == own.material().expires.timestamp()


async def test_probes_reach_health_and_nothing_else_without_tls(identity: MakeIdentity, authority: Authority) -> None:
    server = GrpcServer("echo", identity=identity("trainer"), health_bind="127.0.0.1:0")
    server.add(add_echo, Echo(), SERVICE)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(server.health_address) as probe:
            stub = health_pb2_grpc.HealthStub(probe)
            for ready, service, expected in (
                (False, "liveness", health_pb2.HealthCheckResponse.SERVING),
                (False, "readiness", health_pb2.HealthCheckResponse.NOT_SERVING),
                (True, "readiness", health_pb2.HealthCheckResponse.SERVING),
            ):
                server.set_ready(ready)
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status == expected
            with pytest.raises(errors.Internal, match="UNIMPLEMENTED"), rpc_errors():
                await EchoClient(probe).unary(b"b")
    finally:
        await server.drain(0)


async def test_unix_sockets_stay_plain(
    serve: Serve, tmp_path: Path, identity: MakeIdentity, client: Connect, open_client: OpenClient
) -> None:
    address, _ = await serve(bind=f"unix:{tmp_path}/s")
    assert await open_client(address).unary(b"b") == b"b"
    assert await client(address, identity("rollout")).unary(b"b") == b"b"


def test_tls_without_the_role_of_the_peer_is_our_bug(identity: MakeIdentity) -> None:
    with pytest.raises(ValueError, match="without the role of the peer"):
        open_channel("127.0.0.1:1", identity=identity("coordinator"))


def test_a_persons_command_is_the_operator(tmp_path: Path, authority: Authority) -> None:
    assert operator_identity({}) is None
    files = files_of(tmp_path, authority, "operator")
    own = operator_identity(variables(files))
    assert own is not None
    assert own.material().subject == "CN=operator.tandem"
    with pytest.raises(
        errors.ConfigError, match=r"CN=trainer\.tandem is for trainer\.tandem, not for operator\.tandem"
    ):
        operator_identity(variables(files_of(tmp_path, authority, "trainer")))
