"""Whose fault the errors of a round are."""

import pytest

from coordinator.sync.blame import blame
from servicekit.errors import (
    Aborted,
    ConfigError,
    DeadlineExceeded,
    Internal,
    PeerLost,
    SlotTaken,
    TandemError,
    Unavailable,
)
from tandem_clients.probing import NoAnswer

T, R0, R1, R2 = "trainer", "rollout-0", "rollout-1", "rollout-10"
LOST_R1 = PeerLost("rollout-0/0: lost rollout-1/0")
TORCH = ConfigError("torch must match: rollout-1/0 has 2.99, trainer/0 has 2.13")
NOT_FORMED = DeadlineExceeded("group was not formed in 60 s; missing: rollout-1/0")
BROKEN = Internal("MemoryError")


@pytest.mark.parametrize(
    ("errors", "failed", "lost", "is_trainer"),
    [
        ({R1: BROKEN, T: LOST_R1, R0: LOST_R1}, {R1}, set(), False),
        ({R1: BROKEN, R0: Unavailable("no route")}, {R0, R1}, set(), False),
        ({R1: BROKEN, T: Internal("it followed")}, {R1}, set(), False),
        ({T: Internal("CUDA error"), R0: PeerLost("lost trainer/0")}, set(), set(), True),
        ({T: NoAnswer("no longer answers")}, set(), set(), True),
        ({R1: NoAnswer("frozen"), T: LOST_R1}, set(), {R1}, False),
        ({R1: NoAnswer("frozen"), R0: BROKEN}, {R0}, {R1}, False),
        ({R1: TORCH}, {R1}, set(), False),  # the others are content
        ({R1: SlotTaken("rollout-1/0: another one holds it")}, {R1}, set(), False),
        ({T: NOT_FORMED, R0: NOT_FORMED, R1: DeadlineExceeded("no store")}, {R1}, set(), False),
        ({T: NOT_FORMED, R0: NOT_FORMED}, {R1}, set(), False),
        # Not known: those that lost each other, an epoch that is over, what all see alike.
        ({R0: LOST_R1, R1: PeerLost("rollout-1/0: lost rollout-0/0")}, set(), set(), False),
        ({R1: LOST_R1}, set(), set(), False),
        ({R1: Aborted("epoch 3 is over")}, set(), set(), False),
        ({T: TORCH, R0: TORCH, R1: TORCH}, set(), set(), False),
        ({T: TORCH}, set(), set(), False),
        ({T: DeadlineExceeded("60 s"), R0: DeadlineExceeded("60 s")}, set(), set(), False),
        ({}, set(), set(), False),
    ],
)
def test_a_round_has_failed_with(
    errors: dict[str, TandemError], failed: set[str], lost: set[str], is_trainer: bool
) -> None:
    found = blame(errors, T, [R0, R1, R2])
    assert (set(found.failed), set(found.lost), found.trainer is not None) == (failed, lost, is_trainer)


def test_a_name_is_not_taken_for_one_that_begins_alike() -> None:
    found = blame({T: PeerLost("lost rollout-10/0"), R0: PeerLost("lost my-rollout-1/0")}, T, [R0, R1, R2])
    assert dict(found.named) == {R0: 0, R1: 0, R2: 1}
