"""Gates: a process of a chaos test stops at an exact point of a round until the test lets it go on.

The test arms a gate with a file `<holder>.armed` ("transfer 2": at the third message of TRANSFER). Who comes to that
point renames it to `<holder>.reached` and waits until that file is gone. In between the test kills or freezes whom it
likes, the holder included.
"""

import time
from pathlib import Path

from tests.kit.waiting import until

HOLD_S = 30.0


class Gate:
    """The holder's side. name: "rollout-0", "trainer-1", ..."""

    def __init__(self, folder: Path, name: str) -> None:
        self._armed, self._reached = folder / f"{name}.armed", folder / f"{name}.reached"

    def at(self, phase: str, message: int = 0) -> None:
        """We are at message number `message` of `phase`: stop here if this is where the gate is."""
        try:
            wanted, number = self._armed.read_text().split()
        except FileNotFoundError:
            return
        if wanted != phase or int(number) > message:
            return
        self._armed.rename(self._reached)
        deadline_s = time.monotonic() + HOLD_S
        while self._reached.exists() and time.monotonic() < deadline_s:
            time.sleep(0.002)


class GateKeeper:
    """The test's side of one gate."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._armed, self._reached = folder / f"{name}.armed", folder / f"{name}.reached"

    def arm(self, phase: str, message: int) -> None:
        """Whole or not at all: the holder may look at any moment."""
        draft = self._armed.with_suffix(".draft")
        draft.write_text(f"{phase} {message}")
        draft.rename(self._armed)

    def wait_reached(self, timeout_s: float) -> None:
        until(self._reached.exists, timeout_s)

    def open(self) -> None:
        self._armed.unlink(missing_ok=True)
        self._reached.unlink(missing_ok=True)
