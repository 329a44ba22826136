"""Wall seconds by part."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext


class Stopwatch:
    """Times named parts; a part that occurs twice is summed.

    Args:
        around: makes, from a part's name, what is entered while the part goes on (a span, say).
    """

    def __init__(self, around: Callable[[str], AbstractContextManager[object]] = nullcontext) -> None:
        self._around = around
        self._start_s = time.perf_counter()
        self.parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what happens inside as `name`, also if it fails."""
        start_s = time.perf_counter()
        try:
            with self._around(name):
                yield
        finally:
            self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - start_s

    def total_s(self) -> float:
        """Seconds since the stopwatch was made."""
        return time.perf_counter() - self._start_s
