"""A trainer that ends is saved, and nothing is trained until it has ended."""

import asyncio

from coordinator.shutdown import Leaving, follow
from launcher.simulate.virtual_loop import run
from servicekit.errors import Unavailable
from tandem_api.trainer.v1 import trainer_pb2

ENDS = trainer_pb2.GetStatusResponse(step_id="i3.v2", leaving=True)
SAVED = trainer_pb2.GetStatusResponse(step_id="i3.v2")
NEXT = trainer_pb2.GetStatusResponse()


class FakeTrainer:
    """Answers with one reply after the other, and with the last for ever."""

    name = "trainer"

    def __init__(self, *replies: trainer_pb2.GetStatusResponse | Unavailable) -> None:
        self.replies = list(replies)

    async def status(self, *, timeout_s: float) -> trainer_pb2.GetStatusResponse:
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Unavailable):
            raise reply
        return reply


def seconds_until_gone(*replies: trainer_pb2.GetStatusResponse | Unavailable) -> float:
    """Seconds for which nothing is trained; 60: until the time for it is over."""

    async def measure() -> float:
        leaving, waited = Leaving(), asyncio.get_running_loop().create_future()
        leaving.saves = True
        begun_s = asyncio.get_running_loop().time()

        async def save(gone: asyncio.Event) -> None:
            await asyncio.wait([asyncio.create_task(gone.wait())], timeout=60.0)
            waited.set_result(asyncio.get_running_loop().time() - begun_s)

        following = asyncio.create_task(follow(FakeTrainer(*replies), leaving, save))
        seconds = await waited
        following.cancel()
        return round(float(seconds), 3)

    return run(measure())


def test_a_trainer_that_was_saved_and_still_answers_is_waited_for() -> None:
    assert seconds_until_gone(ENDS, SAVED, SAVED, Unavailable("gone")) == 3.0
    assert seconds_until_gone(ENDS, SAVED) == 60.0


def test_the_next_trainer_may_answer_before_the_end_of_the_first_is_noticed() -> None:
    assert seconds_until_gone(ENDS, SAVED, NEXT) == 2.0
    assert seconds_until_gone(ENDS, NEXT) == 1.0
