"""A Redis server that speaks TLS only, where this machine has one that can; the bundled one cannot."""

import os
import shutil
import socket
import subprocess
from functools import cache
from pathlib import Path

from servicekit.redis.acl import USER, acl_file
from servicekit.security.certificates import TlsFiles

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

    def __init__(self, binary: Path, folder: Path, files: TlsFiles, password: str) -> None:
        self.port = _free_port()
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
