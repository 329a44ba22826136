"""Work beside a step: begun with it, over before it ends, and never left running."""

import asyncio

import pytest

from servicekit.lifecycle.background import BackgroundTask


async def test_work_runs_beside_and_is_waited_for() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        begun.set()
        await go.wait()
        return 7

    async with BackgroundTask(work) as beside:
        assert beside.has_work
        await begun.wait()
        go.set()
        assert await beside.result() == 7
    assert await beside.result() == 7


async def test_an_error_beside_it_ends_the_work() -> None:
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def step() -> None:
        async with BackgroundTask(work):
            await asyncio.sleep(0)
            raise ValueError("the step")

    with pytest.raises(ValueError, match="the step"):
        await step()
    assert ended.is_set()


async def test_an_error_of_the_work_comes_with_its_result() -> None:
    async def work() -> None:
        raise ValueError("the work")

    async def step() -> None:
        async with BackgroundTask(work) as beside:
            await beside.result()

    with pytest.raises(ValueError, match="the work"):
        await step()


async def test_nothing_to_do() -> None:
    async with BackgroundTask[int]() as beside:
        assert not beside.has_work
        assert await beside.result() is None
