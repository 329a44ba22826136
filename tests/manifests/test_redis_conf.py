"""The ConfigMap's redis.conf and the Secret's users.acl, in a real Redis: it starts, and lets the right ones in."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from launcher.run.redis_server import find_server
from servicekit.redis.acl import acl_file
from tests.kit.waiting import until
from tests.manifests.kustomize import DEPLOY, find, overlay

pytestmark = pytest.mark.integration
PASSWORD = "dev-only-password"
START_S = 20.0


def test_the_laptops_users_are_those_of_the_tool() -> None:
    assert (DEPLOY / "overlays" / "dev-cpu" / "users.acl").read_text() == acl_file(PASSWORD)


@pytest.fixture
def socket() -> Iterator[str]:
    """A server with the overlay's files; only paths and the port are ours."""
    # Not tmp_path: a socket's path may have at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="redis-"))
    manifests = overlay("dev-cpu")
    conf = find(manifests, "ConfigMap", "redis-config")["data"]["redis.conf"]
    acl = folder / "users.acl"
    acl.write_text((DEPLOY / "overlays" / "dev-cpu" / "users.acl").read_text())
    (folder / "redis.conf").write_text(
        conf.replace("dir /data", f"dir {folder}").replace("/etc/redis/acl/users.acl", str(acl))
    )
    path = str(folder / "s")
    command = [str(find_server()), str(folder / "redis.conf"), "--port", "0", "--unixsocket", path]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: process.poll() is None and Path(path).exists(), START_S)
        yield path
    finally:
        process.terminate()
        process.wait(timeout=10)
        shutil.rmtree(folder)


def test_a_probe_may_ping_and_nothing_else(socket: str) -> None:
    anybody = redis.Redis(unix_socket_path=socket)
    assert anybody.ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        anybody.get("tandem:x")


def test_the_services_get_in_and_the_log_is_on(socket: str) -> None:
    client = redis.Redis(unix_socket_path=socket, username="tandem", password=PASSWORD)
    assert client.set("tandem:run:value:x", "1")
    with pytest.raises(redis.exceptions.NoPermissionError):
        client.set("other", "1")
    assert list(Path(socket).parent.rglob("appendonly*"))
