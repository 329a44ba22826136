"""Admission of groups: count the running ones, and evict the calls that wait for them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from servicekit.errors import Overloaded, TandemError
from servicekit.lifecycle.tasks import first_of

T = TypeVar("T")
# Tokens of requests that are held, running ones included, where the KV cache is small: 5 GiB as Python's integers.
MOST_TOKENS = 2**27
_END: Any = object()


class Admission:
    """The running groups of a replica: a count, a wait until none is left, an eviction."""

    def __init__(self) -> None:
        self.running_groups = self.held_tokens = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._evicted: asyncio.Future[TandemError] = asyncio.get_running_loop().create_future()

    def enter(self, num_groups: int, tokens: int = 0, most_tokens: int = 0) -> None:
        """Count groups as running. Raises: Overloaded: with the tokens of others there are too many."""
        if self.held_tokens and self.held_tokens + tokens > max(MOST_TOKENS, most_tokens):
            raise Overloaded(f"{self.held_tokens} tokens of requests are held here; no room for {tokens}, submit later")
        self.held_tokens += tokens
        self.running_groups += num_groups
        self._idle.clear()

    def leave(self, num_groups: int, tokens: int = 0) -> None:
        """Count them no more."""
        self.held_tokens -= tokens
        self.running_groups -= num_groups
        if self.running_groups == 0:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no group is running. Returns: whether that came within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return self._idle.is_set()

    def evict(self, error: TandemError) -> None:
        """Make every open call fail with `error`; calls that start later are not affected."""
        evicted, self._evicted = self._evicted, asyncio.get_running_loop().create_future()
        evicted.set_result(error)

    async def until_evicted(self, items: AsyncIterator[T]) -> AsyncIterator[T]:
        """Yield `items`. Raises: the error of evict() as soon as that is called."""
        evicted = self._evicted
        source = aiter(items)
        while True:
            # first_of would warn of an end by StopAsyncIteration, if an eviction comes with it.
            first = await first_of({"evicted": evicted, "item": anext(source, _END)})
            if first.name == "evicted":
                raise evicted.result()
            if first.value is _END:
                return
            yield first.value
