"""Ranks as forks of their service, on machines without a GPU: both need SGLang, which is imported once.

An import takes 6 s of a core, and 0.6 GiB. A fork waits from before the service's first thread, because one of several
threads could hang. It becomes the process that SGLang has multiprocessing spawn.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing.util
import os
import signal
import socket
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from servicekit.cuda import driver_cuda
from servicekit.lifecycle.children import die_with_parent
from servicekit.lifecycle.exit_codes import EXIT_OK
from servicekit.logs import get_logger

# What a rank imports before it reads anything of its own.
_MODULES = (
    "rollout_service.sglang_engine.dispatch",
    "rollout_service.sglang_engine.receiver",
    "sglang.srt.managers.scheduler",
)
# Read when torch is imported, and pyarrow, which would start a thread.
_VARIABLES = {"TORCHDYNAMO_DISABLE": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_STOPS = (signal.SIGTERM, signal.SIGINT)
_MESSAGE_BYTES = 1 << 17
_MAX_FDS = 16
_HIGH_FD = 200
_waiting: list[tuple[int, socket.socket]] = []  # forks without work, by pid
log = get_logger(__name__)


def fork_ranks(num_ranks: int) -> bool:
    """Import SGLang, and fork this host's ranks; the first call in a service.

    Without effect where there may be a GPU, which no fork could use, and where the import has failed or has started a
    thread: SGLang then spawns new processes. Returns: whether this is a rank, whose work is done.
    """
    if driver_cuda():
        return False
    os.environ |= _VARIABLES
    for number in _STOPS:  # until the service has its own handlers: there is nothing to drain yet
        signal.signal(number, lambda *_: os._exit(EXIT_OK))
    try:
        for module in _MODULES:
            importlib.import_module(module)
    except Exception:  # noqa: BLE001 - the service fails of it when it starts its engine, and says why
        return False
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        log.warning("ranks: not forked, because this process has threads", threads=threads)
        return False
    gc.freeze()  # or a collection would write to each page that a rank shares
    return any(_fork() for _ in range(num_ranks))


def _fork() -> bool:
    """Fork a rank. Returns: in the rank True, after its work."""
    import setproctitle  # of SGLang

    service = os.getpid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        die_with_parent(service)
        ours.close()
        # Until SGLang has another title; a title needs the place where the environment was, so this comes first.
        setproctitle.setproctitle("sglang::rank")
        for number in _STOPS:  # a terminal sends them to the whole group
            signal.signal(number, signal.SIG_IGN)
        _work(theirs)
        return True
    theirs.close()
    _waiting.append((pid, ours))
    return False


@contextlib.contextmanager
def spawning_forks() -> Iterator[None]:
    """Let what multiprocessing spawns meanwhile be a waiting fork, while there is one."""
    spawn = multiprocessing.util.spawnv_passfds

    def give_work(path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        code = next((text for text in map(os.fsdecode, arguments) if "spawn_main" in text), None)
        if code is None or not _waiting:
            return spawn(path, arguments, fds)
        pid, there = _waiting.pop(0)
        with there:
            message = {"code": code, "environment": dict(os.environ), "fds": list(fds)}
            socket.send_fds(there, [json.dumps(message).encode()], fds)
        return pid

    multiprocessing.util.spawnv_passfds = give_work  # type: ignore[assignment]
    try:
        yield
    finally:
        multiprocessing.util.spawnv_passfds = spawn


def _work(there: socket.socket) -> None:
    """Wait for the command of a spawned process, and run it as that process would."""
    with there:
        data, fds, _, _ = socket.recv_fds(there, _MESSAGE_BYTES, _MAX_FDS)
    if not data:  # the service has ended without it
        return
    command = json.loads(data)
    os.environ.clear()
    os.environ.update(command["environment"])
    tempfile.tempdir = None  # as it is before it is first asked for
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH_FD) for fd in fds]
    for fd in fds:
        os.close(fd)
    for source, fd in zip(high, command["fds"], strict=True):
        os.dup2(source, fd)
        os.close(source)
    sys.argv = ["-c", "--multiprocessing-fork"]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(command["code"], main.__dict__)
