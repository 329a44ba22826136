"""Hooks in SGLang's scheduler that keep requests correct when the policy version changes between their tokens.

**The step in flight.** The overlap scheduler (the default on GPUs) launches a step before it reads the last one's
result. An in-place pause leaves that result unread. A change of the version labels tokens as they have been read. So
the token in flight, sampled by the old version, would be labelled with the new one; so would a whole request whose
prefill is in flight. Therefore that result is read at the pause, as the plain scheduler has done by then. The loop,
which expects one result per step, reads an empty stand-in when it continues.

**Waiting requests.** The version is part of the prefix cache's key, which is stored in a request. A request that waits
during the change is computed by the new version alone, so it gets the new key; with the old one it would begin with
the old version's KV cache.

**Retracted requests.** SGLang's retraction frees a request's KV cache and lets it wait; tokens, log-probs and the
versions that sampled them stay. It joins the queue's end, where it would wait for all that have not begun. So
retracted ones are moved to the front.
"""

from collections.abc import Callable
from typing import Any

_STAND_IN = object()


def cache_key(policy_version: int | str) -> str:
    """Return the cache key of a version; SGLang shares prefixes only between requests of the same key."""
    return f"v{policy_version}"


def read_last_result(result: Any, scheduler: Any, pause: Any) -> None:
    """Read the result of the launched step, after Scheduler.pause_generation; wait until it has been computed."""
    if pause.mode != "in_place" or not scheduler.result_queue:
        return  # in its other modes SGLang does so itself
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    while scheduler.result_queue:
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.result_queue.append((ScheduleBatch(reqs=[], batch_is_full=False), _STAND_IN))


def begun_first(result: Any, scheduler: Any, pause: Any) -> None:
    """Move retracted requests to the front of the queue, after Scheduler.pause_generation."""
    if pause.mode == "retract":
        scheduler.waiting_queue.sort(key=lambda request: request.retraction_count == 0)


def skip_stand_in(process: Callable[..., Any], scheduler: Any, batch: Any, result: Any) -> Any:
    """Skip the stand-in, around Scheduler.process_batch_result."""
    return None if result is _STAND_IN else process(scheduler, batch, result)


def rekey_waiting(result: Any, scheduler: Any, new_version: str) -> None:
    """Give waiting requests the new key, after Scheduler.record_weight_version_change."""
    for request in scheduler.waiting_queue:
        if request.extra_key is not None:
            request.extra_key = cache_key(new_version)
