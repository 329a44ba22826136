"""What of the ranks' protocol needs no processes."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from servicekit.errors import ConfigError, Internal, NotFinite, SlotTaken, WrongVersion
from trainer_service.ranks.commands import (
    Command,
    Commander,
    RankOutcome,
    Wire,
    _error_from,
    _first_error,
    _text_of,
    run_handler,
)
from trainer_service.ranks.world import Place
from weightsync.membership.rendezvous import Evicted


def test_error_travels_with_its_class() -> None:
    error = _error_from("WRONG_VERSION\nthe step\nstarts from 3")
    assert isinstance(error, WrongVersion)
    assert str(error) == "the step\nstarts from 3"
    assert isinstance(_error_from("SOMETHING_NEW\nx"), Internal)


def test_an_error_of_weight_sync_s_own_travels_as_what_it_is_a_kind_of() -> None:
    """A rank that lost its slot is a reason for another round, as on rank 0; it was INTERNAL, which ends the run."""
    error = _error_from(_text_of(Evicted("trainer/1: this worker was replaced by a newer one")))
    assert type(error) is SlotTaken
    assert str(error) == "trainer/1: this worker was replaced by a newer one"


def test_equal_errors_of_all_ranks_are_one_error() -> None:
    error = _first_error([RankOutcome(error=NotFinite("s1")), RankOutcome(error=NotFinite("s1"))])
    assert isinstance(error, NotFinite)
    assert str(error) == "s1"


def test_error_of_one_rank_names_it() -> None:
    assert (
        str(_first_error([RankOutcome(body=b"x"), RankOutcome(error=Internal("disk full"))]))
        == "trainer rank 1: disk full"
    )
    assert _first_error([RankOutcome(body=b"x"), RankOutcome()]) is None


def test_refusal_is_an_outcome_and_a_bug_is_not() -> None:
    def refuse(_: object) -> bytes:
        raise WrongVersion("no")

    def fail(_: object) -> bytes:
        raise KeyError("bug")

    assert isinstance(run_handler({Command.SAVE: refuse}, Command.SAVE, []).error, WrongVersion)
    with pytest.raises(KeyError):
        run_handler({Command.SAVE: fail}, Command.SAVE, [])
    assert run_handler({}, Command.NOOP, []) == RankOutcome()


def test_commands_after_the_end_fail_at_once() -> None:
    commander = Commander()
    commander._close()
    with pytest.raises(Internal, match="stopped"):
        commander.submit(Command.SAVE).result(timeout=1)


class OneRank(Wire):
    """Of a trainer of one rank."""

    def __init__(self) -> None:
        self.rank, self.world_size = 0, 1


def test_a_caller_that_gives_up_takes_nothing_with_it() -> None:
    """One whose command has begun, and one whose command waits: the trainer ended with the first."""
    commander, begun, go_on, done = Commander(), threading.Event(), threading.Event(), []

    def logprobs(parts: Sequence[bytes]) -> bytes:
        begun.set()
        assert go_on.wait(10)
        done.append(parts[0])
        return b"reply"

    ranks = threading.Thread(target=commander.run, args=(OneRank(), {Command.LOGPROBS: logprobs}), daemon=True)
    ranks.start()

    async def call(body: bytes) -> None:
        await asyncio.wrap_future(commander.submit(Command.LOGPROBS, [body]))  # as ComputeLogprobs waits

    async def two_callers() -> None:
        first, second = asyncio.create_task(call(b"begun")), asyncio.create_task(call(b"waits"))
        assert await asyncio.to_thread(begun.wait, 10)
        for task in (first, second):
            task.cancel()
        await asyncio.wait([first, second])

    asyncio.run(two_callers())
    go_on.set()
    assert commander.submit(Command.LOGPROBS, [b"next"]).result(timeout=10) == [b"reply"]
    commander.submit(Command.STOP).result(timeout=10)
    ranks.join(10)
    assert done == [b"begun", b"next"]


def test_commands_that_nobody_waits_for_do_not_hide_the_end_from_others() -> None:
    commander = Commander()
    commander.submit(Command.SAVE).cancel()
    other = commander.submit(Command.SAVE)
    commander._close()
    with pytest.raises(Internal, match="stopped"):
        other.result(timeout=1)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 is not below WORLD_SIZE 2"),
        ({"RANK": "one"}, "RANK='one'"),
        ({"MASTER_ADDR": "host"}, "MASTER_PORT"),
    ],
)
def test_bad_environment_is_named(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Place.from_env(environ)
    assert said in str(error.value)


def test_rank_0_of_1_without_an_environment() -> None:
    assert Place.from_env({}) == Place(rank=0, world_size=1, local_rank=0, master=None)
