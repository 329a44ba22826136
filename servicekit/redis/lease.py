"""Leases: keep a record of the registry, or a slot of a weight group, alive in Redis from a daemon thread."""

import threading
from collections.abc import Callable
from typing import Literal

from servicekit.errors import TandemError, Unavailable
from servicekit.logs import get_logger
from servicekit.metrics import LEASE_FAILURES

log = get_logger(__name__)


class Lease:
    """A lease, renewed every third of its time to live, so that two failed attempts do not lose it.

        Redis answers         -> renewed; after an outage, re-announced
        Redis does not answer -> logged once per outage, tried again
        held by another       -> lost: logged, on_lost called, the thread ends

    Args:
        name: what is renewed, for logs.
        ttl_s: time to live, seconds.
        renew: writes the lease. Unavailable: tried again; another TandemError (AlreadyExists): the lease is lost.
        on_lost: called once, from the thread, with the reason.
        kind: for the metric of failed renewals.
    """

    def __init__(
        self,
        name: str,
        ttl_s: float,
        renew: Callable[[], None],
        on_lost: Callable[[str], None] | None = None,
        kind: Literal["record", "slot"] = "record",
    ) -> None:
        self._name = name
        self._interval_s = ttl_s / 3
        self._renew = renew
        self._on_lost = on_lost
        self._kind = kind
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread that renews."""
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait this long, or until stop(). Returns: whether stop() was called."""
        return self._stop.wait(seconds)

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop renewing; wait at most timeout_s for a renewal under way, so that none follows a withdrawal."""
        self._stop.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        failing = False
        while not self._stop.wait(self._interval_s):
            try:
                self._renew()
            except Unavailable as error:
                LEASE_FAILURES.labels(self._kind, "unavailable").inc()
                if not failing:
                    log.warning("lease not renewed, Redis does not answer", lease=self._name, error=str(error))
                failing = True
            except TandemError as error:
                LEASE_FAILURES.labels(self._kind, "lost").inc()
                log.error("lease lost", lease=self._name, error=str(error))
                if self._on_lost is not None:
                    self._on_lost(str(error))
                return
            else:
                if failing:
                    log.info("lease renewed, Redis answers again", lease=self._name)
                failing = False
