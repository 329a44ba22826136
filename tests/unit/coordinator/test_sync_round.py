"""Which of several errors a round gives: that of the rank that failed, rather than those of its peers that lost it.

And what a round costs in which a participant has frozen.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.sync.sync_round import SECOND_CHANCE_S, Reports, SyncRound, raise_first, wait_for_cause
from servicekit.errors import DeadlineExceeded, DigestMismatch, PeerLost, TandemError
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_clients.flow import ReplicaOutcome
from tandem_clients.probing import NoAnswer
from weightsync.round.phases import ABORT, Phase


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


class _Service:
    """Client of a participant that is alive, but not through with PREPARE, or frozen."""

    def __init__(self, name: str, *, is_frozen: bool = False) -> None:
        self.name, self._is_frozen, self.rounds = name, is_frozen, self
        self.phases: list[Phase] = []
        self.timeouts_s: list[float] = []

    async def run_phases(self, phases: Sequence[Phase], _: pb.Round) -> Reports:
        self.phases += phases
        if self._is_frozen or ABORT not in phases:
            await asyncio.Event().wait()
        return []

    async def status(self, *, timeout_s: float) -> Any:
        self.timeouts_s.append(timeout_s)
        if self._is_frozen:
            await asyncio.sleep(timeout_s)
            raise DeadlineExceeded(f"{self.name}: Deadline Exceeded")
        return rollout_pb2.GetStatusResponse(state=pb.REPLICA_STATE_SERVING, policy_version=1)


async def test_a_frozen_replica_is_waited_for_once() -> None:
    probe_timeout_s = 2 * SECOND_CHANCE_S
    trainer, living, frozen = _Service("trainer"), _Service("rollout-0"), _Service("rollout-1", is_frozen=True)
    services: Any = (trainer, living, frozen)
    round_ = SyncRound(pb.Round(policy_version=2), services[0], services[1:], probe_timeout_s=probe_timeout_s)
    with pytest.raises(NoAnswer, match="rollout-1 no longer answers"):
        await round_.run()
    said = await round_.abort()
    assert "rollout-1 does not answer" in " ".join(said)
    assert all(service.phases[-1] == ABORT for service in (trainer, living, frozen))
    assert frozen.timeouts_s == [probe_timeout_s, SECOND_CHANCE_S]
    assert living.timeouts_s[-1] == probe_timeout_s
    assert round_.outcomes == {"rollout-0": ReplicaOutcome.ABORTED, "rollout-1": ReplicaOutcome.ABORTED}
