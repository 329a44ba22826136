"""One SGLang engine inside the service's event loop: the real thing behind the Protocol of `rollout_service.engine`."""

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from rollout_service.engine import EngineLimits, EngineLoad, FinishedGroup, Group, Sampling
from rollout_service.sglang_engine.options import engine_arguments, engine_environment
from rollout_service.sglang_engine.processes import ChildWatch
from rollout_service.sglang_engine.receiver import ReceiverSettings
from servicekit.logs import get_logger
from tandem_config.schema import RunConfig

_log = get_logger(__name__)

# A control call takes milliseconds; an engine that is silent for longer is lost.
CONTROL_S = 30.0
WARM_UP_S = 120.0
LEAVE_S = 5.0


class SglangEngine:
    """See RolloutEngine. `redis_url` and `group` are where the ranks take their slots; `on_terminate` gets SIGTERM."""

    def __init__(
        self, config: RunConfig, name: str, *, redis_url: str, group: str, host: str, on_terminate: Callable[[], None]
    ) -> None:
        self._config = config
        self._name = name
        self._on_terminate = on_terminate
        self._folder = Path(tempfile.mkdtemp(prefix="tdm"))  # short: a Unix socket's path has at most 107 bytes
        self._receiver = ReceiverSettings(
            dir=str(self._folder),
            replica=name,
            model=str(config.model.path),
            redis_url=redis_url,
            group=group,
            host=host,
            lease_ttl_s=config.sync.lease_ttl_s,
        )
        self.rank_addresses = [self._receiver.address(rank) for rank in range(config.rollout.tensor_parallel)]
        # The kernel ends a rank when the *thread* that started it ends (PR_SET_PDEATHSIG): this one lives as long as
        # the process, and the event loop stays free while SGLang starts.
        self._starter = ThreadPoolExecutor(1, thread_name_prefix="sglang-start")
        self._start_job: Future[None] | None = None
        self._stopping = False
        self._engine: Any = None
        self._manager: Any = None
        self._watch: ChildWatch | None = None
        self._policy_version = 0
        self._cache_prefixes = True

    @property
    def manager(self) -> Any:
        """SGLang's own control plane, for measurements beside ours."""
        return self._manager

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = loop.create_future()
        loop.add_signal_handler(signal.SIGQUIT, _log.error, "a rank reported a failure")
        self._start_job = self._starter.submit(self._start_blocking)
        await asyncio.wrap_future(self._start_job)
        self._manager = self._engine.tokenizer_manager
        self._manager.signal_handler_class = self._signal_handlers
        self._manager.auto_create_handle_loop()
        self._watch = ChildWatch(self._engine.get_all_child_pids(), self._rank_died)
        gc.collect()
        gc.freeze()  # a full collection of what start-up made would stop the loop for 0.3 s
        gc.enable()
        self.limits = self._read_limits()
        await self._warm_up()

    def _start_blocking(self) -> None:
        import torch

        cuda = torch.cuda.is_available()
        os.environ.update(engine_environment(self._config, self._folder, cuda))
        os.environ.update(self._receiver.to_env())
        # SGLang leaves the files of its message queues behind; in our folder they go away with it.
        tempfile.tempdir = str(self._folder)
        arguments = engine_arguments(self._config, self._name, cuda)
        self._cache_prefixes = not arguments["disable_radix_cache"]
        with _own_logging():
            from rollout_service.sglang_engine.launch import launch_engine  # imports SGLang: seconds

            if not self._stopping:
                self._engine = launch_engine(arguments)

    async def _warm_up(self) -> None:
        """One generation, with whatever weights: the first loads what SGLang loads late, and proves that it can."""
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=2, stop_token_ids=())
        async with asyncio.timeout(WARM_UP_S):
            async for _ in self.generate([Group(group_id="warm-up", prompt_ids=[0, 0], num_completions=2)], sampling):
                pass

    def _read_limits(self) -> EngineLimits:
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        return EngineLimits(
            vocab_size=self._manager.model_config.vocab_size,
            # A request may fill the KV cache but for one page (SGLang keeps one token of it).
            longest_request=min(self._manager.context_len, info["max_total_num_tokens"] - 1),
        )

    def generate(self, groups: Sequence[Group], sampling: Sampling) -> AsyncIterator[list[FinishedGroup]]:
        # KV of one version must never serve another: the version is part of the prefix cache's key, flushed or not.
        key = f"v{self._policy_version}" if self._cache_prefixes else None
        generated: AsyncIterator[list[FinishedGroup]] = self._manager.generate_groups(groups, sampling, key)
        return generated

    def load(self) -> EngineLoad:
        # The scheduler writes a snapshot to shared memory after every prefill, every 15th decode step and when idle. It
        # does not count what it has just prefilled, so short generations would never be seen: we count what we sent.
        ranks = self._manager.load_snapshot_reader.read_all()
        return EngineLoad(
            requests=len(self._manager.rid_to_state),
            waiting_requests=sum(rank.num_waiting_reqs for rank in ranks),
            kv_cache_usage=max((rank.token_usage for rank in ranks), default=0.0),
        )

    async def freeze(self) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._control(self._manager.pause_generation(PauseGenerationReqInput(mode="in_place")))

    async def thaw(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._control(self._manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False)))

    async def abort_running(self) -> None:
        self._manager.abort_request(abort_all=True)

    async def begin_update(self) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        call = self._manager.begin_weight_update(BeginWeightUpdateReqInput())
        _require(await self._control(call), "begin_weight_update")

    async def end_update(self) -> None:
        # No load ran in the session, so SGLang itself derives what it must from the parameters ("P2P/RDMA" protocol).
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        call = self._manager.end_weight_update(EndWeightUpdateReqInput())
        _require(await self._control(call), "end_weight_update")

    async def set_version(self, policy_version: int) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=str(policy_version), abort_all_requests=False)
        await self._control(self._manager.update_weight_version(request))
        self._policy_version = policy_version

    async def flush_cache(self, timeout_s: float = 0.0) -> bool:
        return bool((await self._control(self._manager.flush_cache(timeout_s))).success)

    async def _control(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(CONTROL_S):
                return await call
        except TimeoutError:
            error = RuntimeError(f"SGLang did not answer a control call of replica {self._name} within {CONTROL_S:g} s")
            self._fail(error)
            raise error from None

    async def shutdown(self) -> None:
        self._stopping = True
        if self._watch is not None:
            self._watch.stop()
        if self._engine is not None and not self.failed.done():
            await self._let_ranks_leave()
        await asyncio.to_thread(self._end_processes)
        self._starter.shutdown(wait=False)
        shutil.rmtree(self._folder, ignore_errors=True)
        tempfile.tempdir = None

    async def _let_ranks_leave(self) -> None:
        """For up to LEAVE_S: ranks give back their slots; killed one by one they would report each other's death."""
        from sglang.srt.managers.io_struct import ShutdownReq

        await asyncio.to_thread(self._manager._subprocess_watchdog.stop)
        self._manager._dispatch_to_scheduler(ShutdownReq())
        await asyncio.to_thread(_join_children, LEAVE_S)

    def _end_processes(self) -> None:
        """Blocks. A start under way fails as soon as its ranks are gone, but may start further ones until then."""
        _kill_children()
        while self._start_job is not None and not wait([self._start_job], timeout=0.1).done:
            _kill_children()
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.shutdown()

    def _rank_died(self, pid: int) -> None:
        self._fail(RuntimeError(f"SGLang process {pid} of replica {self._name} died"))

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def _signal_handlers(self, manager: Any) -> "_SignalHandlers":
        return _SignalHandlers(self._on_terminate, self._fail)


class _SignalHandlers:
    """What SGLang's TokenizerManager installs on the loop, in place of handlers that end this process by SIGKILL."""

    def __init__(self, on_terminate: Callable[[], None], on_failure: Callable[[Exception], None]) -> None:
        self._on_terminate = on_terminate
        self._on_failure = on_failure

    def sigterm_handler(self, *args: Any) -> None:
        self._on_terminate()

    def running_phase_sigquit_handler(self, *args: Any) -> None:
        self._on_failure(RuntimeError("an SGLang rank reported a failure; its log says which"))


def _join_children(timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    for child in multiprocessing.active_children():
        child.join(timeout=max(0.0, deadline_s - time.monotonic()))


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        child.kill()
        child.join(timeout=10.0)


def _require(result: tuple[bool, str], call: str) -> None:
    success, message = result
    if not success:
        raise RuntimeError(f"SGLang refused {call}: {message}")


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """SGLang replaces the root logger's handlers; put ours back."""
    logging.getLogger("sglang").setLevel(logging.WARNING)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
