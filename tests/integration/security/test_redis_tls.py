"""Redis over TLS with client certificates and the ACL user: a real server, where one that can do it is installed."""

import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest

from servicekit.errors import ConfigError, TandemError
from servicekit.redis.client import connect, with_tls_files
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.security.certificates import TlsFiles
from tests.integration.security.tls_redis import BINARY_VARIABLE, TlsRedis, find_binary
from tests.kit.certificates import DAY, Authority, write_files
from weightsync.group.rendezvous import Rendezvous

pytestmark = pytest.mark.skipif(
    find_binary() is None,
    reason=f"NO REDIS WITH TLS on this machine: install redis-server >= 6 with TLS, or set {BINARY_VARIABLE}",
)

LOCALHOST = ipaddress.ip_address("127.0.0.1")


def binary() -> Path:
    found = find_binary()
    assert found is not None  # or the whole file is skipped
    return found


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[TlsRedis]:
    files = write_files(tmp_path / "server", authority.issue(["redis"], addresses=[LOCALHOST]), authority.pem)
    redis = TlsRedis(binary(), tmp_path / "redis", files, "right-one")
    yield redis
    redis.close()


@pytest.fixture
def client_files(tmp_path: Path, authority: Authority) -> TlsFiles:
    return write_files(tmp_path / "client", authority.issue(["trainer.tandem"]), authority.pem)


def url_with(url: str, files: TlsFiles, **without: str) -> str:
    given = {
        "TANDEM_REDIS_CA": str(files.authorities),
        "TANDEM_REDIS_CERT": str(files.certificate),
        "TANDEM_REDIS_KEY": str(files.key),
    }
    return with_tls_files(url, given | without)


def test_registry_and_weight_groups_work_over_tls_with_the_least_rights(
    server: TlsRedis, client_files: TlsFiles
) -> None:
    url = url_with(server.url, client_files)
    registry = Registry(url, "demo", wait_s=20)
    registry.announce(ServiceRecord(role="rollout", name="rollout-0", address="h:1", worker_id="w"), 60)
    assert [record.name for record in registry.list("rollout")] == ["rollout-0"]
    registry.close()
    group = Rendezvous(url, "tandem:demo")
    group.join("trainer/0", "a", 60)
    assert group.snapshot().members == {"trainer/0": "a"}


def test_a_client_certificate_is_demanded(server: TlsRedis, client_files: TlsFiles) -> None:
    connect(url_with(server.url, client_files), wait_s=20).close()
    # TLS 1.3 tells a client after its handshake: as an alert, or as an end that may as well be an outage.
    with pytest.raises(TandemError, match=r"refuses the TLS handshake.*TANDEM_REDIS_CERT") as caught:
        connect(url_with(server.url, client_files, TANDEM_REDIS_CERT="", TANDEM_REDIS_KEY=""))
    assert "right-one" not in str(caught.value)


def test_a_server_of_another_authority_is_not_believed(
    server: TlsRedis, client_files: TlsFiles, tmp_path: Path
) -> None:
    connect(url_with(server.url, client_files), wait_s=20).close()
    (tmp_path / "other.crt").write_bytes(Authority("theirs").pem)
    with pytest.raises(ConfigError, match=r"certificate that is not believed.*TANDEM_REDIS_CA"):
        connect(url_with(server.url, client_files, TANDEM_REDIS_CA=str(tmp_path / "other.crt")))


def test_a_server_for_another_name_is_not_believed(
    tmp_path: Path, authority: Authority, client_files: TlsFiles
) -> None:
    files = write_files(tmp_path / "server", authority.issue(["redis"]), authority.pem)
    redis = TlsRedis(binary(), tmp_path / "redis", files, "right-one")
    try:
        with pytest.raises(ConfigError, match=r"certificate that is not believed .*127\.0\.0\.1"):
            connect(url_with(redis.url, client_files), wait_s=20)
    finally:
        redis.close()


def test_a_file_that_is_not_there_is_named(server: TlsRedis, client_files: TlsFiles, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TANDEM_REDIS_CA=/nowhere/ca\.crt cannot be read"):
        connect(url_with(server.url, client_files, TANDEM_REDIS_CA="/nowhere/ca.crt"), wait_s=20)


def test_new_files_are_used_by_new_connections(
    server: TlsRedis, client_files: TlsFiles, authority: Authority, tmp_path: Path
) -> None:
    client = connect(url_with(server.url, client_files), wait_s=20)
    write_files(tmp_path / "client", authority.issue(["trainer.tandem"], begins=-2 * DAY, ends=-DAY), authority.pem)
    assert client.ping()  # the connection that is there goes on
    client.connection_pool.disconnect()
    with pytest.raises(Exception, match=r"(?i)ssl|closed|reset"):
        client.ping()
    write_files(tmp_path / "client", authority.issue(["trainer.tandem"]), authority.pem)
    assert client.ping()
