"""A circuit breaker: while a server is down, calls fail immediately instead of one after the other in time.

| state     | a call      | leaves it                                                   |
|-----------|-------------|-------------------------------------------------------------|
| closed    | is made     | to open: after `open_after` failures in a row               |
| open      | is refused  | to half-open: after `open_s`                                |
| half-open | one is made | to closed: it succeeded; to open: it failed                 |
"""

import time
from collections.abc import Callable

from servicekit.logs import get_logger

log = get_logger(__name__)


class CircuitBreaker:
    """Decides whether a call may be made. Not thread-safe: for one event loop.

    Args:
        server: its name, in log lines and refusals.
        open_after: failures in a row that open the circuit.
        open_s: seconds until a call may try again.
        clock: monotonic seconds.
    """

    def __init__(
        self, server: str, *, open_after: int, open_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._open_after = open_after
        self._open_s = open_s
        self._clock = clock
        self._failures = 0
        self._why = ""
        # None: closed.
        self._opened_s: float | None = None
        self._trying = False

    @property
    def is_open(self) -> bool:
        """Whether the circuit is open or half-open."""
        return self._opened_s is not None

    def refusal(self) -> str:
        """Return why a call must not be made now; "": it may, and `succeeded`, `failed` or `withdrawn` must follow."""
        if self._opened_s is None:
            return ""
        left_s = self._opened_s + self._open_s - self._clock()
        if left_s <= 0 and not self._trying:
            self._trying = True
            return ""
        when = "a call is trying" if left_s <= 0 else f"the next one is made in {left_s:.0f} s"
        return f"not sent, because the last {self._failures} calls of {self._server} failed ({when}): {self._why}"

    def succeeded(self) -> None:
        """Close the circuit."""
        if self._opened_s is not None:
            log.info("circuit closed", server=self._server)
        self._failures, self._opened_s, self._trying = 0, None, False

    def failed(self, why: str) -> None:
        """Count a failure, which opens the circuit if it is one too many."""
        self._failures += 1
        self._why = why
        if self._trying or (self._opened_s is None and self._failures >= self._open_after):
            if not self._trying:
                log.warning("circuit opened", server=self._server, failures=self._failures, error=why)
            self._opened_s, self._trying = self._clock(), False

    def withdrawn(self) -> None:
        """Let another call try: this one was given up, so that it says nothing of the server."""
        self._trying = False
