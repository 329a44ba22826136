"""Finds the line of a service's log that says why it ended."""

import json
from pathlib import Path
from typing import Any

_TAIL_BYTES = 65536
# A sentence that names everything that is wrong is worth a long line; a dump of a whole object is not.
_MAX_CHARACTERS = 2000
_BAD_LEVELS = ("error", "critical", "fatal")


def last_error(log: Path, *, since: int = 0, killed: bool = False) -> str:
    """One line of at most 2,000 characters: the last JSON record of level error or worse, else the log's last line.

    A traceback printed after the last record wins over it, since it is what ended the process.

    Args:
        since: byte of the log where the process began: what is before it is of others, that have ended long ago.
        killed: a signal has ended the process, so that only an error says why: the last line does not.
    Returns "" for an empty or missing log.
    """
    lines = _tail(log, since)
    for index in range(len(lines) - 1, -1, -1):
        record = _record(lines[index])
        if record is not None and str(record.get("level", "")).lower() in _BAD_LEVELS:
            trailing = [line for line in lines[index + 1 :] if _record(line) is None]
            return _short(trailing[-1] if any("Traceback" in line for line in trailing) else _readable(record))
    return _short(_readable(_record(lines[-1]) or lines[-1])) if lines and not killed else ""


def _tail(log: Path, since: int) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(since, log.stat().st_size - _TAIL_BYTES))
            return [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        return []


def _record(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


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
