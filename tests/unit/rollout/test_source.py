"""A replica that is the source of a round sends what it has: nothing of it is paused, written, flipped or poisoned."""

import asyncio
from typing import Any

import pytest

from servicekit.errors import DigestMismatch, Internal, NotReady, PeerLost, PhaseOrder, StaleVersion
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.unit.rollout.test_updates import PAUSED, POISONED, SERVING, STAGED, Rig, a_round
from weightsync.round.phases import ABORT, COMMIT, PAUSE, PREPARE, TRANSFER, VERIFY

PHASES = [PREPARE, PAUSE, TRANSFER, VERIFY, COMMIT]


def seeding(version: int = 1, **fields: Any) -> pb.Round:
    return a_round("seeding", version, source="rollout-0", **fields)


async def serving() -> Rig:
    """A replica that serves version 1."""
    rig = Rig()
    await rig.seed(1)
    rig.states.clear()
    rig.outcomes.clear()
    rig.refused_s.clear()
    return rig


@pytest.mark.parametrize("mode", [pb.INSTALL_MODE_IN_PLACE, STAGED])
async def test_it_generates_all_the_while_and_is_left_as_it_was(mode: int) -> None:
    rig = await serving()
    rig.engine.hold()
    call = rig.call()
    for phase in PHASES:
        assert await rig.run(phase, round_=seeding(install_mode=mode)) == SERVING
        rig.updates.check_can_generate()
        assert not call.done()
    rig.engine.release()
    assert await call == 4
    assert (rig.updates.state, rig.updates.policy_version) == (SERVING, 1)
    assert rig.engine.calls == []
    assert set(rig.states) == {SERVING}
    assert (rig.outcomes, rig.refused_s) == ([], [])
    assert rig.ranks.phases == ["PREPARE", "PAUSE", "TRANSFER", "VERIFY", "COMMIT"]


@pytest.mark.parametrize("last", [PREPARE, TRANSFER])
@pytest.mark.parametrize("error", [PeerLost("lost rollout-1/0"), Internal("out of memory")])
async def test_whatever_fails_it_serves_what_it_has(last: int, error: Exception) -> None:
    rig = await serving()
    rig.ranks.fail_at[last] = error
    with pytest.raises(type(error)):
        await rig.run(PREPARE, TRANSFER, round_=seeding())
    assert await rig.run(ABORT, round_=seeding()) == SERVING
    rig.updates.check_can_generate()
    assert (rig.engine.calls, rig.outcomes, rig.updates.policy_version) == ([], [], 1)
    rig.ranks.fail_at.clear()
    assert await rig.run(*PHASES, round_=a_round(version=2)) == SERVING


async def test_bytes_that_have_changed_there_are_counted() -> None:
    rig = await serving()
    rig.ranks.fail_at[TRANSFER] = DigestMismatch("rollout-0/0: 1 of 9 messages differ from what it has verified")
    with pytest.raises(DigestMismatch):
        await rig.run(PREPARE, TRANSFER, round_=seeding())
    assert rig.outcomes == ["mismatch"]


async def test_one_without_verified_weights_of_the_version_refuses() -> None:
    rig = Rig()
    with pytest.raises(NotReady, match="no source of version 2: UNSEEDED"):
        await rig.run(PREPARE, round_=seeding(2))
    await rig.seed(1)
    with pytest.raises(NotReady, match="no source of version 2: SERVING at version 1"):
        await rig.run(PREPARE, round_=a_round("later", 2, source="rollout-0"))
    with pytest.raises(StaleVersion):
        await rig.run(PREPARE, round_=a_round("earlier", 0, source="rollout-0"))
    assert rig.ranks.phases == []


@pytest.mark.parametrize("state", [PAUSED, POISONED])
async def test_one_that_does_not_serve_now_refuses(state: int) -> None:
    rig = await serving()
    if state == PAUSED:
        await rig.updates.pause(pb.PAUSE_MODE_KEEP_KV)
    else:
        await rig.run(PREPARE, PAUSE, TRANSFER, ABORT, round_=a_round(version=1))
    with pytest.raises(NotReady, match="no source of version 1"):
        await rig.run(PREPARE, round_=seeding())
    assert rig.updates.state == state


async def test_a_pause_by_hand_meanwhile_outlasts_the_round() -> None:
    rig = await serving()
    await rig.run(PREPARE, round_=seeding())
    await rig.updates.pause(pb.PAUSE_MODE_KEEP_KV)
    assert await rig.run(TRANSFER, ABORT, round_=seeding()) == PAUSED
    await rig.updates.resume()
    assert rig.updates.state == SERVING


async def test_the_next_publication_ends_it() -> None:
    rig = await serving()
    await rig.run(PREPARE, round_=seeding())
    rig.ranks.gate.clear()
    sending = asyncio.create_task(rig.run(TRANSFER, round_=seeding()))
    await asyncio.sleep(0)
    publishing = asyncio.create_task(rig.run(*PHASES, round_=a_round(version=2)))
    rig.ranks.gate.set()
    await sending
    assert (await publishing, rig.updates.policy_version) == (SERVING, 2)
    with pytest.raises(PhaseOrder):
        await rig.run(COMMIT, round_=seeding())
    assert rig.outcomes == ["committed"]


async def test_the_source_of_another_name_is_a_receiver_like_any() -> None:
    rig = await serving()
    assert await rig.run(*PHASES, round_=a_round(version=1, source="rollout-9")) == SERVING
    assert "freeze" in rig.engine.calls
