"""Why a rank died while it started: SGLang tells our process only that it did, and guesses that memory ran out.

A rank leaves the last line of what SGLang logs of its end in the replica's folder, where the service finds it.
"""

import logging
import os
from pathlib import Path

from servicekit.errors import ConfigError

_SUFFIX = ".died"
_CONFIG_ERROR = f"{ConfigError.__module__}.{ConfigError.__qualname__}: "
_LONGEST = 1000


def remember_errors(folder: Path) -> None:
    """In a rank: what SGLang logs as an error from here on is kept."""
    logging.getLogger("sglang").addHandler(_Keeper(folder))


def explain(folder: Path, error: RuntimeError) -> Exception:
    """What to raise in place of SGLang's `error`: what the rank that died first said, if one said anything."""
    told = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    if not told:
        return error
    reason = told[0].read_text(encoding="utf-8")
    if reason.startswith(_CONFIG_ERROR):
        return ConfigError(reason.removeprefix(_CONFIG_ERROR))
    return RuntimeError(f"a rank of SGLang did not start: {reason}")


class _Keeper(logging.Handler):
    """Keeps the first error of its process: later ones follow from it."""

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
