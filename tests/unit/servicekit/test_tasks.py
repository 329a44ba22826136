"""The first of several: what counts, what is ended, and that nothing of it is left running."""

import asyncio
import threading

import pytest
import structlog.testing

from servicekit.errors import Aborted, PeerLost, Unavailable
from servicekit.lifecycle.tasks import DEADLINE, First, cancel, end_of, failing, first_of

DEADLINE_S = 20.0


async def forever() -> None:
    await asyncio.Event().wait()


async def fail(error: Exception) -> None:
    raise error


async def give(value: int) -> int:
    return value


def left() -> list[str]:
    """Tasks beside the test's own."""
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def test_what_ends_first_is_named_and_what_was_begun_for_it_is_ended() -> None:
    event = asyncio.Event()
    assert await first_of({"slow": forever(), "quick": give(7), "event": event}) == First(name="quick", value=7)
    event.set()
    assert (await first_of({"slow": forever(), "event": event})).name == "event"
    assert left() == []


async def test_an_error_of_the_first_is_raised() -> None:
    with pytest.raises(PeerLost, match="rank 3"):
        await first_of({"slow": forever(), "bad": fail(PeerLost("rank 3 is gone"))})
    assert left() == []


async def test_of_two_errors_at_once_the_first_named_is_raised_and_the_other_is_logged() -> None:
    with structlog.testing.capture_logs() as lines, pytest.raises(PeerLost):
        await first_of({"one": fail(PeerLost("gone")), "two": fail(Unavailable("away"))})
    assert [(line["task"], line["error"]) for line in lines] == [("two", "Unavailable: away")]
    assert (await first_of({"done": give(1), "two": fail(Unavailable("away"))})).name == "done"


async def test_what_fails_while_it_is_cancelled_is_logged() -> None:
    async def clean_up_badly() -> None:
        try:
            await forever()
        finally:
            raise Unavailable("no goodbye")

    waiting = clean_up_badly()
    with structlog.testing.capture_logs() as lines:
        first = await first_of({"slow": waiting, "begun": asyncio.sleep(0.01)})
    assert first.name == "begun"
    assert [line["error"] for line in lines] == ["Unavailable: no goodbye"]


async def test_a_deadline_ends_what_was_begun() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await forever()
        finally:
            await asyncio.sleep(0)
            ended.set()

    assert (await first_of({"work": work()}, timeout_s=0.01)).name == DEADLINE
    assert ended.is_set()
    assert left() == []


async def test_tasks_and_futures_of_the_caller_go_on() -> None:
    task = asyncio.create_task(forever(), name="mine")
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert (await first_of({"task": task, "future": future, "now": give(0)})).name == "now"
    assert not task.cancelling()
    assert not future.done()
    await cancel(task)
    assert task.cancelled()
    bad = asyncio.create_task(fail(PeerLost("gone")))
    assert (await first_of({"bad": end_of(bad), "slow": forever()})).name == "bad"  # and its error is not raised
    assert isinstance(bad.exception(), PeerLost)
    assert left() == []


async def test_a_cancelled_wait_leaves_nothing_behind() -> None:
    """Cancelled twice, while what it began is slow to end."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            begun.set()
            await forever()
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    waiting = asyncio.create_task(first_of({"slow": slow_to_end(), "other": forever()}), name="waiting")
    await asyncio.wait_for(begun.wait(), DEADLINE_S)
    waiting.cancel()
    await asyncio.sleep(0)
    await asyncio.wait([waiting], timeout=DEADLINE_S)
    assert waiting.cancelled()
    assert ended.is_set()
    assert left() == []


async def test_cancel_ends_its_tasks_though_its_caller_is_cancelled_meanwhile() -> None:
    begun = asyncio.Event()

    async def stubborn() -> None:
        for _ in range(2):
            try:
                begun.set()
                await forever()
            except asyncio.CancelledError:
                await asyncio.sleep(0)

    task = asyncio.create_task(stubborn())
    await begun.wait()
    cancelling = asyncio.create_task(cancel(task))
    await asyncio.sleep(0.02)
    assert not task.done()
    cancelling.cancel()
    await asyncio.wait([cancelling], timeout=DEADLINE_S)
    assert cancelling.cancelled()
    assert task.done()


async def test_another_thread_fails_a_future_once() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fail_it = failing(future)
    for why in ("first", "second"):
        thread = threading.Thread(target=fail_it, args=(why,))
        thread.start()
        await asyncio.to_thread(thread.join, DEADLINE_S)
    with pytest.raises(Aborted, match="first"):
        await asyncio.wait_for(future, DEADLINE_S)
