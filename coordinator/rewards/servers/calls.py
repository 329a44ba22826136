"""Calls of a server that scores: a few at a time, repeated if a failure may pass, refused while the server is down."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tenacity

from coordinator.rewards.servers.breaker import CircuitBreaker
from coordinator.watch.metrics import REWARD_CALL_SECONDS, REWARD_CIRCUIT_OPEN
from tandem_config.sections.rewards.servers import ServerSection

T = TypeVar("T")

# In a small batch at least this many failures before the rest is not sent.
_FEW = 2
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0


class FailureBudget:
    """Failures that a batch of samples may have: beyond them the run ends (scoring.py), so the rest is not sent.

    Args:
        num_samples: of the batch.
    """

    def __init__(self, section: ServerSection, num_samples: int) -> None:
        share = int(section.max_error_share * num_samples)
        self._left = 0 if section.on_error == "stop" else max(_FEW, share)

    def spend(self, failures: int) -> None:
        """Count failed samples."""
        self._left -= failures

    def exceeded(self) -> bool:
        """Whether more samples have failed than may."""
        return self._left < 0


class CallFailed(Exception):
    """The server answered, but not with what was asked for: repeating the call changes nothing."""


class CallFailedForNow(Exception):
    """The server did not answer, or was too busy.

    Args:
        after_s: how long it asks to wait; 0: it does not say.
    """

    def __init__(self, why: str, after_s: float = 0.0) -> None:
        super().__init__(why)
        self.after_s = after_s


def wait_s(state: tenacity.RetryCallState) -> float:
    """Return the pause before the next attempt: half of a doubling limit to all of it, or what the server asks for.

    Never less than half: retries that happen to be quick would give up while the server restarts.
    """
    limit_s = tenacity.wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S)(state)
    backoff = random.uniform(limit_s / 2, limit_s)
    error = None if state.outcome is None else state.outcome.exception()
    asked_s = error.after_s if isinstance(error, CallFailedForNow) else 0.0
    return max(backoff, min(asked_s, LONGEST_WAIT_S))


class ServerCalls:
    """Makes the calls of one reward.

    Args:
        server: its address, for messages.
        section: how often, how many at a time, and when the circuit opens.
        sleep: pauses between attempts.
    """

    def __init__(
        self, server: str, section: ServerSection, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._slots = asyncio.Semaphore(section.concurrency)
        self._breaker = CircuitBreaker(server, open_after=section.open_after, open_s=section.open_s)
        self._tries = section.retries + 1
        self._sleep = sleep
        self._reward = section.label
        self._note_circuit()

    async def call(self, attempt: Callable[[], Awaitable[T]], budget: FailureBudget) -> T:
        """Make a call.

        Args:
            attempt: sends it once; raises CallFailed or CallFailedForNow.
            budget: of the samples among which those of the call are.
        Raises: CallFailed: with the reason of the last attempt, or why none was made.
        """
        async with self._slots:
            if budget.exceeded():
                raise CallFailed("not sent, because too many before it had failed")
            if refusal := self._breaker.refusal():
                raise CallFailed(refusal)
            try:
                value = await self._repeated(attempt)
            except CallFailedForNow as error:
                self._breaker.failed(str(error))
                tried = f" (tried {self._tries} times)" if self._tries > 1 else ""
                raise CallFailed(f"{error}{tried}") from error
            except CallFailed:
                self._breaker.succeeded()  # it is up, and answers
                raise
            except BaseException:
                self._breaker.withdrawn()
                raise
            else:
                self._breaker.succeeded()
                return value
            finally:
                self._note_circuit()

    async def _repeated(self, attempt: Callable[[], Awaitable[T]]) -> T:
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(CallFailedForNow),
            stop=tenacity.stop_after_attempt(self._tries),
            wait=wait_s,
            sleep=self._sleep,
            reraise=True,
        )

        async def once() -> T:
            return await self._measured(attempt)

        return await retrying(once)

    async def _measured(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Send it once, and record how long that took and what came of it; a call that is given up is not recorded."""
        started_s, result = time.monotonic(), ""
        try:
            value = await attempt()
            result = "answered"
            return value
        except (CallFailed, CallFailedForNow) as error:
            result = "refused" if isinstance(error, CallFailed) else "failed"
            raise
        finally:
            if result:
                seconds = time.monotonic() - started_s
                REWARD_CALL_SECONDS.labels(reward=self._reward, result=result).observe(seconds)

    def _note_circuit(self) -> None:
        REWARD_CIRCUIT_OPEN.labels(reward=self._reward).set(float(self._breaker.is_open))
