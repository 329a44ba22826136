"""Slots, leases, epochs and fencing against real servers: races, replays, replacements.

As a module, this is a process that holds a slot. Arguments: URL, group, slot, seconds of its lease.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from servicekit.errors import Aborted, AlreadyExists, TandemError, Unavailable
from servicekit.logs import configure_logging
from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tests.integration.redis.conftest import GROUP
from tests.kit.redis import RedisProcess
from tests.kit.waiting import until
from weightsync.membership.coordinator_lease import CoordinatorLease, fence_of
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Evicted, LeaseExpired, Rendezvous, SlotLease

pytestmark = pytest.mark.integration
TTL_S = 30.0
RACERS = [f"worker-{i}" for i in range(12)]


def race(action: Callable[[str], int]) -> dict[str, int | TandemError]:
    """All racers at once. Returns: what each has got."""
    start = Barrier(len(RACERS))

    def run(worker: str) -> int | TandemError:
        start.wait(timeout=10)
        try:
            return action(worker)
        except TandemError as error:
            return error

    with ThreadPoolExecutor(len(RACERS)) as pool:
        return dict(zip(RACERS, pool.map(run, RACERS), strict=True))


def test_of_two_coordinators_one_is_refused_by_name(group: Rendezvous) -> None:
    found = race(lambda worker: group.claim(COORDINATOR_SLOT, worker, TTL_S))
    (winner,) = [worker for worker, answer in found.items() if not isinstance(answer, TandemError)]
    assert group.snapshot().members == {COORDINATOR_SLOT: winner}
    for worker in set(RACERS) - {winner}:
        assert isinstance(found[worker], AlreadyExists)
        assert str(found[worker]) == f"slot coordinator of {GROUP} is held by worker {winner}; its lease is alive"
        with pytest.raises(Evicted):
            group.confirm(COORDINATOR_SLOT, worker, group.snapshot().epoch)


def test_the_last_slot_has_one_holder_and_every_loser_is_told(group: Rendezvous) -> None:
    group.join("trainer/0", "trainer", TTL_S)
    epochs = race(lambda worker: group.join("rollout-0/0", worker, TTL_S))
    now = group.snapshot()
    holder = now.members["rollout-0/0"]
    assert len(set(epochs.values())) == len(RACERS)  # each change of the holder is an epoch of its own
    assert epochs[holder] == now.epoch
    for worker in RACERS:
        expected = "ok" if worker == holder else "evicted"
        assert group.heartbeat("rollout-0/0", worker, TTL_S) == expected


def test_a_replayed_message_changes_nothing(group: Rendezvous) -> None:
    epoch = group.join("trainer/0", "a", TTL_S)
    assert group.join("trainer/0", "a", TTL_S) == epoch
    assert group.claim("trainer/0", "a", TTL_S) == epoch
    group.bind_endpoint("trainer/0", "a", epoch, "host:1")
    group.bind_endpoint("trainer/0", "a", epoch, "host:1")
    assert group.heartbeat("trainer/0", "a", TTL_S) == "ok"
    assert (group.snapshot().epoch, group.snapshot().endpoint) == (epoch, "host:1")
    group.leave("trainer/0", "a")
    left = group.snapshot()
    group.leave("trainer/0", "a")
    assert group.snapshot() == left


def test_late_messages_of_a_replaced_worker_change_nothing(group: Rendezvous) -> None:
    old = group.join("trainer/0", "a", TTL_S)
    new = group.join("trainer/0", "b", TTL_S)
    assert new == old + 1  # the same slot, but another incarnation
    group.bind_endpoint("trainer/0", "b", new, "host:2")
    before = group.snapshot()
    for epoch in (old, new):
        with pytest.raises(Evicted, match="worker a no longer holds this slot"):
            group.bind_endpoint("trainer/0", "a", epoch, "host:1")
        with pytest.raises(Evicted):
            group.confirm("trainer/0", "a", epoch)
    assert group.heartbeat("trainer/0", "a", TTL_S) == "evicted"
    group.leave("trainer/0", "a")
    assert group.snapshot() == before


def test_an_epoch_is_over_for_the_slots_that_have_changed_since_and_for_no_others(group: Rendezvous) -> None:
    old = group.join("trainer/0", "a", TTL_S)
    new = group.join("rollout-0/0", "b", TTL_S)
    group.confirm("trainer/0", "a", old, ["trainer/0"])
    group.confirm("trainer/0", "a", new, ["trainer/0", "rollout-0/0"])
    group.join("rollout-9/0", "stranger", TTL_S)
    group.leave("rollout-9/0", "stranger")
    group.confirm("trainer/0", "a", new, ["trainer/0", "rollout-0/0"])
    assert group.snapshot().newest(["trainer/0", "rollout-0/0"]) == new
    for epoch, slots in ((old, ["rollout-0/0"]), (new, ["rollout-9/0"]), (2 * new, ["trainer/0"])):
        with pytest.raises(Aborted, match=f"epoch {epoch} of {GROUP} is over, it is {new + 2}"):
            group.confirm("trainer/0", "a", epoch, slots)


@pytest.mark.parametrize("how", ["replaced", "left", "expired", "back"])
def test_any_change_of_a_slot_ends_the_epochs_before_it(group: Rendezvous, how: str) -> None:
    group.join("trainer/0", "a", TTL_S)
    epoch = group.join("rollout-0/0", "b", 0.1 if how == "expired" else TTL_S)
    if how == "replaced":
        group.join("rollout-0/0", "c", TTL_S)
    elif how == "expired":
        until(lambda: "rollout-0/0" not in group.snapshot().members)
    else:
        group.leave("rollout-0/0", "b")
    if how == "back":
        group.claim("rollout-0/0", "b", TTL_S)
    with pytest.raises(Aborted):
        group.confirm("trainer/0", "a", epoch, ["rollout-0/0"])
    assert group.snapshot().newest(["rollout-0/0"]) > epoch


def test_the_store_of_a_later_round_is_not_replaced_by_that_of_an_earlier_one(group: Rendezvous) -> None:
    old = group.join("trainer/0", "a", TTL_S)
    new = group.join("rollout-0/0", "b", TTL_S)
    group.bind_endpoint("trainer/0", "a", old, "host:1")
    group.bind_endpoint("rollout-0/0", "b", new, "host:2")
    with pytest.raises(Aborted, match=f"epoch {old} of {GROUP} is over, it is {new}"):
        group.bind_endpoint("trainer/0", "a", old, "host:1")
    assert group.snapshot().endpoint == "host:2"
    group.bind_endpoint("trainer/0", "a", new, "host:3")
    assert group.snapshot().endpoint == "host:3"


def test_a_claim_waits_for_a_lease_that_runs_out(group: Rendezvous) -> None:
    group.claim(COORDINATOR_SLOT, "dead", 0.2)
    lease = CoordinatorLease(group, TTL_S)
    lease.claim(timeout_s=10.0)
    assert group.snapshot().members == {COORDINATOR_SLOT: lease.worker_id}
    rival = CoordinatorLease(group, TTL_S)
    with pytest.raises(AlreadyExists, match=lease.worker_id):
        rival.claim(timeout_s=0.1)
    lease.close()
    assert group.snapshot().members == {}


class Interrupted(Rendezvous):
    """Between the answer to a heartbeat and what follows from it, another worker takes the slot."""

    def heartbeat(self, slot: str, worker_id: str, ttl_s: float) -> str:
        answer = super().heartbeat(slot, worker_id, ttl_s)
        self.join(slot, "newer", TTL_S)
        return answer


def set_back(group: Rendezvous, slots: Iterable[str]) -> None:
    """What leases look like when the clock of Redis was set back by an hour: an hour longer."""
    for slot in slots:
        group._redis.zincrby(f"{{{GROUP}}}:leases", 3_600_000.0, slot)


def test_a_clock_that_was_set_back_keeps_no_slot_for_the_dead(group: Rendezvous) -> None:
    """They keep it for one lease more."""
    group.lead(COORDINATOR_SLOT, "dead", 1.0)
    group.join("rollout-0/0", "dead", 1.0)
    set_back(group, (COORDINATOR_SLOT, "rollout-0/0"))
    lead = CoordinatorLease(group, 1.0)
    with pytest.raises(AlreadyExists):
        lead.claim(0.1)
    lead.claim(5.0)
    until(lambda: set(group.snapshot().members) == {COORDINATOR_SLOT})
    lead.close()


@pytest.mark.parametrize("lost", ["nothing", "state"])
def test_a_clock_that_was_set_back_takes_no_slot_from_the_living(group: Rendezvous, lost: str) -> None:
    """Nor from one whose lease is longer than the others'."""
    group.join("trainer/0", "long", TTL_S)
    if lost == "state":
        group._redis.delete(f"{{{GROUP}}}:state")
    group.join("rollout-0/0", "short", 0.3)
    set_back(group, ("trainer/0", "rollout-0/0"))
    before = group.snapshot()
    assert set(before.members) == {"trainer/0", "rollout-0/0"}
    found: Any = group._redis.zrange(f"{{{GROUP}}}:leases", 0, -1, withscores=True)
    now_s: Any = group._redis.time()[0]
    assert all(TTL_S - 5 < score / 1000 - now_s <= TTL_S + 1 for _, score in found)
    assert group.heartbeat("rollout-0/0", "short", 0.3) == "ok"
    until(lambda: set(group.snapshot().members) == {"trainer/0"})


def test_who_was_away_does_not_take_its_slot_from_a_newer_one(server: Callable[..., RedisProcess]) -> None:
    group = Interrupted(server().url, GROUP)
    lease = SlotLease(group, "rollout-0/0", TTL_S)
    lease._beat()  # "unknown": the lease had run out
    with pytest.raises(Evicted, match="replaced by a newer one"):
        lease.check()
    lease.close()
    assert group.snapshot().members == {"rollout-0/0": "newer"}


def is_refused(lease: SlotLease, group: Rendezvous) -> bool:
    """Whether a rank finds that an intruder has its slot, which has it for a moment, from each call of this on."""
    group.join("rollout-0/0", "intruder", 0.6)
    try:
        lease.check()
    except Evicted:
        return True
    return False


def test_a_rank_whose_slot_another_held_for_a_while_comes_back(group: Rendezvous) -> None:
    lease = SlotLease(group, "rollout-0/0", 0.3, '{"device": "cpu"}')
    lease.start()
    until(lambda: is_refused(lease, group))
    until(lambda: not lease.evicted)
    assert group.snapshot().members == {"rollout-0/0": lease.worker_id}
    assert group.facts() == {"rollout-0/0": '{"device": "cpu"}'}
    lease.check()
    lease.close()


def test_a_rank_that_was_replaced_for_good_ends_by_name(group: Rendezvous) -> None:
    lost: list[str] = []
    lease, newer = SlotLease(group, "rollout-0/0", 0.3, on_lost=lost.append), SlotLease(group, "rollout-0/0", 0.3)
    lease.start()
    newer.start()
    until(lambda: lost != [])
    assert lost == [f"another worker holds the slot rollout-0/0 of {GROUP}"]
    assert group.snapshot().members == {"rollout-0/0": newer.worker_id}
    for each in (lease, newer):
        each.close()


def test_a_coordinator_s_fence_grows_with_each_and_stays_with_one(server: Callable[..., RedisProcess]) -> None:
    process = server()
    group = Rendezvous(process.url, GROUP)
    first = CoordinatorLease(group, TTL_S)
    first.claim(0.0)
    fence = first.fence
    first.hold()
    process.restart()  # empty: its slot is free, and nobody has led since
    first.hold()
    assert first.fence == fence
    assert group.snapshot().members == {COORDINATOR_SLOT: first.worker_id}
    process.restart()
    second = CoordinatorLease(group, TTL_S)
    second.claim(0.0)
    assert second.fence.token > fence.token
    second.close()
    assert group.snapshot().members == {}
    with pytest.raises(Evicted, match="replaced"):  # empty once more, but another has led the run
        first.hold()
    assert not first.is_held
    first.close()


def test_a_coordinator_that_is_only_late_confirms_under_a_new_epoch(group: Rendezvous) -> None:
    lease = CoordinatorLease(group, TTL_S)
    lease.claim(0.0)
    epoch = group.snapshot().epoch
    group.leave(COORDINATOR_SLOT, lease.worker_id)
    with pytest.raises(LeaseExpired):
        lease.confirm(epoch)
    lease.confirm(group.snapshot().epoch)
    lease.close()


def test_a_service_that_starts_knows_the_newest_leader_alive_or_not(server: Callable[..., RedisProcess]) -> None:
    url, run_id = server().url, GROUP.removeprefix("tandem:")
    group = Rendezvous(url, GROUP)
    assert fence_of(url, run_id, 0.0)._newest.token == 0
    first = group.lead(COORDINATOR_SLOT, "first", TTL_S)
    known = fence_of(url, run_id, 0.0)
    assert known._newest == CoordinatorFence(worker_id="first", token=first)
    group.leave(COORDINATOR_SLOT, "first")
    assert fence_of(url, run_id, 0.0)._newest == CoordinatorFence(worker_id="first", token=first)
    with pytest.raises(Unavailable, match="as Redis has it, coordinator first"):
        known.admit(CoordinatorFence(worker_id="x", token=first + 1))
    second = group.lead(COORDINATOR_SLOT, "second", TTL_S)
    assert second > first
    known.admit(CoordinatorFence(worker_id="second", token=second))
    assert fence_of(url, run_id, 0.0)._newest == known._newest == CoordinatorFence(worker_id="second", token=second)


def test_a_coordinator_that_was_replaced_is_told_at_once(group: Rendezvous) -> None:
    lost: list[str] = []
    lease = CoordinatorLease(group, 0.3, lost.append)
    lease.claim(0.0)
    group.leave(COORDINATOR_SLOT, lease.worker_id)
    group.lead(COORDINATOR_SLOT, "newer", TTL_S)
    until(lambda: lost != [])
    with pytest.raises(Evicted):
        lease.hold()
    lease.close()


@pytest.fixture
def holder(spawn: "Callable[..., subprocess.Popen[str]]") -> "Callable[[str], subprocess.Popen[str]]":
    """Starts processes that hold a slot of the group at a URL, under a short lease."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return lambda url: spawn("tests.integration.redis.test_rendezvous", url, GROUP, "trainer/0", "1.0", **pipes)


def ask(process: "subprocess.Popen[str]", epoch: int) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{epoch}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.parametrize("expired", [True, False])
def test_a_paused_process_that_wakes_after_its_eviction_is_fenced(
    server: Callable[..., RedisProcess], holder: "Callable[[str], subprocess.Popen[str]]", expired: bool
) -> None:
    url = server().url
    group, process = Rendezvous(url, GROUP), holder(url)
    assert process.stdout is not None
    worker = process.stdout.readline().strip()
    assert group.snapshot().members == {"trainer/0": worker}
    assert ask(process, group.snapshot().epoch) == "ok"
    process.send_signal(signal.SIGSTOP)
    if expired:
        until(lambda: group.snapshot().members == {})
    epoch = group.join("trainer/0", "newer", TTL_S)
    process.send_signal(signal.SIGCONT)
    assert ask(process, epoch) == "Evicted"
    assert group.snapshot().members == {"trainer/0": "newer"}


def test_a_paused_process_that_nobody_replaced_comes_back_in_a_new_epoch(
    server: Callable[..., RedisProcess], holder: "Callable[[str], subprocess.Popen[str]]"
) -> None:
    url = server().url
    group, process = Rendezvous(url, GROUP), holder(url)
    assert process.stdout is not None
    worker = process.stdout.readline().strip()
    old = group.snapshot().epoch
    process.send_signal(signal.SIGSTOP)
    until(lambda: group.snapshot().members == {})
    process.send_signal(signal.SIGCONT)
    until(lambda: group.snapshot().members == {"trainer/0": worker})
    assert group.snapshot().epoch == old + 2  # it was gone, and it is back
    assert ask(process, old) == "Aborted"


def hold_slot(url: str, group: str, slot: str, ttl_s: str) -> None:
    """Say our worker id; then, for each epoch read from stdin, whether we may act in it: "ok" or the error's name."""
    configure_logging("holder")
    lease = SlotLease(Rendezvous(url, group), slot, float(ttl_s))
    lease.start()
    print(lease.worker_id, flush=True)
    for line in sys.stdin:
        try:
            lease.rendezvous.bind_endpoint(slot, lease.worker_id, int(line), "127.0.0.1:1")
            print("ok", flush=True)
        except TandemError as error:
            print(type(error).__name__, flush=True)
    lease.close()


if __name__ == "__main__":
    hold_slot(*sys.argv[1:])
