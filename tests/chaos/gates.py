"""Gates: a process of a chaos test stops at an exact point of a round until the test lets it go on.

The test arms a gate with a file `<holder>.armed` ("transfer 2": at the third message of TRANSFER). Who comes to that
point renames it to `<holder>.reached` and waits until that file is gone. In between the test kills or freezes whom it
likes, the holder included.
"""

import contextlib
from pathlib import Path

from tandem_files.atomic import write_bytes_atomic
from tests.kit.waiting import until

HOLD_S = 30.0


class Gate:
    """One gate. The holder ("rollout-0", "trainer-1", ...) calls at(), the test the rest."""

    def __init__(self, folder: Path, holder: str) -> None:
        self._armed, self._reached = folder / f"{holder}.armed", folder / f"{holder}.reached"

    def at(self, phase: str, message: int = 0) -> None:
        """We are at message number `message` of `phase`: stop here if this is where the gate is."""
        try:
            wanted, number = self._armed.read_text().split()
        except FileNotFoundError:
            return
        if wanted != phase or int(number) > message:
            return
        self._armed.rename(self._reached)
        with contextlib.suppress(AssertionError):
            until(lambda: not self._reached.exists(), HOLD_S, interval_s=0.002)

    def arm(self, phase: str, message: int) -> None:
        """Whole or not at all: the holder may look at any moment."""
        write_bytes_atomic(self._armed, f"{phase} {message}".encode(), durable=False)

    def wait_reached(self, timeout_s: float) -> None:
        until(self._reached.exists, timeout_s)

    def open(self) -> None:
        self._armed.unlink(missing_ok=True)
        self._reached.unlink(missing_ok=True)
