"""A replica whose coordinator dies in a round, is replaced, or gives the round up while a phase is under way."""

import asyncio
from typing import Any

import pytest

from servicekit.errors import Aborted, PhaseOrder
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.waiting import until
from tests.unit.rollout.test_updates import IN_PLACE, POISONED, SERVING, STAGED, Rig, a_round
from weightsync.round import deadlines
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PHASES, PREPARE, TRANSFER, VERIFY

# Deadlines of a round that is given up soon; a phase of a fake takes less than a millisecond.
SOON: dict[str, Any] = {"formation_timeout_s": 0.02, "transfer_timeout_s": 0.02}
BEFORE_COMMIT = PHASES[:-1]


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "SILENCE_MARGIN_S", 0.02)


async def settled(rig: Rig) -> None:
    def over() -> bool:
        resting = not rig.pauses.paused or rig.updates.state == POISONED
        return "ABORT" in rig.ranks.phases and resting

    await asyncio.to_thread(until, over)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize(("install", "touched"), [(IN_PLACE, POISONED), (STAGED, SERVING)])
@pytest.mark.parametrize("last", BEFORE_COMMIT)
async def test_a_round_of_which_no_more_is_heard_is_given_up(
    install: pb.InstallMode.ValueType, touched: int, last: pb.RoundPhase.ValueType
) -> None:
    rig = Rig()
    await rig.seed()
    round_ = a_round(install_mode=install, **SOON)
    await rig.run(*PHASES[: PHASES.index(last) + 1], round_=round_)
    await settled(rig)
    assert rig.updates.state == (SERVING if last in (PREPARE, PAUSE) else touched)
    assert rig.updates.policy_version == 1
    with pytest.raises(PhaseOrder):
        await rig.run(COMMIT, round_=round_)


@pytest.mark.usefixtures("_impatient")
async def test_a_round_that_goes_on_is_not_given_up() -> None:
    rig = Rig()
    await rig.seed()
    round_ = a_round(**SOON)
    rig.ranks.gate.clear()
    running = asyncio.create_task(rig.run(PREPARE, round_=round_))
    await asyncio.sleep(0.2)  # a phase under way has deadlines of its own
    rig.ranks.gate.set()
    await running
    assert await rig.run(PAUSE, TRANSFER, VERIFY, COMMIT, round_=round_) == SERVING
    await asyncio.sleep(0.1)
    assert "ABORT" not in rig.ranks.phases
    assert rig.updates.policy_version == 2


async def test_a_round_of_an_older_epoch_does_not_end_the_open_one() -> None:
    rig = Rig()
    await rig.run(PREPARE, PAUSE, round_=a_round("new", epoch=7))
    with pytest.raises(Aborted, match="round old is of epoch 6; new of epoch 7 is open"):
        await rig.run(PREPARE, round_=a_round("old", epoch=6))
    assert await rig.run(TRANSFER, VERIFY, COMMIT, round_=a_round("new", epoch=7)) == SERVING


async def test_giving_up_reaches_the_ranks_while_a_phase_is_under_way() -> None:
    rig = Rig()
    await rig.seed()
    round_ = a_round()
    await rig.run(PREPARE, PAUSE, round_=round_)
    rig.ranks.gate.clear()
    transfer = asyncio.create_task(rig.run(TRANSFER, round_=round_))
    await asyncio.to_thread(until, lambda: "TRANSFER" in rig.ranks.phases)
    abort = asyncio.create_task(rig.run(ABORT, round_=round_))
    await asyncio.to_thread(until, lambda: "ABORT" in rig.ranks.phases)  # the ranks hear of it, and end the transfer
    rig.ranks.gate.set()
    await transfer
    assert await abort == POISONED
