"""Which of several errors a round gives: that of the rank that failed, rather than those of its peers that lost it."""

import asyncio

import pytest

from coordinator.sync.sync_round import Reports, raise_first, wait_for_cause
from servicekit.errors import DigestMismatch, PeerLost, TandemError


async def fails(error: TandemError, after_s: float) -> Reports:
    await asyncio.sleep(after_s)
    raise error


async def first_error(**errors: tuple[TandemError, float]) -> TandemError:
    """Of participants that fail so many seconds after the phase began."""
    tasks = {name: asyncio.create_task(fails(*each)) for name, each in errors.items()}
    try:
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        await wait_for_cause(tasks, 0.3)
        raise_first(tasks)
    except TandemError as error:
        return error
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    raise AssertionError("nobody failed")


LOST, WRONG = PeerLost("trainer: lost rollout-0/0"), DigestMismatch("rollout-0: message 3")


@pytest.mark.parametrize(
    ("trainer", "replica", "expected"),
    [
        ((LOST, 0.0), (WRONG, 0.1), WRONG),  # its peers are quicker to say that it has gone
        ((LOST, 0.0), (WRONG, 60.0), LOST),  # nobody waits for long
        ((LOST, 0.0), (PeerLost("rollout-0: lost trainer/0"), 0.1), LOST),
        ((WRONG, 0.0), (LOST, 60.0), WRONG),
    ],
)
def test_the_cause_is_given(
    trainer: tuple[TandemError, float], replica: tuple[TandemError, float], expected: TandemError
) -> None:
    assert asyncio.run(first_error(trainer=trainer, replica=replica)) is expected
