"""A run on real engines with a network, a disk and a Redis of its own. Harm can be done to all of them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import redis

from tandem_files.ledger.reading import LedgerContent, read_ledger
from tandem_files.metrics_file import MetricsFile

REPO = Path(__file__).parents[2]
EXAMPLE = REPO / "examples" / "arithmetic" / "arithmetic.yaml"
MARK = "TANDEM_CHAOS"
DISK_MIB = 1024
_STARTS_S, _ENDS_S = 300.0, 120.0
LOOK_S = 0.05
# Within so long a sync begins.
HANGS_S = 4.0
# What is done to packets. A fifth of them lost is a delay: TCP sends them again after 0.2 s, 0.6, 1.4, ...
_TARGETS = {
    "cut": ("-j", "DROP"),
    "reset": ("-j", "REJECT", "--reject-with", "tcp-reset"),
    "delay": ("-m", "statistic", "--mode", "random", "--probability", "0.2", "-j", "DROP"),
}


class Arena:
    """A run, `tandem run` of the demo with other settings; a context manager, which leaves nothing.

    Args:
        settings: as of --set.
        runs: the module that runs it: the launcher, or one that takes the same options.
    """

    def __init__(self, name: str, settings: list[str], file: Path = EXAMPLE, runs: str = "launcher run") -> None:
        self.name, self._settings, self._file, self._runs = name, settings, file, runs
        self.folder = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
        self._said = self.folder / "said"
        self._net = f"chaos-{os.getpid()}"
        self._stack = contextlib.ExitStack()
        self.run_dir = self.folder / "disk" / name
        self._redis: subprocess.Popen[bytes] | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self.pids: set[int] = set()  # of those that were looked for

    def __enter__(self) -> "Arena":
        try:
            self._begin()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _begin(self) -> None:
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._said.mkdir()
        disk = self.folder / "disk"
        disk.mkdir()
        _do("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk))
        self._stack.callback(_do, "umount", "--lazy", str(disk))
        _do("ip", "netns", "add", self._net)
        self._stack.callback(_do, "ip", "netns", "delete", self._net)
        _do("ip", "-n", self._net, "link", "set", "lo", "up")
        self.start_redis()
        self._stack.callback(self._end_redis)
        command = [sys.executable, "-m", *self._runs.split(), "-c", str(self._file)]
        for setting in (f"run.name={self.name}", f"run.output_dir={disk}", *self._settings):
            command += ["--set", setting]
        environment = {**os.environ, MARK: str(self._said), "REDIS_URL": f"unix://{self._socket}"}
        environment |= {"PYTHONPATH": str(Path(__file__).parent / "injected"), "OMP_NUM_THREADS": "1"}
        with (self.folder / "launcher.log").open("wb") as log:
            self._launcher = subprocess.Popen(
                self._inside(command), cwd=REPO, env=environment, stdout=log, stderr=subprocess.STDOUT
            )
        self._stack.callback(self._end)

    # ---- what it does ----

    @property
    def output(self) -> str:
        """What the launcher has printed."""
        return (self.folder / "launcher.log").read_text(errors="replace")

    def iteration(self) -> int:
        """The number of finished iterations."""
        return max((int(row["iteration"] or 0) for row in self.rows()), default=0)

    def rows(self) -> list[dict[str, Any]]:
        """The rows of iterations so far."""
        try:
            return list(MetricsFile(self.run_dir / "metrics.jsonl").rows())
        except OSError:
            return []

    def wait_beyond(self, iteration: int, timeout_s: float) -> float:
        """Wait for a later iteration. Returns: seconds. Raises: TimeoutError; RuntimeError: the run has ended."""
        begun_s = time.monotonic()
        while self.iteration() <= iteration:
            if self._launcher is not None and self._launcher.poll() is not None:
                raise RuntimeError(f"the run has ended with {self._launcher.returncode}: {self.output[-3000:]}")
            if time.monotonic() - begun_s > timeout_s:
                raise TimeoutError(f"no iteration after {iteration} within {timeout_s:g} s")
            time.sleep(LOOK_S)
        return time.monotonic() - begun_s

    def start(self) -> None:
        """Wait until the run has begun."""
        self.wait_beyond(1, _STARTS_S)

    def processes(self) -> list[psutil.Process]:
        """All processes of the run, its launcher among them."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self._said):
                    found.append(process)
        return found

    def named(self, victim: str) -> list[psutil.Process]:
        """Return the processes of a kind: coordinator, trainer, rollout, scheduler, reward or environment."""
        processes = self.processes()
        if victim == "scheduler":  # its title has replaced what says whose it is
            processes = [child for process in self.named("rollout") for child in process.children()]
        found = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if "--parent" not in command and _is(victim, command):
                    found.append(process)
        self.pids |= {process.pid for process in found}
        return sorted(found, key=lambda process: process.pid)

    # ---- harm ----

    @contextlib.contextmanager
    def frozen(self, pid: int) -> Iterator[None]:
        """Stop a process and all below it."""
        pids = _below(pid)
        for one in pids:
            _signal(one, signal.SIGSTOP)
        try:
            yield
        finally:
            for one in pids:
                _signal(one, signal.SIGCONT)

    @contextlib.contextmanager
    def cut(self, pid: int, how: str = "cut") -> Iterator[None]:
        """Do what _TARGETS says to the packets of the connections of a process."""
        ports = {own for one in _below(pid) for own, _ in _connections(one)}
        try:
            self._rule(ports, how)
            yield
        finally:
            _do(*self._inside(["iptables", "-w", "-F", "INPUT"]))

    @contextlib.contextmanager
    def cut_in_sync(self, pid: int) -> Iterator[None]:
        """Cut a replica off in the midst of a weight sync: from the trainer first, until a sync hangs there."""
        trainer = {own for process in self.named("trainer") for own, _ in _connections(process.pid)}
        links = {own for one in _below(pid) for own, other in _connections(one) if other in trainer}
        try:
            self._rule(links, "cut")
            passed(HANGS_S)
            with self.cut(pid):
                yield
        finally:
            _do(*self._inside(["iptables", "-w", "-F", "INPUT"]))

    def _rule(self, ports: set[str], how: str) -> None:
        for port in sorted(ports):
            for side in ("--dport", "--sport"):
                _do(*self._inside(["iptables", "-w", "-I", "INPUT", "-p", "tcp", side, port, *_TARGETS[how]]))

    @contextlib.contextmanager
    def full_disk(self) -> Iterator[None]:
        """Take all room of the run's disk."""
        filler = self.folder / "disk" / "filler"
        # A buffer would be written once more, and fail, when the file is closed.
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def saying(self, name: str, value: float) -> Iterator[None]:
        """Let all processes take the clock or the disk as that (injected/sitecustomize.py)."""
        file = self._said / name
        file.write_text(str(value))
        try:
            yield
        finally:
            file.unlink()

    @property
    def _socket(self) -> Path:
        return self.folder / "s"

    def start_redis(self) -> None:
        """Start an empty Redis where the one before was. Raises: RuntimeError: it does not answer."""
        self._redis = subprocess.Popen(
            ["redis-server", "--port", "0", "--unixsocket", str(self._socket), "--save", "", "--dir", str(self.folder)],
            stdout=subprocess.DEVNULL,
        )
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            with contextlib.suppress(redis.RedisError):
                redis.Redis(unix_socket_path=str(self._socket)).ping()
                return
            time.sleep(LOOK_S)
        raise RuntimeError("redis-server does not answer")

    def redis_pid(self) -> int:
        """The server's process."""
        assert self._redis is not None
        return self._redis.pid

    def lose_redis(self) -> None:
        """Kill the server, and start an empty one."""
        self._end_redis()
        self.start_redis()

    def keep_logs(self, folder: Path) -> None:
        """Copy what the run has logged so far, and its rows."""
        for file in [*self.folder.rglob("*.log"), *self.run_dir.glob("*.jsonl")]:
            with contextlib.suppress(OSError):
                kept = folder / file.relative_to(self.folder)
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, kept)

    def keys(self) -> int:
        """The number of keys in Redis."""
        return int(redis.Redis(unix_socket_path=str(self._socket)).dbsize())

    def _end_redis(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()

    # ---- the end ----

    def ledger(self) -> LedgerContent:
        """What the run's ledger says."""
        return read_ledger(self.run_dir)

    def stop(self) -> int:
        """Ask the run to end. Returns: the launcher's exit code."""
        assert self._launcher is not None
        self._launcher.send_signal(signal.SIGINT)
        return self._launcher.wait(_ENDS_S)

    def wait_end(self, timeout_s: float) -> int:
        """Wait for the end of the run. Returns: the launcher's exit code."""
        assert self._launcher is not None
        return self._launcher.wait(timeout_s)

    def _end(self) -> None:
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.kill()
            self._launcher.wait()
        deadline_s = time.monotonic() + 30
        while (left := self.processes()) and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
        for process in left:
            _signal(process.pid, signal.SIGKILL)

    def _inside(self, command: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self._net, *command]

    def sizes(self) -> dict[str, float]:
        """Return memory (MiB), descriptors and threads by kind of process, the most of each, and the keys in Redis."""
        found = {"keys": float(self.keys())}
        for victim in ("coordinator", "trainer", "rollout", "scheduler"):
            with contextlib.suppress(psutil.Error, ValueError):
                processes = self.named(victim)
                found[f"{victim} MiB"] = max(process.memory_info().rss for process in processes) / 2**20
                found[f"{victim} files"] = max(process.num_fds() for process in processes)
                found[f"{victim} threads"] = max(process.num_threads() for process in processes)
        return found

    def state(self) -> dict[str, Any]:
        """The run's state on disk."""
        found: dict[str, Any] = json.loads((self.run_dir / "state.json").read_text())
        return found


def passed(seconds: float) -> None:
    """Let time pass."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        time.sleep(LOOK_S)


def _is(victim: str, command: list[str]) -> bool:
    """Whether a process with this command is of that kind."""
    if victim == "scheduler":
        return "sglang::scheduler" in " ".join(command)
    if victim in ("reward", "environment"):
        return any("coordinator.workers.worker" in word for word in command)
    module = {"trainer": "trainer_service", "rollout": "rollout_service"}.get(victim, victim)
    return "-m" in command and module in command


def _below(pid: int) -> list[int]:
    """Return a process and all below it."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def _connections(pid: int) -> set[tuple[str, str]]:
    """Return the TCP ports of a process, and those at the other ends, by the table of its own network."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(entry.readlink())
            inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    ports = [[str(int(end.rpartition(":")[2], 16)) for end in words[1:3]] for words in lines if words[9] in inodes]
    return {(own, other) for own, other in ports}


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
