"""The claim to be the run's one coordinator: a slot never taken from a live holder, and the token with it."""

import time
from collections.abc import Callable

from servicekit.errors import Aborted, AlreadyExists, Unavailable
from servicekit.logs import get_logger
from servicekit.rpc.fence import FenceGuard
from tandem_api.common.v1 import common_pb2
from weightsync.membership.rendezvous import COORDINATOR_SLOT, POLL_S, Rendezvous, SlotLease

_ASK_AGAIN_S = 0.5

log = get_logger(__name__)


def fence_of(redis_url: str, run_id: str, lease_ttl_s: float) -> FenceGuard:
    """Return what a service that starts knows of who leads the run, or has led it last, and asks for newer ones.

    Raises: Unavailable: Redis did not answer for two leases.
    """
    rendezvous = Rendezvous(redis_url, f"tandem:{run_id}")
    guard = FenceGuard(rendezvous.leader)
    deadline_s = time.monotonic() + 2 * lease_ttl_s
    while True:
        try:
            guard.remember(rendezvous.leader())
            return guard
        except Unavailable as error:
            if time.monotonic() >= deadline_s:
                raise
            log.warning("newest coordinator not known yet", error=str(error))
        time.sleep(_ASK_AGAIN_S)


class CoordinatorLease(SlotLease):
    """Holds the coordinator's slot. Once another has had it, it is lost for good: the run is that one's.

    Args:
        on_lost: called once, from the renewing thread, with a sentence.
        worker_id: a new name, of no other process ever; "": one is made.
    """

    patience_ttls = 0.0

    def __init__(
        self,
        rendezvous: Rendezvous,
        ttl_s: float,
        on_lost: Callable[[str], None] = lambda _: None,
        worker_id: str = "",
    ) -> None:
        super().__init__(rendezvous, COORDINATOR_SLOT, ttl_s, on_lost=on_lost)
        self.worker_id = worker_id or self.worker_id
        self._token = 0
        self._kept_until_s = 0.0

    def claim(self, timeout_s: float) -> None:
        """Take the slot once it is free: wait until the holder's lease has run out.

        Raises: AlreadyExists: a live worker still has it after timeout_s; Aborted: close() was called meanwhile.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._take_again()
                break
            except AlreadyExists:
                if time.monotonic() >= deadline_s:
                    raise
            if self._lease.wait(POLL_S):
                raise Aborted(f"{self.slot}: closed while it waited for its turn")
        group = self.rendezvous.group
        log.info("claimed slot", group=group, slot=self.slot, worker_id=self.worker_id, token=self._token)
        self._lease.start()

    @property
    def is_held(self) -> bool:
        """Whether it was claimed, and no other coordinator is known to have claimed it since."""
        return self._token != 0 and not self.evicted

    @property
    def fence(self) -> common_pb2.CoordinatorFence:
        """What our calls carry, for as long as this process leads the run."""
        return common_pb2.CoordinatorFence(worker_id=self.worker_id, token=self._token)

    @property
    def left_s(self) -> float:
        """Seconds for which no other process can have the slot, unless Redis loses its data. Not positive: unknown."""
        return self._kept_until_s - time.monotonic()

    def hold(self) -> None:
        """Ask Redis whether this process still leads the run, and renew the lease.

        Raises: Evicted: it does not; Unavailable: Redis does not answer.
        """
        self.check()
        self._beat()
        self.check()

    def _beat(self) -> None:
        asked_s = time.monotonic()
        super()._beat()
        if not self.evicted:
            self._kept_until_s = asked_s + self._ttl_s

    def _take_again(self) -> None:
        """Raises: AlreadyExists: another one has the slot; Evicted: another one has had it since."""
        asked_s = time.monotonic()
        self._token = self.rendezvous.lead(self.slot, self.worker_id, self._ttl_s, self._token)
        self._kept_until_s = asked_s + self._ttl_s
