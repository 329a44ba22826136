"""Redis over TLS with client certificates and the ACL user: a real server, where one that can do it is installed.

The bundled one cannot.
"""

import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from servicekit.errors import ConfigError, TandemError
from servicekit.redis.acl import USER, acl_file
from servicekit.redis.client import connect, with_tls_files
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from servicekit.security.certificates import TlsFiles
from tests.kit.certificates import DAY, Authority, write_files
from tests.kit.processes import free_port
from weightsync.membership.rendezvous import Rendezvous

# Names another binary than those on PATH.
BINARY_VARIABLE = "TANDEM_TEST_TLS_REDIS"


@cache
def find_binary() -> Path | None:
    """A redis-server or valkey-server with TLS compiled in; None if there is none."""
    names = (
        os.environ.get(BINARY_VARIABLE),
        shutil.which("redis-server"),
        shutil.which("valkey-server"),
        "/usr/bin/redis-server",
    )
    return next((Path(name) for name in names if name and Path(name).is_file() and _knows_tls(name)), None)


def _knows_tls(binary: str) -> bool:
    """A server without TLS takes tls-port for a mistake; one with it complains of the next word."""
    command = [binary, "--port", "0", "--tls-port", "0", "--no-such-directive", "1"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return "no-such-directive" in said.stdout + said.stderr


class TlsRedis:
    """Listens on 127.0.0.1, demands client certificates, knows the user of the ACL file."""

    def __init__(self, folder: Path, files: TlsFiles, password: str) -> None:
        binary = find_binary()  # there is one, or the whole file is skipped
        self.port = free_port()
        self.url = f"rediss://{USER}:{password}@127.0.0.1:{self.port}/0"
        folder.mkdir()
        (folder / "users.acl").write_text(acl_file(password))
        options = {
            "port": "0",
            "tls-port": str(self.port),
            "bind": "127.0.0.1",
            "tls-cert-file": str(files.certificate),
            "tls-key-file": str(files.key),
            "tls-ca-cert-file": str(files.authorities),
            "tls-auth-clients": "yes",
            "aclfile": str(folder / "users.acl"),
            "dir": str(folder),
            "save": "",
            "logfile": str(folder / "log"),
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        self._process = subprocess.Popen([str(binary), *words])

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)


pytestmark = pytest.mark.skipif(
    find_binary() is None,
    reason=f"NO REDIS WITH TLS on this machine: install redis-server >= 6 with TLS, or set {BINARY_VARIABLE}",
)

LOCALHOST = ipaddress.ip_address("127.0.0.1")


@pytest.fixture
def server(tmp_path: Path, authority: Authority) -> Iterator[TlsRedis]:
    files = write_files(tmp_path / "server", authority.issue(["redis"], addresses=[LOCALHOST]), authority.pem)
    redis = TlsRedis(tmp_path / "redis", files, "right-one")
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
    with pytest.raises(ConfigError, match=r"certificate that we do not trust.*TANDEM_REDIS_CA"):
        connect(url_with(server.url, client_files, TANDEM_REDIS_CA=str(tmp_path / "other.crt")))


def test_a_server_for_another_name_is_not_believed(
    tmp_path: Path, authority: Authority, client_files: TlsFiles
) -> None:
    files = write_files(tmp_path / "server", authority.issue(["redis"]), authority.pem)
    redis = TlsRedis(tmp_path / "redis", files, "right-one")
    try:
        with pytest.raises(ConfigError, match=r"certificate that we do not trust .*127\.0\.0\.1"):
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
