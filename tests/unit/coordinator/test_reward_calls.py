"""Repetition of calls to servers that score, and the circuit that opens while one is down."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from prometheus_client import REGISTRY

from coordinator.rewards.servers.breaker import CircuitBreaker
from coordinator.rewards.servers.calls import (
    LONGEST_WAIT_S,
    CallFailed,
    CallFailedForNow,
    FailureBudget,
    ServerCalls,
)
from tandem_config.sections.rewards.servers import ServerSection

Attempt = Callable[[], Awaitable[str]]
BUDGET = FailureBudget(ServerSection(max_error_share=1.0), 100)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker("s:1", open_after=2, open_s=10.0, clock=clock)


def open_circuit(clock: Clock) -> CircuitBreaker:
    made = breaker(clock)
    for why in ("first", "second"):
        assert made.refusal() == ""
        made.failed(why)
    return made


def test_failures_in_a_row_open_the_circuit_and_others_do_not() -> None:
    made = breaker(Clock())
    for _ in range(5):
        made.failed("x")
        made.succeeded()
    assert made.refusal() == ""
    made.failed("x")
    made.failed("no route")
    assert made.refusal() == "not sent, because the last 2 calls of s:1 failed (the next one is made in 10 s): no route"


@pytest.mark.parametrize("outcome", ["succeeded", "failed", "withdrawn"])
def test_one_call_tries_when_the_time_is_over(outcome: str) -> None:
    clock = Clock()
    made = open_circuit(clock)
    clock.now_s = 9.9
    assert made.refusal()
    clock.now_s = 10.0
    assert made.refusal() == ""
    assert "a call is trying" in made.refusal()
    if outcome == "failed":
        made.failed("third")
        assert "in 10 s): third" in made.refusal()
        clock.now_s = 20.0
        assert made.refusal() == ""
    elif outcome == "withdrawn":
        made.withdrawn()
        assert made.refusal() == ""
        assert made.refusal()
    else:
        made.succeeded()
        assert [made.refusal(), made.refusal()] == ["", ""]
        made.failed("one is not enough")
        assert made.refusal() == ""


class Server:
    """Fails as its list says, then answers; keeps the pauses that were made."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.sent = self.most = self.running = 0
        self.pauses_s: list[float] = []

    async def __call__(self) -> str:
        self.sent += 1
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if self.failures:
            raise self.failures.pop(0)
        return "done"

    async def pause(self, seconds: float) -> None:
        self.pauses_s.append(seconds)

    def calls(self, name: str = "s", **settings: Any) -> ServerCalls:
        return ServerCalls("s:1", ServerSection(name=name, **settings), self.pause)


async def test_what_may_pass_is_repeated() -> None:
    server = Server(CallFailedForNow("busy"), CallFailedForNow("busy", 7.0), CallFailedForNow("busy", 1e9))
    assert await server.calls(retries=3).call(server, BUDGET) == "done"
    first, second, third = server.pauses_s
    assert first <= 1.0
    assert second == 7.0
    assert third == LONGEST_WAIT_S
    server = Server(*[CallFailedForNow(f"busy {count}") for count in range(3)])
    with pytest.raises(CallFailed, match=r"busy 2 \(tried 3 times\)"):
        await server.calls(retries=2).call(server, BUDGET)


async def test_what_the_server_has_answered_is_not_repeated_and_opens_nothing() -> None:
    server = Server(*[CallFailed("no such model")] * 3)
    calls = server.calls(retries=5, open_after=2)
    for _ in range(3):
        with pytest.raises(CallFailed, match="no such model"):
            await calls.call(server, BUDGET)
    assert (await calls.call(server, BUDGET), server.sent) == ("done", 4)


async def test_while_the_circuit_is_open_nothing_is_sent() -> None:
    server = Server(*[CallFailedForNow("down")] * 50)
    calls = server.calls(retries=1, open_after=2, concurrency=1)
    found = await asyncio.gather(*(calls.call(server, BUDGET) for _ in range(20)), return_exceptions=True)
    assert server.sent == 2 * 2
    assert [str(error) for error in found[:2]] == ["down (tried 2 times)"] * 2
    assert {str(error).partition(" (")[0] for error in found[2:]} == {
        "not sent, because the last 2 calls of s:1 failed"
    }


async def test_what_cannot_change_the_end_of_the_run_is_not_sent() -> None:
    for on_error, total, sent in (("zero", 100, 11), ("zero", 10, 3), ("stop", 100, 1)):
        section = ServerSection.model_validate({"on_error": on_error, "max_error_share": 0.1})
        server, budget = Server(*[CallFailed("no")] * 100), FailureBudget(section, total)
        for _ in range(total):
            with pytest.raises(CallFailed):
                await server.calls(retries=0).call(server, budget)
            budget.spend(1)
        assert server.sent == sent, (on_error, total)


async def test_calls_have_slots() -> None:
    server = Server()
    calls = server.calls(concurrency=3)
    assert await asyncio.gather(*(calls.call(server, BUDGET) for _ in range(10))) == ["done"] * 10
    assert server.most == 3


async def test_a_cancelled_call_says_nothing_of_the_server() -> None:
    clock = Clock()
    server = Server(*[CallFailedForNow("down")] * 2)
    calls = server.calls(retries=0, open_after=2)
    calls._breaker = open_circuit(clock)
    clock.now_s = 10.0
    hanging = asyncio.create_task(calls.call(asyncio.Event().wait, BUDGET))
    await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    server.failures.clear()
    assert await calls.call(server, BUDGET) == "done"


async def test_the_default_retries_outlast_the_restart_of_a_server() -> None:
    longest_s = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0]
    for _ in range(20):
        server = Server(*[CallFailedForNow("restarting")] * len(longest_s))
        assert await server.calls().call(server, BUDGET) == "done"
        assert all(most / 2 <= pause <= most for pause, most in zip(server.pauses_s, longest_s, strict=True))
        assert sum(server.pauses_s) >= 30.0


def exported(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"tandem_reward_{name}", labels)


async def test_calls_and_the_circuit_are_measured() -> None:
    server = Server(CallFailedForNow("busy"), CallFailed("no"), *[CallFailedForNow("down")] * 3)
    calls = server.calls("measured", retries=1, open_after=1, open_s=1e-9)
    assert exported("circuit_open", reward="measured") == 0
    for circuit in (0, 1, 0):
        with contextlib.suppress(CallFailed):
            await calls.call(server, BUDGET)
        assert exported("circuit_open", reward="measured") == circuit
    assert exported("call_seconds_count", reward="measured", result="failed") == 4
    assert exported("call_seconds_count", reward="measured", result="refused") == 1
    assert exported("call_seconds_count", reward="measured", result="answered") == 1
