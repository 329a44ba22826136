"""Sends a call's requests to SGLang in one message and reports each group the moment its last completion ends.

SGLang's own `generate_request` answers a batch when the whole batch is done, or streams every token through a task per
request. This subclass of its TokenizerManager registers the same request states, with an event that only counts down.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from rollout_service.engine import Completion, Finish, FinishedGroup, Group, Sampling, Span

_FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": Finish.ABORT}


class _Countdown:
    """Stands in for the asyncio.Event of each request of a group: SGLang sets it when the request has ended."""

    def __init__(self, group: Group, whole: "asyncio.Queue[_Countdown]") -> None:
        self.group = group
        self.states: list[Any] = []
        self._left = group.num_completions
        self._whole = whole

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
        self, groups: Sequence[Group], sampling: Sampling, cache_key: str | None
    ) -> AsyncIterator[list[FinishedGroup]]:
        """See RolloutEngine.generate. cache_key: prefixes are shared only between requests of the same key."""
        self.auto_create_handle_loop()
        whole: asyncio.Queue[_Countdown] = asyncio.Queue()
        request = _batch_request(groups, sampling, cache_key)
        request.normalize_batch_and_arguments()
        self._init_req_state(request)
        states = {rid: self.rid_to_state[rid] for rid in request.rid}
        _count_down(groups, list(states.values()), whole)
        try:
            async with self.model_update_lock.reader_lock:
                tokenized = await self._batch_tokenize_and_process(request.batch_size, request)
                await self._send_batch_request(tokenized)
                left = len(groups)
                while left > 0:
                    ready = [await whole.get()]
                    while not whole.empty():
                        ready.append(whole.get_nowait())
                    left -= len(ready)
                    yield [each.finished_group() for each in ready]
        finally:  # a closed iterator or an error: what has been sent is aborted, the rest forgotten
            self._release_req_states_on_failure(states)


def _batch_request(groups: Sequence[Group], sampling: Sampling, cache_key: str | None) -> GenerateReqInput:
    # A prompt is repeated for each completion: SGLang's n > 1 first runs every prompt once, one message at a time.
    return GenerateReqInput(
        input_ids=[group.prompt_ids for group in groups for _ in range(group.num_completions)],
        sampling_params={
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_new_tokens": sampling.max_new_tokens,
            "stop_token_ids": list(sampling.stop_token_ids),
        },
        return_logprob=True,
        extra_key=cache_key,
    )


def _count_down(groups: Sequence[Group], states: list[Any], whole: "asyncio.Queue[_Countdown]") -> None:
    taken = iter(states)
    for group in groups:
        countdown = _Countdown(group, whole)
        for _ in range(group.num_completions):
            state = next(taken)
            state.event = countdown
            countdown.states.append(state)


def _completion(out: dict[str, Any]) -> Completion:
    meta = out["meta_info"]
    reason = meta["finish_reason"]
    if reason.get("status_code") is not None:
        raise RuntimeError(f"SGLang refused a request: {reason.get('message', reason)}")
    token_ids = list(out["output_ids"])
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs", ())][: len(token_ids)]
    if len(logprobs) != len(token_ids) or any(value is None or math.isnan(value) for value in logprobs):
        raise RuntimeError(f"SGLang gave {len(token_ids)} tokens with log-probs {logprobs}")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        finish=_FINISH[reason["type"]],
        spans=_spans(meta, len(token_ids)),
        cached_tokens=meta.get("cached_tokens") or 0,
    )


def _spans(meta: dict[str, Any], num_tokens: int) -> list[Span]:
    spans = meta.get("weight_versions") or [{"version": meta["weight_version"], "start": 0, "end": num_tokens}]
    return [Span(start=each["start"], end=each["end"], policy_version=int(each["version"])) for each in spans]
