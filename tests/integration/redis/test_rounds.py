"""Rounds of real members while leases run out and slots change hands, at each phase."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from servicekit.errors import Aborted, DeadlineExceeded
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import GROUP, Fleet
from tests.kit.redis import RedisProcess
from tests.kit.stores import same, tiny_spec
from tests.kit.waiting import until
from weightsync.layouts.layout import Parallel
from weightsync.membership.rendezvous import Evicted, Rendezvous
from weightsync.round.phases import PHASES

pytestmark = pytest.mark.integration
VICTIM = "rollout-0/0"


@pytest.fixture
def fleet(server: Callable[..., RedisProcess]) -> Iterator[Fleet]:
    sizes = {"rollout-0": Parallel(), "rollout-1": Parallel()}
    with Fleet(server().url, tiny_spec(), Parallel(tensor=2), sizes) as them:
        yield them


def expire(fleet: Fleet, slot: str) -> None:
    """The slot's lease runs out now, whatever its holder does."""
    with redis.Redis.from_url(fleet.redis_url) as client:
        client.zadd(f"{{{GROUP}}}:leases", {slot: 0})
    assert slot not in Rendezvous(fleet.redis_url, GROUP).snapshot().members


def run_until(fleet: Fleet, round_: pb.Round, end: int) -> None:
    for phase in PHASES[: PHASES.index(end)]:
        assert not any(isinstance(answer, Exception) for answer in fleet.run(phase, round_).values())


@pytest.mark.parametrize("phase", PHASES[1:], ids=pb.RoundPhase.Name)
def test_a_lease_that_runs_out_in_a_round_does_not_undo_it(fleet: Fleet, phase: pb.RoundPhase.ValueType) -> None:
    round_ = fleet.round(1)
    run_until(fleet, round_, phase)
    expire(fleet, VICTIM)
    for each in PHASES[PHASES.index(phase) :]:
        assert not any(isinstance(answer, Exception) for answer in fleet.run(each, round_).values())
    assert same(fleet.stores[VICTIM], fleet.expected(VICTIM)) == []
    # Its next heartbeat brings it back, in an epoch in which all meet anew.
    fleet.members[VICTIM]._lease._beat()
    fleet.sync(fleet.round(2))


def test_a_lease_that_ran_out_before_a_round_makes_its_epoch_stale(fleet: Fleet) -> None:
    round_ = fleet.round(1)
    expire(fleet, VICTIM)
    outcome = fleet.run(pb.ROUND_PHASE_PREPARE, round_)
    assert {type(answer) for answer in outcome.values()} == {Aborted}
    assert f"epoch {round_.epoch} of {GROUP} is over" in str(outcome["trainer/0"])


def test_a_lease_that_runs_out_while_prepare_waits_for_it_ends_the_epoch(fleet: Fleet) -> None:
    """The others have looked and wait for the victim, whose lease is over before it comes."""
    round_ = fleet.round(1, formation_timeout_s=1.0)
    early = [slot for slot in fleet.members if slot != VICTIM]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet.run_each, pb.ROUND_PHASE_PREPARE, dict.fromkeys(early, round_))
        until(lambda: Rendezvous(fleet.redis_url, GROUP).snapshot().endpoint is not None)
        expire(fleet, VICTIM)
        with pytest.raises(Aborted, match=f"epoch {round_.epoch} of {GROUP} is over"):
            fleet.members[VICTIM].run_phase(pb.ROUND_PHASE_PREPARE, round_)
        outcome = waiting.result(timeout=30)
    assert {type(answer) for answer in outcome.values()} <= {Aborted, DeadlineExceeded}
    assert VICTIM in str(outcome["trainer/0"])  # who did not come
    fleet.run(pb.ROUND_PHASE_ABORT, round_)
    fleet.members[VICTIM]._lease._beat()
    fleet.sync(fleet.round(2))
    assert same(fleet.stores[VICTIM], fleet.expected(VICTIM)) == []


@pytest.mark.parametrize("phase", PHASES, ids=pb.RoundPhase.Name)
def test_a_worker_replaced_in_its_slot_acts_no_more(fleet: Fleet, phase: pb.RoundPhase.ValueType) -> None:
    round_ = fleet.round(1)
    run_until(fleet, round_, phase)
    Rendezvous(fleet.redis_url, GROUP).join(VICTIM, "newer", 30.0)
    fleet.members[VICTIM]._lease._beat()
    with pytest.raises(Evicted, match="replaced by a newer one"):
        fleet.members[VICTIM].run_phase(phase, round_)
    fleet.members[VICTIM].run_phase(pb.ROUND_PHASE_ABORT, round_)  # giving up is allowed


def test_a_replaced_worker_is_found_out_before_its_heartbeat_tells_it(fleet: Fleet) -> None:
    Rendezvous(fleet.redis_url, GROUP).join(VICTIM, "newer", 30.0)
    outcome = fleet.run(pb.ROUND_PHASE_PREPARE, fleet.round(1, formation_timeout_s=0.5))
    assert isinstance(outcome[VICTIM], Evicted)
    assert "another worker holds this slot" in str(outcome[VICTIM])
