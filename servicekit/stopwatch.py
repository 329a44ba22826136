"""Measures wall seconds by part."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Stopwatch:
    """Times named parts; the seconds of a part that occurs twice are added.

    Args:
        around: makes a context manager, e.g. a span, from a part's name; it is entered during the part.
    """

    def __init__(self, around: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self._around = around
        self._start_s = time.perf_counter()
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a `with` block as `name`, also if it fails."""
        start_s = time.perf_counter()
        try:
            with self._around(name):
                yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start_s

    def total_s(self) -> float:
        """Return the seconds since the stopwatch was made."""
        return time.perf_counter() - self._start_s
