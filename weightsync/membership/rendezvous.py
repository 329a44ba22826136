"""The members of a weight group: slots, leases and epochs in Redis, changed by one Lua script."""

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from servicekit.addresses import split_address
from servicekit.errors import Aborted, AlreadyExists, DeadlineExceeded, SlotTaken, Unavailable
from servicekit.logs import get_logger
from servicekit.metrics import LEASE_FAILURES
from servicekit.redis.client import Kind, connect, redis_errors
from servicekit.redis.lease import Lease
from tandem_api.common.v1 import common_pb2

POLL_S = 0.01  # a poll of a condition in Redis; a pass costs 0.1 ms, members appear within tens of ms
_KINDS: dict[str, Kind] = {
    "members": "hash",
    "leases": "sorted set",
    "state": "hash",
    "facts": "hash",
    "since": "hash",
}
COORDINATOR_SLOT = "coordinator"  # held by the one that may begin rounds

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Membership:
    """A snapshot of a group; `members` are worker ids by slot.

    Attributes:
        endpoint: "host:port" of the TCP store that was bound last; None: none was.
        since: the epoch in which each slot was taken, as far as it is known.
    """

    epoch: int
    members: dict[str, str]
    endpoint: str | None
    since: dict[str, int] = field(default_factory=dict)

    def newest(self, slots: Iterable[str]) -> int:
        """Return the last epoch that one of these slots has made: what strangers do changes nothing in a round."""
        return max(self.since.get(slot, self.epoch) for slot in slots)


class Evicted(SlotTaken):
    """Another worker has this worker's slot, so this one must not act in the group; on the wire it is a SlotTaken."""


class LeaseExpired(Aborted, reason="LEASE_EXPIRED"):
    """This worker's slot is free: its lease expired, or Redis lost its data. It may take the slot again."""


class Rendezvous:
    """A view of a group, and its operations. Thread-safe (redis-py connections are pooled)."""

    def __init__(self, redis_url: str, group: str) -> None:
        self.group = group
        self._redis = connect(redis_url)
        source = resources.files("weightsync.membership").joinpath("lua/group.lua").read_text(encoding="utf-8")
        self._script = self._redis.register_script(source)
        # One hash tag: all keys of a group live in one Redis Cluster slot.
        self._kinds: dict[str, Kind] = {f"{{{group}}}:{name}": kind for name, kind in _KINDS.items()}

    def _call(self, *args: str | int) -> list[Any]:
        """Run an operation of the script. Raises: Unavailable: no answer, or what Redis holds is not a group's."""
        with redis_errors(self._redis, self._kinds):
            reply = self._script(keys=list(self._kinds), args=list(args))
        answer = [item.decode() if isinstance(item, bytes) else item for item in reply]
        if answer[0] == "damaged":
            raise self._damaged("state", str(answer[2]), str(answer[3]), "no number of ours")
        return answer

    def _damaged(self, key: str, field: str, text: str, what: str) -> Unavailable:
        name = f"{{{self.group}}}:{key}"
        return Unavailable(
            f"the weight group in Redis is damaged: {field} of the hash {name} is {text[:80]!r}, {what}: "
            f"remove it (redis-cli hdel '{name}' {field}), and it is made anew"
        )

    def join(self, slot: str, worker_id: str, ttl_s: float, facts: str = "{}") -> int:
        """Take a slot, even from another worker.

        Args:
            ttl_s: seconds of the lease.
            facts: JSON that the other members can read.
        Returns: the epoch.
        """
        return int(self._call("join", slot, worker_id, int(ttl_s * 1000), facts)[1])

    def claim(self, slot: str, worker_id: str, ttl_s: float, facts: str = "{}") -> int:
        """Take a slot that is free or this worker's. Returns: the epoch. Raises: AlreadyExists: with the holder."""
        return int(self._taken(slot, self._call("claim", slot, worker_id, int(ttl_s * 1000), facts))[1])

    def lead(self, slot: str, worker_id: str, ttl_s: float, token: int = 0) -> int:
        """Take the coordinator's slot if it is free or this worker's.

        Args:
            token: that of an earlier claim of this worker, which it keeps; 0: it had none.
        Returns: the token, greater than those of all workers that had the slot before.
        Raises: AlreadyExists: with the holder; Evicted: another worker has had the slot since.
        """
        answer = self._taken(slot, self._call("lead", slot, worker_id, int(ttl_s * 1000), token))
        if answer[0] == "evicted":
            raise Evicted(f"{slot}: another worker has held this slot of {self.group} since worker {worker_id} lost it")
        return int(answer[2])

    def leader(self) -> common_pb2.CoordinatorFence:
        """Return the fence of the newest coordinator, running or not; token 0: there was none."""
        token, worker_id = self._call("leader")[2:]
        return common_pb2.CoordinatorFence(worker_id=str(worker_id), token=int(token))

    def _taken(self, slot: str, answer: list[Any]) -> list[Any]:
        if answer[0] == "held":
            raise AlreadyExists(f"slot {slot} of {self.group} is held by worker {answer[2]}; its lease is alive")
        return answer

    def heartbeat(self, slot: str, worker_id: str, ttl_s: float) -> str:
        """Renew the lease. Returns: "ok", "unknown" (it has expired) or "evicted" (another worker has the slot)."""
        return str(self._call("heartbeat", slot, worker_id, int(ttl_s * 1000))[0])

    def leave(self, slot: str, worker_id: str) -> None:
        """Give the slot up; does nothing if another worker has it."""
        self._call("leave", slot, worker_id)

    def bind_endpoint(self, slot: str, worker_id: str, epoch: int, endpoint: str) -> None:
        """Publish the TCP store of a round that began in an epoch. Raises: as confirm() of this slot."""
        self._check(slot, worker_id, epoch, self._call("bind", slot, worker_id, epoch, endpoint))

    def confirm(self, slot: str, worker_id: str, epoch: int, slots: Iterable[str] = ()) -> None:
        """Ask whether the worker may act in the epoch, with the holders that these slots had in it.

        Raises: Evicted: another one has its slot; LeaseExpired: the slot is free; Aborted: one of `slots` has changed.
        """
        self._check(slot, worker_id, epoch, self._call("confirm", slot, worker_id, epoch, *slots))

    def _check(self, slot: str, worker_id: str, epoch: int, answer: list[Any]) -> None:
        status, now = answer[:2]
        if status == "unknown":
            raise LeaseExpired(f"{slot}: the lease of worker {worker_id} in {self.group} has run out")
        if status == "evicted":
            raise Evicted(f"{slot}: worker {worker_id} no longer holds this slot of {self.group}")
        if status == "stale":
            raise Aborted(f"{slot}: epoch {epoch} of {self.group} is over, it is {now}")

    def snapshot(self) -> Membership:
        """Return the group as it is now, after removing expired leases."""
        _, epoch, endpoint_epoch, endpoint, flat, taken = self._call("snapshot")
        bound = bool(endpoint_epoch)
        if bound:
            try:
                split_address(str(endpoint).partition(" ")[0])
            except ValueError:
                raise self._damaged("state", "endpoint", str(endpoint), "no host:port") from None
        return Membership(
            epoch=int(epoch),
            members=_pairs(flat),
            endpoint=str(endpoint) if bound else None,
            since={slot: int(text) for slot, text in _pairs(taken).items() if text.isdecimal() and len(text) < 20},
        )

    def facts(self) -> dict[str, str]:
        """Read the facts that the members gave when they joined, by slot.

        Raises: Unavailable: some cannot be read; their member notices, and tells them again.
        """
        found = _pairs(self._call("facts")[2])
        for slot, text in found.items():
            try:
                facts = json.loads(text)
            except (ValueError, RecursionError):
                facts = None
            if not isinstance(facts, dict):
                raise self._damaged("facts", slot, text, "no JSON object")
        return found

    def settle(self, slots: Iterable[str], timeout_s: float) -> Membership:
        """Wait until all slots are taken, or for `timeout_s`. Returns: the group then, complete or not."""
        wanted, deadline = set(slots), time.monotonic() + timeout_s
        while not wanted <= set((now := self.snapshot()).members) and time.monotonic() < deadline:
            threading.Event().wait(POLL_S)
        return now

    def wait_for(self, slots: Iterable[str], timeout_s: float) -> Membership:
        """Wait until all slots are taken. Raises: DeadlineExceeded: with the missing slots."""
        wanted = set(slots)
        return self.wait_until(
            lambda now: wanted <= set(now.members),
            timeout_s,
            lambda now: f"slots missing from {self.group}: {', '.join(sorted(wanted - set(now.members)))}",
        )

    def wait_until(
        self,
        condition: Callable[[Membership], bool],
        timeout_s: float,
        complaint: Callable[[Membership], str],
    ) -> Membership:
        """Poll until the condition holds. Raises: DeadlineExceeded: with the complaint."""
        deadline = time.monotonic() + timeout_s
        while not condition(now := self.snapshot()):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{complaint(now)} (waited {timeout_s:g} s)")
            threading.Event().wait(POLL_S)
        return now


def _pairs(flat: list[Any]) -> dict[str, str]:
    words = [item.decode() if isinstance(item, bytes) else str(item) for item in flat]
    return dict(zip(words[::2], words[1::2], strict=True))


class SlotLease:
    """Holds a slot: a thread renews the lease, takes an empty slot again, and notices another holder.

        the slot is empty            taken again: after a long stop, or when Redis has lost its data
        another holds it             nothing: `evicted`; taken again once that one's lease has run out
        another renews it for long   lost for good: on_lost, and the thread ends

    Args:
        facts: JSON that the other members may read.
        on_lost: called once, from the thread, with a sentence; None: the slot is waited for as long as it takes.
    """

    # Leases for which another may hold the slot: one that does not renew it was no replacement of us.
    patience_ttls = 2.0

    def __init__(
        self,
        rendezvous: Rendezvous,
        slot: str,
        ttl_s: float,
        facts: str = "{}",
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self.rendezvous = rendezvous
        self.slot = slot
        self.worker_id = uuid.uuid4().hex
        self.evicted = False
        self._ttl_s = ttl_s
        self._facts = facts
        self._waits_for_ever = on_lost is None
        self._evicted_s = 0.0  # since when
        self._beating = threading.Lock()
        self._lease = Lease(slot, ttl_s, self._renew, on_lost, kind="slot")

    def start(self) -> None:
        """Join the group and keep the lease alive.

        Raises: Unavailable: Redis has not answered for two leases' time.
        """
        deadline_s = time.monotonic() + 2 * self._ttl_s
        while True:
            try:
                epoch = self.rendezvous.join(self.slot, self.worker_id, self._ttl_s, self._facts)
                break
            except Unavailable as error:  # what was loaded for minutes is not given up for a moment's outage
                if time.monotonic() >= deadline_s:
                    raise
                log.warning("weight group not joined yet", slot=self.slot, error=str(error))
            self._lease.wait(min(1.0, self._ttl_s / 3))
        log.info("joined weight group", group=self.rendezvous.group, slot=self.slot, epoch=epoch)
        self._lease.start()

    def check(self) -> None:
        """Raises: Evicted: another incarnation has the slot."""
        if self.evicted:
            raise Evicted(f"{self.slot}: this worker was replaced by a newer one")

    def confirm(self, epoch: int, slots: Iterable[str] = ()) -> None:
        """Ask Redis whether this worker may act in the epoch; take an empty slot again, which is another epoch.

        Raises: Evicted: another one has the slot; Aborted: the epoch is over for `slots`.
        """
        self.check()
        try:
            self.rendezvous.confirm(self.slot, self.worker_id, epoch, slots)
        except LeaseExpired:
            self._beat()
            self.check()
            raise

    def close(self) -> None:
        """Stop renewing and leave the group."""
        self._lease.stop(timeout_s=5.0)
        try:
            self.rendezvous.leave(self.slot, self.worker_id)
        except Unavailable as error:
            log.warning("could not leave weight group", slot=self.slot, error=str(error))

    def _renew(self) -> None:
        """Raises: Unavailable: Redis does not answer; Evicted: the slot is lost for good."""
        try:
            self._beat()
        except Unavailable:
            if not self._is_lost():
                raise
        if self._is_lost():
            raise Evicted(f"another worker holds the slot {self.slot} of {self.rendezvous.group}")

    def _is_lost(self) -> bool:
        patience_s = self.patience_ttls * self._ttl_s
        return self.evicted and not self._waits_for_ever and time.monotonic() - self._evicted_s >= patience_s

    def _beat(self) -> None:
        with self._beating:
            status = self.rendezvous.heartbeat(self.slot, self.worker_id, self._ttl_s)
            if status == "unknown":
                status = self._rejoin()
            if status == "evicted" and not self.evicted:
                self._evicted_s = time.monotonic()
                if self.patience_ttls:  # else it is lost for good, which its Lease counts
                    LEASE_FAILURES.labels("slot", "lost").inc()
                log.error("evicted from weight group", slot=self.slot)
            self.evicted = status == "evicted"

    def _rejoin(self) -> str:
        """After a long stop, or when Redis lost its data: under a new epoch, unless another has come meanwhile."""
        try:
            self._take_again()
        except (AlreadyExists, Evicted):
            return "evicted"
        LEASE_FAILURES.labels("slot", "expired").inc()
        log.warning("lease had expired, joined again", slot=self.slot)
        return "ok"

    def _take_again(self) -> None:
        """Raises: AlreadyExists: another one has the slot."""
        self.rendezvous.claim(self.slot, self.worker_id, self._ttl_s, self._facts)
