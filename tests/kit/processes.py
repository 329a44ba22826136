"""Real service processes for tests: started as the launcher starts them, logs in files, ended by pid."""

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Self

import psutil

from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig
from tests.kit.forked import ForkedProcess, Zygote
from tests.kit.waiting import until

START_S = 480.0  # engines import for 10 to 20 s on two idle cores; 240 s were seen on busy, slow ones
END_S = 60.0
FREE_PORTS = (20_000, 32_768)
CHILDREN_END_S = 10.0  # after the process that started them
# What services import before they read anything of their own, by the package whose name their module has.
IMPORTS = {
    "trainer_service": ("trainer_service.worker", "trainer_service.megatron_engine.engine"),
    "rollout_service": (
        "rollout_service.app",
        "rollout_service.worker_app",
        "rollout_service.sglang_engine.dispatch",
        "rollout_service.sglang_engine.receiver",
        "sglang.srt.managers.scheduler",
    ),
    "coordinator": ("coordinator.app", "coordinator.fleet.kubernetes.cluster"),
}
ALWAYS = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}  # so that the last line of a log is the service's own
# Read when torch is imported (a replica without a GPU sets it for itself), and pyarrow: a fork has no thread of it.
WHEN_IMPORTED = {"TORCHDYNAMO_DISABLE": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


def free_port() -> int:
    """Find a free port for a program that cannot report one chosen by the system.

    It is below the range from which the system takes ports for others, so that no other process is given it meanwhile.
    """
    while True:
        port = random.SystemRandom().randrange(*FREE_PORTS)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def is_alive(process: psutil.Process | int) -> bool:
    """Whether a process, or that of a pid, has not ended; one that is not waited for yet has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(process) if isinstance(process, int) else process
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def semaphores_of(pids: Iterable[int]) -> list[Path]:
    """Find the files of multiprocessing's semaphores that these processes have mapped.

    By inode: who has made one has it mapped under the name that glibc gave it first, and has removed since.
    """
    inodes = set[str]()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
            inodes |= {line.split()[4] for line in lines if "/dev/shm/sem." in line}
    files = Path("/dev/shm").glob("sem.mp-*")
    return [path for path in files if path.exists() and str(path.stat().st_ino) in inodes]


_preloaded: list[str] = []


_zygotes: dict[str, Zygote] = {}


def zygote(service: str) -> Zygote:
    """Start the process whose forks are a package's services: once, and again if something has ended it."""
    known = _zygotes.get(service)
    if known is None or known.returncode is not None:
        if known is not None:
            warnings.warn(f"the zygote of {service} had ended, with {known.returncode}", stacklevel=2)
        _zygotes[service] = Zygote(IMPORTS[service], ALWAYS | WHEN_IMPORTED)
    return _zygotes[service]


def start_coordinator(arguments: Sequence[str], variables: Mapping[str, str], log: int) -> ForkedProcess:
    """Start `python -m coordinator`, as a fork of a process that has imported it, which takes 2 s of a core.

    Args:
        variables: on top of ours; log: file number of its output.
    """
    return zygote("coordinator").start(["coordinator", *arguments], {**os.environ, **variables}, log)


def fork_server(*modules: str) -> ForkServerContext:
    """Make a context that forks processes from one that has imported these modules, and those of other callers."""
    context = multiprocessing.get_context("forkserver")
    _preloaded.extend(modules)
    context.set_forkserver_preload(_preloaded)
    return context


@dataclass
class Services:
    """Service processes of one run, for a `with` block; `variables` are set for all of them.

    They are forks of a process that has imported their engines; what the launcher starts in tests/e2e is not.
    """

    redis_url: str
    folder: Path
    run_id: str
    variables: Mapping[str, str] = field(default_factory=dict)
    processes: dict[str, "subprocess.Popen[bytes] | ForkedProcess"] = field(default_factory=dict)

    @property
    def registry(self) -> Registry:
        """A new connection to the run's registry; the caller closes it."""
        return Registry(self.redis_url, self.run_id)

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self.folder / "run"

    def start_rollout(self, name: str, config: RunConfig, module: str = "rollout_service") -> None:
        """Start a replica; its temporary files, receiver sockets included, go to a folder of its own.

        Args:
            module: what runs it: the service, or a module that changes something and then runs the service.
        """
        scratch = self.folder / name
        scratch.mkdir(exist_ok=True)
        self.start(name, [module, "--name", name], config, {"TMPDIR": str(scratch)}, service="rollout_service")

    def start_trainer(self, config: RunConfig, *arguments: str, module: str = "trainer_service") -> list[str]:
        """Start every rank. Returns: the processes' names.

        Args:
            module: see start_rollout().
        """
        world = config.trainer.world_size
        for rank in range(world):
            env = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            self.start(f"trainer-{rank}", [module, *arguments], config, env, service="trainer_service")
        return [f"trainer-{rank}" for rank in range(world)]

    def start(
        self,
        name: str,
        module: Sequence[str],
        config: RunConfig,
        variables: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
        service: str | None = None,
    ) -> None:
        """Start `python -m module`.

        Args:
            module: its name and its arguments.
            variables: environment variables on top of the run's.
            within: a command that runs the command after it.
            service: key of IMPORTS: the process is a fork of one that has imported these; None: it is a new one.
        """
        path = self.folder / f"{name}.yaml"
        path.write_text(dump_resolved(config), encoding="utf-8")
        self.run_dir.mkdir(exist_ok=True)
        common = {
            "REDIS_URL": self.redis_url,
            "TANDEM_RUN_ID": self.run_id,
            "TANDEM_RUN_DIR": str(self.run_dir),
            "TANDEM_BIND_HOST": "127.0.0.1",
            "TANDEM_TEST_HOOKS": "1",
            **ALWAYS,
        }
        environment = {**os.environ, **common, **self.variables, **(variables or {})}
        command = [module[0], "--config", str(path), *module[1:]]
        with self.log(name).open("ab") as log:
            if service is not None and not within:
                self.processes[name] = zygote(service).start(command, environment, log.fileno())
                return
            self.processes[name] = subprocess.Popen(
                [*within, sys.executable, "-m", *command],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.folder / f"{name}.log"

    def sockets_of(self, replica: str) -> list[str]:
        """Return the gRPC addresses of a replica's receivers, in rank order."""
        return [f"unix:{path}" for path in sorted((self.folder / replica).glob("**/rank*.sock"))]

    def record_of(self, role: str, name: str) -> ServiceRecord:
        """Wait until the service is announced. Raises: RuntimeError, with its log: a process has ended instead."""
        registry = self.registry
        found: list[ServiceRecord] = []

        def announced() -> bool:
            found.extend(record for record in registry.list(role) if record.name == name)
            of_service = [process for key, process in self.processes.items() if key.startswith(name)]
            if not found and any(process.poll() is not None for process in of_service):
                raise RuntimeError(f"{name} has ended:\n{self.tail(name)}")
            return bool(found)

        try:
            until(announced, START_S, f"{name} announced", interval_s=0.05)
        except AssertionError as error:
            raise RuntimeError(f"{error}\n{self.tail(name)}") from error
        finally:
            registry.close()
        return found[0]

    def address_of(self, role: str, name: str) -> str:
        """Wait until the service is announced. Returns: its address. Raises: see record_of()."""
        return self.record_of(role, name).address

    def tail(self, name: str) -> str:
        """Read the end of the logs of this service's processes."""
        logs = sorted(self.folder.glob(f"{name}*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-20_000:]}" for path in logs)

    def family(self, name: str) -> list[psutil.Process]:
        """Return a process's children, and theirs."""
        children: list[psutil.Process] = psutil.Process(self.processes[name].pid).children(recursive=True)
        return children

    def stop(self, names: Sequence[str]) -> list[int]:
        """Send SIGTERM. Returns: the exit codes."""
        for name in names:
            self.processes[name].send_signal(signal.SIGTERM)
        return self.exit_codes(names)

    def exit_codes(self, names: Sequence[str]) -> list[int]:
        """Wait for the processes to end. Returns: their exit codes."""
        codes = [self.processes[name].wait(timeout=END_S) for name in names]
        for name in names:
            del self.processes[name]
        return codes

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a service and all that it has started, as when its pod or its host is lost.

        Nothing if it has ended: its number may be another process's by now. With SIGKILL multiprocessing's resource
        tracker dies too, so what it would have removed is removed here.
        """
        process, left = self.processes[name], list[Path]()
        if process.poll() is not None:
            return
        if number == signal.SIGKILL:
            left = semaphores_of([process.pid, *(child.pid for child in self.family(name))])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        for path in left:
            path.unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        """Send SIGKILL to a service and all that it has started, and wait for its end."""
        self.send_signal(name, signal.SIGKILL)
        self.processes.pop(name).wait(timeout=30)

    def close(self, patience_s: float = 0.0) -> None:
        """End the remaining processes; with patience, SIGTERM comes first, so that they remove temporary files.

        What they have started ends with them. It is not killed beside them: one of those processes, multiprocessing's
        resource tracker, removes what the others have left in /dev/shm.
        """
        started = [
            child for name, process in self.processes.items() if process.poll() is None for child in self.family(name)
        ]
        for process in self.processes.values() if patience_s else ():
            process.terminate()
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience_s)
            process.kill()
            process.wait(timeout=30)
        self.processes.clear()
        for child in psutil.wait_procs(started, timeout=CHILDREN_END_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
