"""Sends a call's requests to SGLang in few messages, and yields each group when its last completion has ended.

SGLang's own `generate_request` answers a batch when the whole batch is done, or streams every token through a task per
request. This subclass of its TokenizerManager registers the same request states, with an event that only counts down.
`launch_engine` starts an Engine that has it.
"""

import asyncio
import math
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from sglang.srt.entrypoints.engine import Engine, init_tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from rollout_service.engine import Finish, FinishedGroup, GroupRequest, SampledCompletion, SamplingSettings, Span
from rollout_service.sglang_engine.scheduler.seeds import request_seed
from rollout_service.sglang_engine.scheduler.stops import watch_for

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


# Building a message blocks the event loop for about 0.1 ms per request.
REQUESTS_PER_MESSAGE = 1024


class _Countdown:
    """Replaces the asyncio.Event of each request of a group: SGLang sets it when the request has ended."""

    def __init__(self, group: GroupRequest, whole: "asyncio.Queue[_Countdown]") -> None:
        self.group = group
        self.states: list[Any] = []
        self._left = group.num_completions
        self._whole = whole

    def add(self, state: Any) -> int | None:
        """Add the state of the next completion's request. Returns: its seed."""
        seed = self.group.seed
        self.states.append(state)
        return None if seed is None else request_seed(seed, len(self.states) - 1)

    def set(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._whole.put_nowait(self)

    def finished_group(self) -> FinishedGroup:
        completions = [_completion(state.out_list[-1]) for state in self.states]
        return FinishedGroup(group_id=self.group.group_id, completions=completions)


class GroupTokenizerManager(TokenizerManager):
    """TokenizerManager with `generate_groups`."""

    async def generate_groups(
        self, groups: Sequence[GroupRequest], sampling: SamplingSettings, cache_key: str | None
    ) -> AsyncIterator[list[FinishedGroup]]:
        """Sample groups; see RolloutEngine.generate.

        Args:
            cache_key: prefixes are shared only between requests of the same key.
        """
        self.auto_create_handle_loop()
        whole: asyncio.Queue[_Countdown] = asyncio.Queue()
        prefix = f"{uuid.uuid4().hex}/"
        states: dict[str, Any] = {}
        try:
            async with self.model_update_lock.reader_lock:
                requests = _requests(groups, whole)
                for first in range(0, len(requests), REQUESTS_PER_MESSAGE):
                    message = dict(requests[first : first + REQUESTS_PER_MESSAGE])
                    await self._send(message, sampling, cache_key, prefix, states)
                    await asyncio.sleep(0)  # other calls are answered between two messages
                left = len(groups)
                while left > 0:
                    ready = [await whole.get()]
                    while not whole.empty():
                        ready.append(whole.get_nowait())
                    left -= len(ready)
                    yield [countdown.finished_group() for countdown in ready]
        finally:  # a closed iterator or an error: requests that have been sent are aborted, the others dropped
            self._abort_all(prefix, states)
            self._release_req_states_on_failure(states)

    async def _send(
        self,
        message: "dict[int, _Countdown]",
        sampling: SamplingSettings,
        cache_key: str | None,
        prefix: str,
        states: dict[str, Any],
    ) -> None:
        """Send a request for each countdown, by its number in the call, and add the requests' states to `states`."""
        request = _batch_request(message, sampling, cache_key, prefix)
        request.normalize_batch_and_arguments()
        self._init_req_state(request)
        seeds = []
        for rid, countdown in zip(request.rid, message.values(), strict=True):
            states[rid] = state = self.rid_to_state[rid]
            state.event = countdown
            seeds.append(countdown.add(state))
        tokenized = await self._batch_tokenize_and_process(request.batch_size, request)
        for one, seed in zip(tokenized, seeds, strict=True):
            one.sampling_params.sampling_seed = seed
            watch_for(one.sampling_params, sampling.stop)
        await self._send_batch_request(tokenized)

    def _abort_all(self, prefix: str, states: dict[str, Any]) -> None:
        """Abort all requests of a call with one message, because the scheduler searches its whole queue per message.

        SGLang aborts every request whose id begins with that of the message.
        """
        running = [state for rid, state in states.items() if self.rid_to_state.get(rid) is state and state.dispatched]
        if running:
            self._dispatch_to_scheduler(AbortReq(rid=prefix))
            for state in running:
                state.abort_sent = True


def _requests(groups: Sequence[GroupRequest], whole: "asyncio.Queue[_Countdown]") -> "list[tuple[int, _Countdown]]":
    """Number the requests; a prompt is repeated per completion, as with n > 1 SGLang first runs each prompt alone."""
    countdowns = [_Countdown(group, whole) for group in groups]
    return list(enumerate(one for one in countdowns for _ in range(one.group.num_completions)))


def _batch_request(
    message: "dict[int, _Countdown]", sampling: SamplingSettings, cache_key: str | None, prefix: str
) -> GenerateReqInput:
    return GenerateReqInput(
        rid=[f"{prefix}{number}" for number in message],
        input_ids=[countdown.group.prompt_ids for countdown in message.values()],
        sampling_params={
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
        },
        return_logprob=True,
        extra_key=cache_key,
    )


def _completion(out: dict[str, Any]) -> SampledCompletion:
    meta = out["meta_info"]
    reason = meta["finish_reason"]
    if reason.get("status_code") is not None:
        raise RuntimeError(f"SGLang refused a request: {reason.get('message', reason)}")
    token_ids = list(out["output_ids"])
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())][: len(token_ids)]
    if len(logprobs) != len(token_ids):
        raise RuntimeError(f"SGLang gave {len(token_ids)} tokens with log-probs {logprobs}")
    # None becomes NaN: the trainer counts such tokens, and knows what they are needed for.
    logprobs = [math.nan if value is None else value for value in logprobs]
    return SampledCompletion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish=_FINISH[reason["type"]],
        spans=_spans(meta, len(token_ids)),
        cached_tokens=meta.get("cached_tokens") or 0,
    )


def _spans(meta: dict[str, Any], num_tokens: int) -> list[Span]:
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": num_tokens}]
    return [Span(start=span["start"], end=span["end"], policy_version=int(span["version"])) for span in spans]


def _init_group_manager(server_args: Any, port_args: Any) -> Any:
    return init_tokenizer_manager(server_args, port_args, GroupTokenizerManager)


class TokenEngine(Engine):
    """An Engine that works on token ids only: with our TokenizerManager, and without detokenizer."""

    init_tokenizer_manager_func = staticmethod(_init_group_manager)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        # With skip_tokenizer_init the schedulers answer the TokenizerManager directly: the detokenizer would be
        # an unused process of 600 MiB and seconds of imports.
        return [], []


def launch_engine(arguments: dict[str, Any]) -> TokenEngine:
    """Start the processes and wait until they can generate. Raises: RuntimeError: a rank did not start."""
    return TokenEngine(**arguments)
