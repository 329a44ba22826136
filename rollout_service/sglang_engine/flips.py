"""What a flip of the policy version does to requests in SGLang's scheduler, beside what SGLang does.

**The step in flight.** The overlap scheduler (the default on GPUs) launches a step before it reads the last one's
result, and an in-place pause leaves that result unread. A change of the version counts the tokens that have been read:
the one in flight, sampled by the old version, would be told as the new one's, and a request whose prefill is in flight
as wholly the new one's. So that result is read at the pause, as the plain scheduler has done by then. What the loop
reads first when it goes on is an empty stand-in: it takes one result per step for granted.

**Requests that wait.** The version is part of the prefix cache's key, which a request brings along. One that waits at
the flip is computed by the new version alone: it gets the new key, or it would begin with the old version's KV.
"""

from collections.abc import Callable
from typing import Any

_STAND_IN = object()


def cache_key(policy_version: int | str) -> str:
    """SGLang shares prefixes between requests of the same key only."""
    return f"v{policy_version}"


def read_last_result(result: Any, scheduler: Any, pause: Any) -> None:
    """After Scheduler.pause_generation: read what has been launched; waits until the device has computed it."""
    if pause.mode != "in_place" or not scheduler.result_queue:
        return  # in its other mode SGLang does so itself
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.result_queue.append((ScheduleBatch(reqs=[], batch_is_full=False), _STAND_IN))


def pass_over_stand_in(process: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Around Scheduler.process_batch_result."""
    return None if result is _STAND_IN else process(scheduler, batch, result)


def rekey_waiting(result: Any, scheduler: Any, new_version: str) -> None:
    """After Scheduler.record_weight_version_change."""
    for request in scheduler.waiting_queue:
        if request.extra_key is not None:
            request.extra_key = cache_key(new_version)
