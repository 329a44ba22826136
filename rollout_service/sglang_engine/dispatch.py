"""Sends requests to SGLang in few messages, and tells what is new of each completion.

SGLang's own `generate_request` answers a batch when the whole batch is done, or streams every token through a task per
request. This subclass of its TokenizerManager registers the same request states, each with a `_Sample` in the place of
its event. SGLang reports a request when it ends, and every 50 tokens (SGLANG_FORCE_STREAM_INTERVAL): these are parts.
`launch_engine` starts an Engine that has it.
"""

import asyncio
import contextlib
import math
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from rollout_service.engine import (
    LOOKS_PER_PART,
    PART_TOKENS,
    Finish,
    GroupRequest,
    SampledCompletion,
    SamplingSettings,
    Span,
)
from rollout_service.sglang_cpu.forked_ranks import spawning_forks
from rollout_service.sglang_engine.processes import run_rank
from rollout_service.sglang_engine.scheduler.flips import cache_key
from rollout_service.sglang_engine.scheduler.seeds import request_seed
from rollout_service.sglang_engine.scheduler.stops import watch_for

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


# Building a message blocks the event loop for about 0.1 ms per request.
REQUESTS_PER_MESSAGE = 1024


class _Sample:
    """Replaces the asyncio.Event of a request's state: SGLang sets it when the request has ended.

    Attributes:
        rid: the request's id in SGLang.
        version: policy version at its submission.
        num_given: tokens that `TokenStream.news` has yielded.
    """

    __slots__ = ("_ended", "group", "index", "num_given", "prefix", "rid", "state", "version")

    def __init__(
        self,
        group: GroupRequest,
        index: int,
        prefix: Sequence[int],
        *,
        rid: str,
        version: int,
        ended: "Callable[[_Sample], None]",
    ) -> None:
        self.group, self.index, self.prefix = group, index, prefix
        self.rid, self.version, self._ended = rid, version, ended
        self.state: Any = None
        self.num_given = 0

    def set(self) -> None:
        self._ended(self)

    def part(self, version: int, least: int) -> SampledCompletion | None:
        """Return the tokens that were reported since the last part; None: fewer than `least`, or it is the end.

        None also after a change of the policy: SGLang says only at the end where the tokens of a version begin.
        """
        logprobs = self.state.output_token_logprobs_val
        tokens = self.state.output_ids[self.num_given : len(logprobs)]
        if len(tokens) < least or self.state.finished or version != self.version:
            return None
        end = self.num_given + len(tokens)
        return self._take(tokens, logprobs[self.num_given : end], None, [(0, end, version)])

    def rest(self) -> SampledCompletion:
        """Return the tokens since the last part, of one that has ended. Raises: RuntimeError: SGLang refused it."""
        out = self.state.out_list[-1]
        meta = out["meta_info"]
        reason = meta["finish_reason"]
        if reason.get("status_code") is not None:
            raise RuntimeError(f"SGLang refused a request: {reason.get('message', reason)}")
        tokens = out["output_ids"]
        logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())][: len(tokens)]
        if len(logprobs) != len(tokens):
            raise RuntimeError(f"SGLang gave {len(tokens)} tokens with log-probs {logprobs}")
        spans = [(span["start"], span["end"], span["version"]) for span in meta.get("weight_versions") or ()]
        rest = self._take(
            tokens[self.num_given :],
            logprobs[self.num_given :],
            _FINISH[reason["type"]],
            spans or [(0, len(tokens), meta["weight_version"])],
        )
        rest.cached_tokens = meta.get("cached_tokens") or 0
        return rest

    def _take(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float | None],
        finish: Finish | None,
        spans: Sequence[tuple[int, int, int | str]],
    ) -> SampledCompletion:
        first = self.num_given
        self.num_given += len(tokens)
        return SampledCompletion(
            group_id=self.group.group_id,
            index=self.index,
            token_ids=list(tokens),
            # None becomes NaN: the trainer counts such tokens, and knows what they are needed for.
            logprobs=[math.nan if value is None else value for value in logprobs],
            finish=finish,
            spans=[
                Span(start=max(start, first) - first, end=end - first, policy_version=int(version))
                for start, end, version in spans
                if end > first
            ],
        )


class TokenStream:
    """Implements EngineStream.

    Args:
        version: tells the policy version.
        caches: whether prefixes are cached. KV of one version must never serve another: the version is part of the
            cache's key, flushed or not.
    """

    def __init__(
        self, manager: "GroupTokenizerManager", sampling: SamplingSettings, version: Callable[[], int], *, caches: bool
    ) -> None:
        self._manager, self._sampling, self._version, self._caches = manager, sampling, version, caches
        self._prefix = f"{uuid.uuid4().hex}/"
        self._running: dict[str, _Sample] = {}  # by request id
        self._num_requests = 0
        self._ended: list[_Sample] = []
        self._wake = asyncio.Event()

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Send requests; a prompt is repeated per completion, as with n > 1 SGLang first runs each prompt alone."""
        version = self._version()
        samples = [sample for group in groups for sample in self._samples(group, version)]
        async with self._manager.model_update_lock.reader_lock:
            for first in range(0, len(samples), REQUESTS_PER_MESSAGE):
                message = samples[first : first + REQUESTS_PER_MESSAGE]
                self._running |= {sample.rid: sample for sample in message}
                await self._manager.send(message, self._sampling, cache_key(version) if self._caches else None)
                await asyncio.sleep(0)  # other calls are answered between two messages

    def _samples(self, group: GroupRequest, version: int) -> list[_Sample]:
        first, self._num_requests = self._num_requests, self._num_requests + len(group.starts())
        rid = self._rid_of(group.group_id)
        return [
            _Sample(group, index, prefix, rid=f"{rid}{number}", version=version, ended=self._on_end)
            for number, (index, prefix) in enumerate(group.starts().items(), first)
        ]

    def _rid_of(self, group_id: str) -> str:
        """Return what the ids of a group's requests begin with; also of those that are submitted later."""
        return f"{self._prefix}{hash(group_id):x}/"

    def _on_end(self, sample: _Sample) -> None:
        self._ended.append(sample)
        self._wake.set()

    def cancel(self, group_id: str) -> None:
        """Abort a group with one message, because the scheduler searches its whole queue per message.

        SGLang aborts every request whose id begins with that of the message.
        """
        self._abort(self._rid_of(group_id))

    def _abort(self, rid: str) -> None:
        states = [sample.state for sample in self._running.values() if sample.rid.startswith(rid)]
        running = [state for state in states if state is not None and state.dispatched]
        if running:
            self._manager.abort_prefix(rid)
            for state in running:
                state.abort_sent = True

    async def news(self, every_s: float | None = None) -> AsyncIterator[list[SampledCompletion]]:
        """Yield what has ended; every so often the parts of what runs."""
        clock = asyncio.get_running_loop().time
        due_s = None if every_s is None else clock() + every_s
        looks = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await self._wake.wait()
            self._wake.clear()
            ended, self._ended = self._ended, []
            for sample in ended:
                del self._running[sample.rid]
            news = [sample.rest() for sample in ended]
            is_due = every_s is not None and due_s is not None and clock() >= due_s
            if every_s is not None and is_due:
                due_s = clock() + every_s
                looks += 1
                news += self._parts(PART_TOKENS if looks % LOOKS_PER_PART else 1)
            if news or is_due:
                yield news

    def _parts(self, least: int) -> list[SampledCompletion]:
        version = self._version()
        parts = (sample.part(version, least) for sample in self._running.values() if sample.state is not None)
        return [part for part in parts if part is not None]

    def close(self) -> None:
        """Abort what has been sent, drop the others."""
        self._abort(self._prefix)
        running, self._running = self._running, {}
        self._manager.release({rid: sample.state for rid, sample in running.items() if sample.state is not None})


class GroupTokenizerManager(TokenizerManager):
    """TokenizerManager for a TokenStream."""

    async def send(self, samples: Sequence[_Sample], sampling: SamplingSettings, cache_key: str | None) -> None:
        """Send a request for each sample, which gets the request's state."""
        request = _batch_request(samples, sampling, cache_key)
        request.normalize_batch_and_arguments()
        self._init_req_state(request)
        for sample in samples:
            sample.state = self.rid_to_state[sample.rid]
            sample.state.event = sample
        tokenized = await self._batch_tokenize_and_process(request.batch_size, request)
        for one, sample in zip(tokenized, samples, strict=True):
            seed = sample.group.seed
            one.sampling_params.sampling_seed = None if seed is None else request_seed(seed, sample.index)
            watch_for(one.sampling_params, sampling.stop)
        await self._send_batch_request(tokenized)

    def abort_prefix(self, rid: str) -> None:
        """Abort every request whose id begins so."""
        self._dispatch_to_scheduler(AbortReq(rid=rid))

    def release(self, states: Mapping[str, Any]) -> None:
        """Forget requests that nothing waits for any more."""
        self._release_req_states_on_failure(states)


def _batch_request(samples: Sequence[_Sample], sampling: SamplingSettings, cache_key: str | None) -> GenerateReqInput:
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    return GenerateReqInput(
        rid=[sample.rid for sample in samples],
        input_ids=[[*one.group.prompts.get(one.index, one.group.prompt_ids), *one.prefix] for one in samples],
        sampling_params=[{**params, "max_new_tokens": sampling.max_new_tokens - len(one.prefix)} for one in samples],
        return_logprob=True,
        extra_key=cache_key,
    )


def _init_group_manager(server_args: Any, port_args: Any) -> Any:
    return init_tokenizer_manager(server_args, port_args, GroupTokenizerManager)


class TokenEngine(Engine):
    """An Engine that works on token ids only: with our TokenizerManager, and without detokenizer."""

    init_tokenizer_manager_func = staticmethod(_init_group_manager)
    run_scheduler_process_func = staticmethod(run_rank)

    @classmethod
    def _launch_scheduler_processes(cls, *args: Any, **kwargs: Any) -> Any:
        with spawning_forks():
            return super()._launch_scheduler_processes(*args, **kwargs)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        # With skip_tokenizer_init the schedulers answer the TokenizerManager directly: the detokenizer would be
        # an unused process of 600 MiB and seconds of imports.
        return [], []


def launch_engine(arguments: dict[str, Any]) -> TokenEngine:
    """Start the processes and wait until they can generate. Raises: RuntimeError: a rank did not start."""
    return TokenEngine(**arguments)
