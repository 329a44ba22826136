"""Finds out why a rank died during start-up; SGLang itself only reports that it did, and suggests a lack of memory.

A rank writes the last line of SGLang's log of its end into the replica's folder, where the service reads it.
"""

import logging
import os
from pathlib import Path

from servicekit.errors import ConfigError

_SUFFIX = ".died"
_CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "
_LONGEST = 1000


def remember_errors(folder: Path) -> None:
    """Record, in a rank, the error that SGLang logs when it ends."""
    logging.getLogger("sglang").addHandler(_ErrorFile(folder))


def explain(folder: Path, error: RuntimeError) -> Exception:
    """Return the error to raise instead of SGLang's `error`: that of the rank that died first, if it is recorded."""
    recorded = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    if not recorded:
        return error
    reason = recorded[0].read_text(encoding="utf-8")
    if reason.startswith(_CONFIG_ERROR):
        return ConfigError(reason.removeprefix(_CONFIG_ERROR))
    return RuntimeError(f"a rank of SGLang did not start: {reason}")


class _ErrorFile(logging.Handler):
    """Writes the first error of its process to a file; later ones follow from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = folder / f"{os.getpid()}{_SUFFIX}"

    def emit(self, record: logging.LogRecord) -> None:
        lines = record.getMessage().strip().splitlines()
        # The scheduler logs its end as one message that ends with a traceback.
        if not lines or "Traceback" not in record.getMessage() or self._path.exists():
            return
        try:
            self._path.write_text(lines[-1][:_LONGEST], encoding="utf-8")
        except OSError:
            self.handleError(record)
