"""Seconds of the parts of an iteration, measured where they happen."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from servicekit.tracing import span


class Stopwatch:
    """Times named parts; a part that occurs twice is summed.

    Args:
        announce: called with a part's name when it begins.
    """

    def __init__(self, announce: Callable[[str], None]) -> None:
        self._announce = announce
        self._start_s = time.perf_counter()
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what happens inside as `name`, also if it fails."""
        self._announce(name)
        start_s = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start_s

    def total_s(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.perf_counter() - self._start_s
