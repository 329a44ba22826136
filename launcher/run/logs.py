"""Finds the line of a service's log that says why the service ended."""

from pathlib import Path
from typing import Any

from launcher.view.logs.lines import record_of

_TAIL_BYTES = 65536
# Enough for a message that lists every problem; too little for a dump of a whole object.
_MAX_CHARACTERS = 2000
_BAD_LEVELS = ("error", "critical", "fatal")


def last_error(log: Path, *, since: int = 0, killed: bool = False) -> str:
    """Find the last JSON record of level error or worse, else the log's last line.

    A traceback after that record is preferred to it: it ended the process.

    Args:
        since: byte of the log where the process began; earlier lines are of earlier processes.
        killed: a signal ended the process, so only an error record counts, not the last line.
    Returns: one line of at most 2,000 characters; "" for an empty or missing log.
    """
    lines = _tail(log, since)
    for index in range(len(lines) - 1, -1, -1):
        record = record_of(lines[index])
        if record is not None and str(record.get("level", "")).lower() in _BAD_LEVELS:
            trailing = [line for line in lines[index + 1 :] if record_of(line) is None]
            return _short(trailing[-1] if any("Traceback" in line for line in trailing) else _readable(record))
    return _short(_readable(record_of(lines[-1]) or lines[-1])) if lines and not killed else ""


def _tail(log: Path, since: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _readable(record: dict[str, Any] | str) -> str:
    if isinstance(record, str):
        return record
    details = [str(record[key]) for key in ("error", "reason", "detail") if record.get(key)]
    exception = str(record.get("exception", "")).strip().splitlines()
    headline = str(record.get("message", record.get("event", "")))
    return ": ".join(part for part in (headline, *(details or exception[-1:])) if part)


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
