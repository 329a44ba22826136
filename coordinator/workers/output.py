"""Brings what the code in a worker prints into the log, line by line and not without end."""

import asyncio
import time

from servicekit.lifecycle.tasks import cancel
from servicekit.logs import get_logger

# Lines of one worker in any such time; further ones are counted.
MAX_LINES, _WINDOW_S = 100, 10.0
# A longer line is cut.
_MAX_CHARS = 1000
_READ_BYTES = 1 << 16
# For what is still on its way when a worker has ended; a process that it has started may hold the pipe open.
_END_TIMEOUT_S = 1.0

log = get_logger(__name__)


class Output:
    """Follows a worker's stderr, to which its stdout goes as well.

    Args:
        kind, name, pid: what the lines are logged with: `reward output`, and reward=name.
    """

    def __init__(self, kind: str, name: str, pid: int, stream: asyncio.StreamReader) -> None:
        self._kind, self._of = kind, {kind: name, "pid": pid}
        self._stream = stream
        self._left, self._until_s, self._left_out = MAX_LINES, 0.0, 0
        self._following = asyncio.create_task(self._follow(), name=f"output of {name}")

    async def end(self) -> None:
        """Log what is left, and stop."""
        await asyncio.wait([self._following], timeout=_END_TIMEOUT_S)
        await cancel(self._following)

    async def _follow(self) -> None:
        rest = b""
        try:
            while data := await self._stream.read(_READ_BYTES):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self._log_line(line)
                if len(rest) > _READ_BYTES:
                    self._log_line(rest)
                    rest = b""
        finally:
            if rest:
                self._log_line(rest)
            self._log_left_out()

    def _log_line(self, line: bytes) -> None:
        now_s = time.monotonic()
        if now_s >= self._until_s:
            self._log_left_out()
            self._left, self._until_s = MAX_LINES, now_s + _WINDOW_S
        self._left -= 1
        if self._left < 0:
            self._left_out += 1
            return
        text = line.decode("utf-8", errors="replace").rstrip()
        if text:
            cut = text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}... ({len(text)} characters)"
            log.info(f"{self._kind} output", **self._of, text=cut)

    def _log_left_out(self) -> None:
        if self._left_out:
            log.warning(f"{self._kind} output left out", **self._of, lines=self._left_out, per_s=_WINDOW_S)
            self._left_out = 0
