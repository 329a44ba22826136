"""The communicator of a set of slots: built under a deadline, kept across rounds until one of the slots changes."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import torch
import torch.distributed as dist

from servicekit.addresses import join_address
from servicekit.errors import Aborted, ConfigError, DeadlineExceeded, PeerLost
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.membership.rendezvous import Evicted, LeaseExpired, Membership, SlotLease
from weightsync.plans.participants import Participants
from weightsync.transfer.communicators.communicator import Communicator, form, join_store
from weightsync.transfer.communicators.tcp_store import bound_store
from weightsync.transfer.communicators.watched import LOOK_S
from weightsync.transfer.devices import on_device
from weightsync.transfer.facts import check_facts

log = get_logger(__name__)


class CommunicatorCache:
    """At most one communicator: the old one is dropped before the next is built."""

    def __init__(self, lease: SlotLease, host: str, device: torch.device) -> None:
        self._lease = lease
        self._host = host
        self._device = device
        self._key: tuple[int, int, tuple[str, ...]] | None = None
        self._current: Communicator | None = None
        self._interrupting = threading.Lock()
        self._under_way = ""
        self._given_up = ""

    def begin(self, round_id: str) -> None:
        """Set the round that may be interrupted; "": none."""
        with self._interrupting:
            self._under_way = round_id

    def get(self, round_: pb.Round, participants: Participants, rank: int) -> Communicator:
        """Return the communicator of the round's epoch and participants; a new one after each round that failed.

        Raises: Aborted: the epoch is over; ConfigError: naming the ranks that cannot work together, and the values;
            DeadlineExceeded: naming the ranks that did not join.
        """
        slots = participants.slots
        now = self._lease.rendezvous.snapshot()
        self._check_epoch(now, round_, slots)
        key = (now.newest(slots), round_.failed_rounds, slots)
        if self._current is not None and self._key == key and not self._current.closed:
            return self._current
        self.drop()
        self._compare(round_, participants)
        self._current = self._build(
            lambda: form(
                self._store(round_, slots),
                # With the round's id: a second attempt in the same epoch must not read keys of the first.
                name=f"{round_.group}/{round_.epoch}/{round_.round_id}",
                rank=rank,
                slots=slots,
                host=self._host,
                device=self._device,
                timeout_s=round_.formation_timeout_s,
            ),
            round_,
        )
        self._key = key
        log.info("communicator formed", slot=self._lease.slot, epoch=round_.epoch, ranks=len(slots))
        return self._current

    def _build(self, build: Callable[[], Communicator], round_: pb.Round) -> Communicator:
        """Build it in a thread, which is left behind if the round is given up.

        Nothing else ends a wait of gloo or NCCL for a rank that never joins.

        Raises: PeerLost: the round was given up; DeadlineExceeded; what `build` raises.
        """
        built: Future[Communicator] = Future()
        threading.Thread(target=self._carry_out, args=(build, built), name="formation", daemon=True).start()
        # gloo's wait for the store, its connections and the proof each have a deadline; NCCL has none.
        deadline = time.monotonic() + 3 * round_.formation_timeout_s
        while not wait([built], LOOK_S).done:
            late = time.monotonic() >= deadline
            if late or self._given_up == round_.round_id:
                built.add_done_callback(_close)
                what = f"{self._lease.slot}: round {round_.round_id}"
                raise DeadlineExceeded(f"{what} was not formed") if late else PeerLost(f"{what} was given up")
        return built.result()

    def _carry_out(self, build: Callable[[], Communicator], built: "Future[Communicator]") -> None:
        try:
            with on_device(self._device):
                built.set_result(build())
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread
            built.set_exception(error)

    def drop(self) -> None:
        """Abort and forget the communicator."""
        if self._current is not None:
            self._current.abort()
        self._current, self._key = None, None

    def interrupt(self, round_id: str) -> None:
        """End the waits of a phase that another thread runs, if it is of this round; that thread drops what we have."""
        with self._interrupting:  # no other round begins between the check and the abort
            if not round_id or round_id != self._under_way:
                return
            self._given_up = round_id
            if self._current is not None:
                self._current.abort(f"round {round_id} was given up")

    def _compare(self, round_: pb.Round, participants: Participants) -> None:
        """Compare the ranks' facts before they connect: ranks that do not match could hang while connecting."""
        rendezvous = self._lease.rendezvous
        facts, now = rendezvous.facts(), rendezvous.snapshot()
        self._check_epoch(now, round_, participants.slots)  # the facts read are of this epoch's members
        if strangers := [slot for slot in participants.slots if slot not in now.members]:
            raise ConfigError(f"{', '.join(strangers)}: no process has this slot of {round_.group} in its epoch")
        check_facts(facts, participants.slots)

    def _check_epoch(self, now: Membership, round_: pb.Round, slots: Sequence[str]) -> None:
        """Raise Aborted unless all slots are as they were in the round's epoch; strangers may come and go."""
        if not _is_epoch_of(now, round_, slots):
            raise Aborted(f"{self._lease.slot}: epoch {round_.epoch} of {round_.group} is over, it is {now.epoch}")
        holder = now.members.get(self._lease.slot)
        if holder is None:
            raise LeaseExpired(
                f"{self._lease.slot}: no process holds this slot of {round_.group}; it is taken again soon"
            )
        if holder != self._lease.worker_id:
            raise Evicted(f"{self._lease.slot}: another worker holds this slot of {round_.group}")

    def _store(self, round_: pb.Round, slots: Sequence[str]) -> dist.Store:
        """Open the round's TCP store: its first rank binds it and publishes its address; the others wait for that."""
        rendezvous = self._lease.rendezvous
        if self._lease.slot == slots[0]:
            store, port = bound_store(self._host, round_.formation_timeout_s)
            endpoint = f"{join_address(self._host, port)} {round_.round_id}"
            rendezvous.bind_endpoint(self._lease.slot, self._lease.worker_id, round_.epoch, endpoint)
            return store
        bound = rendezvous.wait_until(
            lambda now: _endpoint_of(now, round_) is not None or not _is_epoch_of(now, round_, slots),
            round_.formation_timeout_s,
            lambda now: f"{self._lease.slot}: {slots[0]} has not bound a store for epoch {round_.epoch}",
        )
        self._check_epoch(bound, round_, slots)
        endpoint_now = _endpoint_of(bound, round_)
        if endpoint_now is None:
            raise Aborted(f"{self._lease.slot}: the store of epoch {round_.epoch} is no longer bound for this round")
        return join_store(endpoint_now, round_.formation_timeout_s)


def _close(late: "Future[Communicator]") -> None:
    """Close the communicator of a formation that was left behind, if it was formed after all."""
    if late.exception() is None:
        late.result().abort("formed too late")


def _is_epoch_of(now: Membership, round_: pb.Round, slots: Sequence[str]) -> bool:
    """Whether none of the slots has changed since the round's epoch."""
    return now.newest(slots) <= round_.epoch <= now.epoch


def _endpoint_of(now: Membership, round_: pb.Round) -> str | None:
    """Return host:port of the store bound for this round; a store of an earlier attempt does not count."""
    if now.endpoint is None:
        return None
    address, _, round_id = now.endpoint.partition(" ")
    return address if round_id == round_.round_id else None
