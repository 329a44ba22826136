"""The servers that the rendezvous is tested against: Redis 6.2, which we ship, and 7, which clusters run."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import RedisProcess
from weightsync.group.rendezvous import Rendezvous

GROUP = "tandem:test"
SERVERS = ("redis-server", "valkey-server")


@pytest.fixture(params=["6.2", "7"])
def server(request: pytest.FixtureRequest) -> Iterator[Callable[..., RedisProcess]]:
    """Starts servers of one version: `server(append_only=False)`."""
    binary = None if request.param == "6.2" else _newer_server()
    if request.param == "7" and binary is None:
        pytest.skip(f"NOT TESTED AGAINST REDIS 7: none of {', '.join(SERVERS)} >= 7 is on PATH")
    started: list[RedisProcess] = []

    def start(*, append_only: bool = False) -> RedisProcess:
        process = RedisProcess(binary=binary, append_only=append_only)
        started.append(process)
        process.start()
        return process

    yield start
    for process in started:
        process.close()


@pytest.fixture
def group(server: Callable[..., RedisProcess]) -> Rendezvous:
    """An empty group on a server of its own."""
    return Rendezvous(server().url, GROUP)


def _newer_server() -> Path | None:
    for name in SERVERS:
        path = shutil.which(name)
        if path is None:
            continue
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        found = re.search(r"v=(\d+)", told)
        if found is not None and int(found[1]) >= 7:
            return Path(path)
    return None
