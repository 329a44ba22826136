"""An SGLang engine inside the service's event loop; implements the Protocol of `rollout_service.engine`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

from rollout_service.engine import (
    EngineLimits,
    EngineLoad,
    EngineStream,
    GroupRequest,
    SamplingSettings,
)
from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine.host import SglangProcesses
from rollout_service.sglang_engine.options import tokenizer_folder, warm_up_sampling
from rollout_service.sglang_engine.scheduler.stops import TOKENIZER_FILE
from tandem_config.schema import RunConfig

# A control call takes milliseconds; an engine that is silent for longer is lost.
CONTROL_S = 30.0
# Kernels compile in it, those of sampling with top-p for a minute or two on a slow machine.
WARM_UP_S = 600.0


class SglangEngine:
    """Implements RolloutEngine.

    With several hosts this is the first one: SGLang's rank 0 forwards its commands to the ranks of the others.

    Args:
        on_terminate: called at SIGTERM.
        share: ranks of this host; None: all ranks are on it.
    """

    def __init__(
        self,
        config: RunConfig,
        name: str,
        *,
        redis_url: str,
        group: str,
        host: str,
        run_dir: Path,
        on_terminate: Callable[[], None],
        share: HostRanks | None = None,
    ) -> None:
        ranks = HostRanks(tensor_parallel=config.rollout.tensor_parallel) if share is None else share
        self._processes = SglangProcesses(
            config, name, ranks, redis_url=redis_url, group=group, host=host, run_dir=run_dir
        )
        self.rank_addresses = self._processes.rank_addresses
        self._name = name
        self._on_terminate = on_terminate
        self._tokenizer = tokenizer_folder(config) / TOKENIZER_FILE
        self._sampling = warm_up_sampling(config)
        # SGLang's TokenizerManager; benchmarks use it for SGLang's own weight updates.
        self.manager: Any = None
        self._policy_version = 0
        self._cache_prefixes = True

    @property
    def failed(self) -> "asyncio.Future[None]":
        """A future that fails when a rank has died."""
        return self._processes.failed

    def cpu_s(self) -> tuple[float, ...]:
        """Return the seconds of CPU that each rank has used; empty where they compute on GPUs."""
        return self._processes.cpu_s()

    async def start(self) -> None:
        """Start SGLang and warm it up. Raises: RuntimeError: it did not start."""
        await self._processes.start()
        self._cache_prefixes = not self._processes.arguments["disable_radix_cache"]
        self.manager = self._processes.engine.tokenizer_manager
        self.manager.signal_handler_class = self._signal_handlers
        self.manager.auto_create_handle_loop()
        self.limits = self._read_limits()
        await self._warm_up()

    async def _warm_up(self) -> None:
        """Generate, with any weights, so that SGLang loads and compiles now what it would late, or fails now."""
        group = GroupRequest(group_id="warm-up", prompt_ids=[0, 0], num_completions=2)
        try:
            async with asyncio.timeout(WARM_UP_S):
                for sampling in self._sampling:
                    with contextlib.closing(self.open_stream(sampling)) as stream:
                        await stream.submit([group])
                        left = group.num_completions
                        async for news in stream.news():
                            left -= sum(completion.finish is not None for completion in news)
                            if not left:
                                break
        except TimeoutError:
            raise RuntimeError(
                f"SGLang did not answer the first requests of replica {self._name} within {WARM_UP_S:g} s: does it "
                f"still compile (ninja, nvcc) on this machine? The last sampling was {sampling}"
            ) from None

    def _read_limits(self) -> EngineLimits:
        engine = self._processes.engine
        info = engine._scheduler_init_result.scheduler_infos[0]
        return EngineLimits(
            vocab_size=self.manager.model_config.vocab_size,
            longest_request=longest_request(
                self.manager.context_len, info["max_total_num_tokens"], engine.server_args.resolved_dict()["page_size"]
            ),
            kv_tokens=info["max_total_num_tokens"],
            why_no_stop="" if self._tokenizer.is_file() else f"{self._tokenizer} does not exist",
        )

    def open_stream(self, sampling: SamplingSettings) -> EngineStream:
        """Begin a stream of groups."""
        from rollout_service.sglang_engine.dispatch import TokenStream

        return TokenStream(self.manager, sampling, lambda: self._policy_version, caches=self._cache_prefixes)

    def load(self) -> EngineLoad:
        """Read the load: running and waiting requests, KV cache in use, progress."""
        # The scheduler writes a snapshot to shared memory after every prefill, every 15th decode step and when idle. It
        # does not count what it has just prefilled, so it would miss short generations: count what was sent instead.
        ranks = self.manager.load_snapshot_reader.read_all()
        return EngineLoad(
            requests=len(self.manager.rid_to_state),
            waiting_requests=sum(rank.num_waiting_reqs for rank in ranks),
            kv_cache_usage=max((rank.token_usage for rank in ranks), default=0.0),
            # Each decode step takes KV cache, each prefill is counted: a scheduler that works changes the sum.
            progress=sum(rank.num_used_tokens + rank.total_prefill_uncached_tokens for rank in ranks),
        )

    async def freeze(self) -> None:
        """Stop at a token boundary; nothing is sampled until thaw()."""
        await self._pause("in_place")

    async def retract(self) -> None:
        """Drop the KV cache of the requests; they wait for a new prefill."""
        await self._pause("retract")

    async def _pause(self, mode: Literal["in_place", "retract"]) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        await self._control(self.manager.pause_generation(PauseGenerationReqInput(mode=mode)))

    async def thaw(self) -> None:
        """Continue sampling."""
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._control(self.manager.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False)))

    async def abort_running(self) -> None:
        """Abort all running requests, without waiting for their end."""
        self.manager.abort_request(abort_all=True)

    async def begin_update(self) -> None:
        """Open the parameters for writing; no request may be generating."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        call = self.manager.begin_weight_update(BeginWeightUpdateReqInput())
        _require(await self._control(call), "begin_weight_update")

    async def end_update(self) -> None:
        """Let SGLang update what it has derived from the parameters."""
        # No load ran in the session, so SGLang itself derives what it must from the parameters ("P2P/RDMA" protocol).
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        call = self.manager.end_weight_update(EndWeightUpdateReqInput())
        _require(await self._control(call), "end_weight_update")

    async def set_version(self, policy_version: int) -> None:
        """Count tokens from now on to this version."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=str(policy_version), abort_all_requests=False)
        await self._control(self.manager.update_weight_version(request))
        self._policy_version = policy_version

    async def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Drop cached prefixes. Returns: False if requests still hold some after timeout_s."""
        return bool((await self._control(self.manager.flush_cache(timeout_s))).success)

    async def _control(self, call: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(CONTROL_S):
                return await call
        except TimeoutError:
            error = RuntimeError(f"SGLang did not answer a control call of replica {self._name} within {CONTROL_S:g} s")
            self._processes.fail(error)
            raise error from None

    async def shutdown(self) -> None:
        """End SGLang and its processes."""
        await self._processes.shutdown(self._request_shutdown)

    async def _request_shutdown(self) -> None:
        """Ask all ranks to leave; SGLang forwards it to those of other hosts."""
        from sglang.srt.managers.io_struct import ShutdownReq

        if self.manager is not None:
            await asyncio.to_thread(self.manager._subprocess_watchdog.stop)
            self.manager._dispatch_to_scheduler(ShutdownReq())

    def _signal_handlers(self, manager: Any) -> "_SignalHandlers":
        return _SignalHandlers(self._on_terminate, self._processes.fail)


def longest_request(context_tokens: int, cache_tokens: int, page_tokens: int) -> int:
    """Return the most tokens of a request, prompt and completion: the KV cache without the page that is begun.

    >>> longest_request(4096, 1024, 1), longest_request(4096, 1024, 64), longest_request(512, 1024, 64)
    (1023, 960, 512)
    """
    return min(context_tokens, cache_tokens - page_tokens)


class _SignalHandlers:
    """Signal handlers for SGLang's TokenizerManager, instead of its own, which kill this process."""

    def __init__(self, on_terminate: Callable[[], None], on_failure: Callable[[Exception], None]) -> None:
        self._on_terminate = on_terminate
        self._on_failure = on_failure

    def sigterm_handler(self, *args: Any) -> None:
        self._on_terminate()

    def running_phase_sigquit_handler(self, *args: Any) -> None:
        self._on_failure(RuntimeError("an SGLang rank reported a failure; its log says which"))


def _require(result: tuple[bool, str], call: str) -> None:
    success, message = result
    if not success:
        raise RuntimeError(f"SGLang refused {call}: {message}")
