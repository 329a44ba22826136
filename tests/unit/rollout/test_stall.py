"""When an engine counts as frozen: a table of looks, and what its watch does."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rollout_service.engine import GroupRequest, SamplingSettings
from rollout_service.stall import PATIENCE, Look, SingleFlight, StallWatch, Stillness
from rollout_service.weight_updates.admission import Admission
from servicekit.errors import Unavailable
from tests.unit.rollout.fake_engine import FakeEngine, generate_groups

LIMIT_S = 60.0
GROUPS = [GroupRequest(group_id="g", prompt_ids=[1], num_completions=1)]
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=2, stop_token_ids=())


def busy(progress: int | None = 7, **changes: Any) -> Look:
    return Look(running_groups=4, progress=progress, **changes)


FROZEN_S = [busy()] * 61
NO_TOKEN = "computed no token for 60 s while 4 groups ran"


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        pytest.param(FROZEN_S, NO_TOKEN, id="no token while groups run"),
        pytest.param([busy(), *[busy(None)] * 60], NO_TOKEN, id="the load cannot be read either"),
        pytest.param([busy(None)] * 60, NO_TOKEN, id="the load was never read"),
        pytest.param([busy(), *[busy()] * 59], "", id="shorter than the timeout"),
        pytest.param([busy(step) for step in range(600)], "", id="tokens are computed"),
        pytest.param([busy(step // 50) for step in range(600)], "", id="slow, with a queue behind it"),
        pytest.param([Look(progress=7)] * 600, "", id="no group runs"),
        pytest.param([busy(paused=True)] * 600, "", id="paused by a sync or by hand"),
        pytest.param([*[busy()] * 50, busy(paused=True), *[busy()] * 50], "", id="counted anew after a pause"),
        pytest.param(
            [*[busy()] * 31, Look(progress=7), *[busy()] * 30], NO_TOKEN, id="calls that come and are given up"
        ),
        pytest.param([busy(may_be_slow=True)] * 600, "", id="kernels compile, or CPUs compute"),
        pytest.param(
            [busy(may_be_slow=True)] * 601, "computed no token for 600 s while 4 groups ran", id="which must end too"
        ),
        pytest.param([*[busy(may_be_slow=True)] * 100, *[busy()] * 60], "159 s", id="frozen in a long prefill"),
        pytest.param([Look(answered=(False,))] * 59, "", id="a rank that has not answered yet"),
        pytest.param(
            [Look(answered=(False,))] * 60, "not answered for 60 s", id="a rank that is frozen from the start"
        ),
        pytest.param(
            [Look(answered=(True, True)), *[Look(answered=(True, False))] * 59], "", id="a rank in a long step"
        ),
        pytest.param(
            [Look(answered=(True, True)), *[Look(answered=(True, False))] * 60],
            "has a rank that has not answered for 60 s",
            id="one rank of two is frozen between calls",
        ),
        pytest.param(
            [Look(answered=(True,)), *[Look(answered=(False,), paused=True)] * 60],
            "has a rank that has not answered for 60 s",
            id="a rank is frozen in a pause",
        ),
    ],
)
def test_an_engine_is_frozen_when_what_should_move_stands_still(looks: list[Look], expected: str) -> None:
    stillness = Stillness(LIMIT_S)
    whys = [stillness.observe(look, 1.0) for look in looks]
    assert not any(whys[:-1])
    assert (expected in whys[-1]) if expected else not whys[-1]
    assert PATIENCE == 10.0


class Watched:
    """A watch with a timeout of 0.2 s over a fake engine, which hangs on request."""

    def __init__(self, pings: "list[Callable[[], Coroutine[Any, Any, bool]]]") -> None:
        self.engine = FakeEngine()
        self.admission = Admission()
        self.watch = StallWatch(
            "rollout-1",
            self.engine,
            pings,
            0.2,
            admission=self.admission,
            load=SingleFlight(lambda: asyncio.to_thread(self.engine.load)),
            finished=lambda: 1,
        )

    async def call(self) -> None:
        self.admission.enter(1)
        try:
            async for _ in self.admission.until_evicted(generate_groups(self.engine, GROUPS, SAMPLING)):
                pass
        finally:
            self.admission.leave(1)


@pytest.mark.asyncio
async def test_the_calls_of_a_frozen_engine_end_with_the_reason_and_its_service_ends() -> None:
    watched = Watched([])
    watched.engine.hold()
    calls = [asyncio.create_task(watched.call()) for _ in range(2)]
    async with asyncio.timeout(5.0):
        with pytest.raises(Unavailable, match=r"the engine of rollout-1 computed no token .* while 2 groups ran"):
            await watched.watch.run()
        for call in calls:
            with pytest.raises(Unavailable, match=r"rollout\.stall_timeout_s"):
                await call
    assert isinstance(watched.engine.failed.exception(), Unavailable)


@pytest.mark.asyncio
async def test_a_rank_whose_process_is_frozen_between_calls_ends_the_service() -> None:
    has_answered = asyncio.Event()

    async def answers() -> bool:
        if has_answered.is_set():
            await asyncio.Event().wait()
        has_answered.set()
        return True

    watched = Watched([answers])
    async with asyncio.timeout(5.0):
        with pytest.raises(Unavailable, match="has a rank that has not answered"):
            await watched.watch.run()
    assert isinstance(watched.engine.failed.exception(), Unavailable)


@pytest.mark.asyncio
async def test_a_question_that_hangs_is_asked_once_whoever_asks() -> None:
    asked, answer = list[int](), asyncio.Event()

    async def ask() -> int:
        asked.append(1)
        await answer.wait()
        return 5

    question = SingleFlight(ask)
    assert await question.within(0.01) is None
    waiting = asyncio.create_task(question())
    assert await question.within(0.01) is None
    assert len(asked) == 1
    answer.set()
    assert (await waiting, await question.within(1.0), len(asked)) == (5, 5, 1)
    assert (await question(), len(asked)) == (5, 2)
