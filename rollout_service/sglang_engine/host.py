"""SGLang's processes on one host, from start to end: those of a whole engine, or of one of its hosts."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil

from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine.kernels import refuse_environment
from rollout_service.sglang_engine.options import (
    engine_arguments,
    engine_environment,
    model_arguments,
    tokenizer_folder,
)
from rollout_service.sglang_engine.processes import ChildWatch
from rollout_service.sglang_engine.rank_errors import explain
from rollout_service.sglang_engine.receiver import ReceiverSettings
from servicekit.cuda import WITHOUT_COMPILERS, Compilers, compilers_here
from servicekit.errors import ConfigError
from servicekit.lifecycle.garbage import collect_from_now_on
from servicekit.lifecycle.temporary import OwnedFolder, remove_orphans, shared_memory_of
from servicekit.logs import get_logger
from tandem_config.schema import RunConfig
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec

log = get_logger(__name__)

LEAVE_S = 5.0
_PREFIX = "tdm"
# Tandem's entry point for SGLang (pyproject.toml), and why it may not have run where it is installed.
_PLUGINS, _PLUGIN = "sglang.srt.plugins", "tandem_weights"
_NO_PLUGIN = "SGLang's ranks run without Tandem's hooks, and would take no weights"
# Prefixes of files in /dev/shm: the load of SGLang's ranks, which it does not remove; and the queues (25 MB each)
# between the ranks of an engine, which killed processes do not remove.
_SHARED = ("sglang_loads_", "sgl_shm_")


class SglangProcesses:
    """Implements EngineProcesses.

    Args:
        group: weight group in which the ranks take their slots.
        host: address at which the ranks are reached.
        run_dir: parent of the folder of published weights, unless sync.disk_folder is set.

    Attributes:
        engine: of SGLang, once started.
        arguments: with which it was started.
    """

    def __init__(
        self, config: RunConfig, name: str, share: HostRanks, *, redis_url: str, group: str, host: str, run_dir: Path
    ) -> None:
        self.engine: Any = None
        self.arguments: dict[str, Any] = {}
        self._config = config
        self._name = name
        self._share = share
        self._host = host
        remove_orphans(_PREFIX)
        self._owned = OwnedFolder(_PREFIX)
        self._folder = self._owned.path  # short: a Unix socket's path has at most 107 bytes
        self._receiver = ReceiverSettings(
            dir=str(self._folder),
            replica=name,
            model=str(config.model.path),
            tokenizer=str(tokenizer_folder(config)),
            redis_url=redis_url,
            group=group,
            host=host,
            disk_folder=str(config.sync.published_folder(run_dir)),
            lease_ttl_s=config.sync.lease_ttl_s,
        )
        self.rank_addresses = [self._receiver.address(rank) for rank in share.ranks]
        # The kernel ends a rank when the *thread* that started it ends (PR_SET_PDEATHSIG): this one lives as long as
        # the process, and the event loop stays free while SGLang starts.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sglang-start")
        self._start_job: Future[None] | None = None
        self._stopping = False
        self._watch: ChildWatch | None = None

    async def start(self) -> None:
        """Start SGLang's processes on this host and watch them. Raises: RuntimeError: one did not start."""
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = loop.create_future()
        loop.add_signal_handler(signal.SIGQUIT, log.error, "sglang rank reported a failure")
        self._start_job = self._starter.submit(self._start_blocking)
        await asyncio.wrap_future(self._start_job)
        self._watch = ChildWatch(self.engine.get_all_child_pids(), self._rank_died)
        collect_from_now_on()

    def _start_blocking(self) -> None:
        import torch

        spec = _read_model(self._config)
        refuse_environment(os.environ)
        if _PLUGIN not in entry_points(group=_PLUGINS).names:
            why = "Tandem is on the path, but not installed in this environment: `pip install --no-deps -e .`"
            raise ConfigError(f"{_NO_PLUGIN}: {why}")
        cuda = torch.cuda.is_available()
        if cuda:
            _require_compilers(compilers_here())
        os.environ.update(engine_environment(self._config, self._share, self._host, self._folder, cuda))
        os.environ.update(self._receiver.to_env())
        # SGLang does not remove the files of its message queues; in this folder they are removed with it.
        tempfile.tempdir = str(self._folder)
        self.arguments = engine_arguments(self._config, self._name, self._share, cuda) | model_arguments(spec)
        with _own_logging():
            from rollout_service.sglang_engine.dispatch import launch_engine  # imports SGLang: seconds

            if not self._stopping:
                try:
                    self.engine = launch_engine(self.arguments)
                except RuntimeError as error:
                    raise explain(self._folder, error) from error
                if not all(Path(address.removeprefix("unix:")).is_socket() for address in self.rank_addresses):
                    why = (
                        f"entry point {_PLUGIN} did not load (SGLANG_PLUGINS, SGLANG_PLATFORM, or its own error above)"
                    )
                    raise ConfigError(f"{_NO_PLUGIN}: {why}")
                pids = [os.getpid(), *self.engine.get_all_child_pids()]
                self._owned.note(shared_memory_of(pids, *_SHARED))

    def cpu_s(self) -> tuple[float, ...]:
        """Return the seconds of CPU that each rank has used, on GPUs nothing: a hung kernel is waited for busily."""
        if self.arguments.get("device") != "cpu" or self._share.nodes > 1:
            return ()
        return tuple(_cpu_s(pid) for pid in self.engine.get_all_child_pids())

    def fail(self, error: Exception) -> None:
        """Mark the engine as failed: it can no longer serve."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _rank_died(self, pid: int, how: str) -> None:
        self.fail(RuntimeError(f"SGLang process {pid} of replica {self._name} died ({how})"))

    async def shutdown(self, ask_to_leave: Callable[[], Awaitable[None]] | None = None) -> None:
        """End every process.

        Args:
            ask_to_leave: asks the ranks to release their slots; None: another host does so.
        """
        self._stopping = True
        if self._watch is not None:
            self._watch.stop()
        if self.engine is not None and not self.failed.done():
            if ask_to_leave is not None:
                await ask_to_leave()
            # Wait, because ranks that are killed one by one report each other's death.
            await asyncio.to_thread(_join_children, LEAVE_S)
        await asyncio.to_thread(self._end_processes)
        self._starter.shutdown(wait=False)
        self._owned.remove()
        tempfile.tempdir = None

    def _end_processes(self) -> None:
        """End the processes; blocks. A start fails when its ranks have ended, but may start others until then."""
        _kill_children()
        while self._start_job is not None and not wait([self._start_job], timeout=0.1).done:
            _kill_children()
        if self.engine is not None:
            engine, self.engine = self.engine, None
            engine.shutdown()


def _require_compilers(found: Compilers) -> None:
    """Check that SGLang can compile kernels, as RoPE's at every start. Raises: ConfigError: names what is missing."""
    for toolkit in found.ignored:
        log.warning("cuda toolkit: not used", toolkit=toolkit)
    if found.missing:
        raise ConfigError(f"{WITHOUT_COMPILERS}: {', '.join(found.missing)} not found; see requirements/gpu.md")


def _read_model(config: RunConfig) -> ModelSpec:
    """Read the model; check what the ranks would refuse only after they have built it. Raises: ConfigError."""
    spec = ModelSpec.from_folder(config.model.path)
    sizes = Parallel(tensor=config.rollout.tensor_parallel, expert=config.rollout.expert_parallel)
    sglang_layout(spec, sizes)
    return spec


def _cpu_s(pid: int) -> float:
    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:  # ChildWatch reports it
        return 0.0
    return float(used.user + used.system)


def _join_children(timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for child in multiprocessing.active_children():
        child.join(timeout=max(0.0, deadline_s - time.monotonic()))


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
        child.join(timeout=10.0)


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Restore the root logger's handlers, which SGLang replaces."""
    logging.getLogger("sglang").setLevel(logging.WARNING)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
