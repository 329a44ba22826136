"""Services of tests as forks of a process, the zygote, that has imported their engines: seconds for each process.

As a module, this is a zygote. Arguments: the number of its socket, then the modules that it imports.
"""

import importlib
import json
import multiprocessing.connection
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import setproctitle

_MESSAGE_BYTES = 1 << 17
_HIGH_FD = 200
ANSWER_S = 480.0  # the first answer comes after the imports


class ForkedProcess:
    """What tests use of subprocess.Popen, for a child of a zygote."""

    def __init__(self, zygote: "Zygote", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._zygote.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Returns: the exit code. Raises: subprocess.TimeoutExpired."""
        if self.poll() is None:
            with os.fdopen(os.pidfd_open(self.pid)) as file:  # readable once it has ended
                # select.select would refuse a file number above 1023.
                multiprocessing.connection.wait([file.fileno()], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class Zygote:
    """A process that has imported modules, and ends with this one.

    Args:
        modules: what it imports.
        variables: environment variables that they read when they are imported.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.kit.forked", str(theirs.fileno()), *modules],
                env={**os.environ, **variables},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    @property
    def returncode(self) -> int | None:
        """How it has ended; None: it has not."""
        return self._process.poll()

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        """Send a request. Returns: its answer. Raises: RuntimeError: the zygote has ended; TimeoutError."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer = self._socket.recv(_MESSAGE_BYTES)
        if not answer:
            raise RuntimeError(f"the zygote has ended: {self._process.wait()}")
        return json.loads(answer)

    def start(self, module: Sequence[str], environment: Mapping[str, str], log: int) -> ForkedProcess:
        """Run `python -m module` in a session of its own.

        Args:
            module: its name and its arguments.
            environment: all of it.
            log: file number of its output.
        """
        request = {"module": list(module), "environment": dict(environment)}
        return ForkedProcess(self, self.ask(request, [log]))


def _serve(control: socket.socket) -> tuple[dict[str, Any], int] | None:
    """Fork for each request. Returns: in a child, its request and its log; in the zygote None, at its end."""
    codes = dict[int, int]()  # of children that have ended: several threads may ask
    while True:
        data, fds, _, _ = socket.recv_fds(control, _MESSAGE_BYTES, 1)
        if not data:
            return None
        request = json.loads(data)
        if "poll" in request:
            if request["poll"] not in codes:
                pid, status = os.waitpid(request["poll"], os.WNOHANG)
                codes |= {pid: os.waitstatus_to_exitcode(status)} if pid else {}
            answer = codes.get(request["poll"])
        else:
            answer = os.fork()
            if answer == 0:
                control.close()
                return request, fds[0]
            os.close(fds[0])
            codes.pop(answer, None)  # of a process that had its number before
        control.send(json.dumps(answer).encode())


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as it is before it is first asked for


def _become_service(request: dict[str, Any], log: int) -> None:
    """Be what was asked for."""
    os.setsid()
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    _set_environment(request["environment"])
    name, *arguments = request["module"]
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def main() -> None:
    """Be a zygote; in each fork, what was asked for."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for module in sys.argv[2:]:
        importlib.import_module(module)
    setproctitle.getproctitle()  # it finds its place before the environment, which is then replaced
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        raise RuntimeError(f"{sys.argv[2:]} start threads, of which a fork would have none")
    work = _serve(control)
    if work is not None:
        _become_service(*work)


if __name__ == "__main__":
    main()
