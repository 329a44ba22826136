"""What another program, or a damaged dump, leaves in a group's keys: told by name, and healed by what is advised."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis

from servicekit.errors import Aborted, AlreadyExists, Unavailable
from tests.integration.redis.conftest import GROUP
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Rendezvous, SlotLease

pytestmark = pytest.mark.integration
TTL_S = 30.0
SLOT = "trainer/0"
STATE, FACTS = f"{{{GROUP}}}:state", f"{{{GROUP}}}:facts"
OPERATIONS: dict[str, Callable[[Rendezvous, str], object]] = {
    "join": lambda group, worker: group.join(SLOT, worker, TTL_S),
    "claim": lambda group, worker: group.claim(SLOT, worker, TTL_S),
    "lead": lambda group, _: group.lead(COORDINATOR_SLOT, "another", TTL_S),
    "leader": lambda group, _: group.leader(),
    "heartbeat": lambda group, worker: group.heartbeat(SLOT, worker, TTL_S),
    "confirm": lambda group, worker: group.confirm(SLOT, worker, 1),
    "bind": lambda group, worker: group.bind_endpoint(SLOT, worker, 1, "host:1"),
    "snapshot": lambda group, _: group.snapshot(),
    "facts": lambda group, _: group.facts(),
    "leave": lambda group, worker: group.leave(SLOT, worker),
}
Damage = Callable[["redis.Redis"], object]
FIELDS = [
    (field, text)
    for field in ("epoch", "token", "longest")
    for text in ("abc", "", "-5", "1.5", "1e3", "9" * 20, "\x00")
]
KINDS = ("members", "leases", "state", "facts")


def settled(group: Rendezvous) -> tuple["redis.Redis", SlotLease, CoordinatorLease]:
    """A group with a rank and a coordinator, whose leases are renewed by the test alone."""
    lease, lead = SlotLease(group, SLOT, TTL_S, json.dumps({"torch": "2.13"})), CoordinatorLease(group, TTL_S)
    for each in (lease, lead):
        each._take_again()
    return group._redis, lease, lead


def healthy(group: Rendezvous, lease: SlotLease, lead: CoordinatorLease) -> None:
    """The next renewals bring back what was lost; then all is as it should be, and the epoch has not gone back."""
    lease._beat()
    lead._beat()
    now = group.snapshot()
    assert now.members == {SLOT: lease.worker_id, COORDINATOR_SLOT: lead.worker_id}
    group.confirm(SLOT, lease.worker_id, now.epoch)
    group.bind_endpoint(SLOT, lease.worker_id, now.epoch, "host:1 round")
    assert group.snapshot().endpoint == "host:1 round"
    assert json.loads(group.facts()[SLOT]) == {"torch": "2.13"}
    assert lead.is_held
    assert not lease.evicted


@pytest.mark.parametrize(("field", "text"), FIELDS)
def test_a_number_that_is_none_is_named_by_every_operation(group: Rendezvous, field: str, text: str) -> None:
    client, lease, lead = settled(group)
    client.hset(STATE, field, text)
    for name, operation in OPERATIONS.items():
        with pytest.raises(Unavailable, match=re.escape(f"redis-cli hdel '{STATE}' {field}")) as caught:
            operation(group, lease.worker_id)
        assert repr(text[:80]) in str(caught.value), name
    client.hdel(STATE, field)
    healthy(group, lease, lead)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", ["string", "list"])
def test_a_key_of_another_type_is_named_by_who_needs_it(group: Rendezvous, kind: str, value: str) -> None:
    client, lease, lead = settled(group)
    key = f"{{{GROUP}}}:{kind}"
    client.delete(key)
    client.set(key, "x") if value == "string" else client.rpush(key, "x")
    told: list[str] = []
    for operation in OPERATIONS.values():
        try:
            operation(group, lease.worker_id)
        except Unavailable as error:
            told.append(str(error))
        except (Aborted, AlreadyExists):  # of an epoch, or a worker, that is not the present one
            pass
    assert len(told) >= 2
    assert all(f"the key {key} is no " in text and "remove it" in text for text in told), told
    client.delete(key)
    lease._take_again()  # it was left by the last operation where that was possible
    healthy(group, lease, lead)


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_lost_comes_back(group: Rendezvous, kind: str) -> None:
    client, lease, lead = settled(group)
    before = group.snapshot().epoch
    client.delete(f"{{{GROUP}}}:{kind}")
    assert group.snapshot().epoch != 0
    healthy(group, lease, lead)
    assert group.snapshot().epoch >= before


def test_epochs_grow_however_fast_the_state_is_lost(group: Rendezvous) -> None:
    epochs = []
    for worker in range(100):
        epochs.append(group.join(SLOT, f"w{worker}", TTL_S))
        group._redis.delete(STATE)
    assert epochs == sorted(set(epochs))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "5", '"x"', "[" * 100_000, b"\xff\xfe"])
def test_facts_that_cannot_be_read_are_named_and_told_again(group: Rendezvous, text: str | bytes) -> None:
    client, lease, lead = settled(group)
    client.hset(FACTS, SLOT, text)
    if text != "[]":  # Lua cannot tell it from an object
        with pytest.raises(Unavailable, match=re.escape(f"{SLOT} of the hash {FACTS}")):
            group.facts()
        healthy(group, lease, lead)
    else:
        with pytest.raises(Unavailable, match="no JSON object"):
            group.facts()


@pytest.mark.parametrize(
    ("fields", "endpoint"),
    [
        ({"endpoint_epoch": "abc"}, None),
        ({"endpoint_epoch": b"\xff"}, None),
        ({"endpoint_epoch": "1"}, None),
        ({"endpoint": "nowhere"}, "endpoint of the hash"),
        ({"endpoint": b"\xff:\xff"}, "endpoint of the hash"),
        ({"leader": b"\xff"}, None),
    ],
)
def test_other_fields_of_the_state(group: Rendezvous, fields: dict[Any, Any], endpoint: str | None) -> None:
    client, lease, lead = settled(group)
    group.bind_endpoint(SLOT, lease.worker_id, group.snapshot().epoch, "host:1 round")
    client.hset(STATE, mapping=fields)
    group.leader()
    if endpoint is not None:
        with pytest.raises(Unavailable, match=endpoint):
            group.snapshot()
        client.hdel(STATE, "endpoint")
        with pytest.raises(Unavailable):
            group.snapshot()
        group.bind_endpoint(SLOT, lease.worker_id, int(str(client.hget(STATE, "epoch"))), "host:1 round")
    healthy(group, lease, lead)
