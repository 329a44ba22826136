import asyncio

import pytest

from coordinator.watch.control import RunControl, State
from coordinator.watch.events import EventKind, EventLog
from servicekit.errors import InvalidRequest


async def messages(log: EventLog, after: int = 0) -> list[str]:
    return [event.message async for event in log.watch(after)]


def filled(*texts: str, capacity: int = 100) -> EventLog:
    log = EventLog(capacity)
    for text in texts:
        log.append(EventKind.PROGRESS, text)
    return log


async def test_watchers_replay_and_then_follow() -> None:
    log = filled("a", "b")
    late = asyncio.create_task(messages(log, after=1))
    early = asyncio.create_task(messages(log))
    await asyncio.sleep(0)
    log.append(EventKind.PROGRESS, "c")
    await asyncio.sleep(0)
    log.append(EventKind.PROGRESS, "d")
    log.close()
    assert await asyncio.wait_for(late, 1) == ["b", "c", "d"]
    assert await asyncio.wait_for(early, 1) == ["a", "b", "c", "d"]


async def test_a_closed_log_is_replayed_to_its_end() -> None:
    log = filled("a", "b")
    log.close()
    assert await messages(log) == ["a", "b"]
    assert await messages(log, after=2) == []


async def test_old_events_are_forgotten_beyond_the_capacity() -> None:
    log = filled("a", "b", "c", "d", capacity=2)
    log.close()
    assert [event.sequence async for event in log.watch(0)] == [3, 4]
    assert [event.sequence async for event in log.watch(3)] == [4]


async def test_the_future_cannot_be_watched() -> None:
    with pytest.raises(InvalidRequest, match="after_sequence 3 is beyond the last event 2"):
        filled("a", "b").watch(3)


async def test_a_slow_watcher_misses_nothing_within_the_capacity() -> None:
    log = filled(*map(str, range(5)))
    seen = []
    async for event in log.watch(0):
        seen.append(event.sequence)
        if event.sequence < 20:
            log.append(EventKind.PROGRESS, "more")
        if event.sequence == 20:
            log.close()
    assert seen == list(range(1, len(seen) + 1))
    assert len(seen) == 24


def states(log: EventLog) -> list[str]:
    return [event.message for event in log._events if event.kind is EventKind.STATE]


async def test_the_gate_holds_while_paused() -> None:
    log = EventLog()
    control = RunControl(log)
    assert control.pause() is State.STARTING
    waiting = asyncio.create_task(control.gate())
    await asyncio.sleep(0)
    assert control.state is State.PAUSED
    assert control.resume() is State.RUNNING
    await asyncio.wait_for(waiting, 1)
    assert states(log) == ["paused: by request", "running: resumed"]


async def test_a_final_state_stays() -> None:
    log = EventLog()
    control = RunControl(log)
    control.enter(State.FAILED, "trainer: gone")
    control.enter(State.FINISHED)
    assert (control.pause(), control.resume(), control.error) == (State.FAILED, State.FAILED, "trainer: gone")
    control.stop_after_step()
    assert not control.stop_requested
    assert states(log) == ["failed: trainer: gone"]


async def test_requests_are_idempotent() -> None:
    log = EventLog()
    control = RunControl(log)
    control.pause()
    control.pause()
    control.stop_after_step()
    control.stop_after_step()
    await asyncio.wait_for(control.gate(), 1)
    assert len([event for event in log._events if event.kind is EventKind.PROGRESS]) == 2
