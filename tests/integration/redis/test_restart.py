"""A Redis that crashes in the middle of things: with its append-only file it forgets nothing, without it everything."""

from collections.abc import Callable

import pytest

from servicekit.errors import Unavailable
from tests.integration.redis.conftest import GROUP
from tests.kit.redis import RedisProcess
from tests.kit.waiting import until
from weightsync.membership.rendezvous import Evicted, Rendezvous, SlotLease

pytestmark = pytest.mark.integration
TTL_S = 30.0


def test_with_the_file_members_epoch_and_fencing_survive(server: Callable[..., RedisProcess]) -> None:
    process = server(append_only=True)
    group = Rendezvous(process.url, GROUP)
    group.join("trainer/0", "evicted", TTL_S)
    epoch = group.join("trainer/0", "a", TTL_S)
    group.bind_endpoint("trainer/0", "a", epoch, "host:1")
    before = group.snapshot()
    process.kill()
    with pytest.raises(Unavailable):
        group.snapshot()
    process.start()
    assert group.snapshot() == before
    assert group.heartbeat("trainer/0", "evicted", TTL_S) == "evicted"
    with pytest.raises(Evicted):
        group.bind_endpoint("trainer/0", "evicted", epoch, "host:2")


def test_with_the_file_a_lease_that_ran_out_meanwhile_is_over(server: Callable[..., RedisProcess]) -> None:
    process = server(append_only=True)
    group = Rendezvous(process.url, GROUP)
    group.join("trainer/0", "a", TTL_S)
    epoch = group.join("rollout-0/0", "b", 0.05)
    process.restart()
    until(lambda: group.snapshot().members == {"trainer/0": "a"})
    assert group.snapshot().epoch == epoch + 1


def test_without_the_file_workers_come_back_in_a_later_epoch(server: Callable[..., RedisProcess]) -> None:
    process = server()
    group = Rendezvous(process.url, GROUP)
    leases = [SlotLease(group, slot, 0.6) for slot in ("trainer/0", "rollout-0/0")]
    for lease in leases:
        lease.start()
    # Many changes: the epochs after the crash must be greater all the same.
    for i in range(50):
        group.join("rollout-1/0", f"worker-{i}", TTL_S)
    before = group.snapshot()
    process.restart()
    back = group.wait_for([lease.slot for lease in leases], 10.0)
    assert back.epoch > before.epoch
    assert back.members == {lease.slot: lease.worker_id for lease in leases}
    assert not any(lease.evicted for lease in leases)
    for lease in leases:
        lease.close()


def test_without_the_file_who_comes_back_takes_no_slot_from_another(server: Callable[..., RedisProcess]) -> None:
    process = server()
    group = Rendezvous(process.url, GROUP)
    lease = SlotLease(group, "trainer/0", 0.6)
    lease.start()
    process.kill()
    process.start()
    group.join("trainer/0", "newer", TTL_S)
    until(lambda: lease.evicted)
    assert group.snapshot().members == {"trainer/0": "newer"}
    lease.close()
