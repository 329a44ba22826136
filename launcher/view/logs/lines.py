"""Parses a service's log: JSON records of ours, lines with a time of their own (SGLang, Redis), and any others."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error", "critical")
_SGLANG = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[^\]]*\] ?")
_REDIS = re.compile(r"^\d+:[A-Z] (\d\d \w{3} \d{4} \d\d:\d\d:\d\d\.\d{3}) ([.\-*#]) ")
# What Redis advises for snapshots, replicas and many clients, at its start; the run's own has none of them.
_NEEDLESS = re.compile(r"WARNING:? (?=(?:Memory )?overcommit|You have Transparent Huge Pages|The TCP backlog)")
# Colours and cursor movements of programs that took the log for a terminal.
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_OF_TRACES = ("Traceback", "During handling of", "The above exception was")
# Said by the line's own columns, or the same in all lines.
_KNOWN = frozenset({"time", "level", "message", "event", "service", "run", "replica", "logger", "exception", "stack"})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A record of a log with the lines that belong to it.

    Attributes:
        time_s: Unix seconds; of a line without a time, those of the one before it.
        service: name of the log file, e.g. rollout-0.
        level: one of LEVELS.
        more: further lines: a traceback, or what a library printed behind it.
    """

    time_s: float
    service: str
    level: str
    text: str
    more: tuple[str, ...] = ()


def parse(service: str, lines: Iterable[str], since_s: float = 0.0) -> Iterator[Entry]:
    """Parse the lines of a log, in order.

    Args:
        since_s: time of lines before the first one that has a time.
    """
    entry: Entry | None = None
    for line in lines:
        # The last picture of a progress bar.
        line = _ESCAPES.sub("", line.rstrip("\n").rpartition("\r")[2] or line.rstrip("\r\n"))
        if not line.strip():
            continue
        new = _entry(service, line)
        if new is None and entry is not None and _continues(entry, line):
            level = "error" if line.startswith("Traceback") else entry.level
            entry = Entry(time_s=entry.time_s, service=service, level=level, text=entry.text, more=(*entry.more, line))
            continue
        if entry is not None:
            yield entry
            since_s = entry.time_s
        entry = new or Entry(time_s=since_s, service=service, level=_level_of(line), text=line)
    if entry is not None:
        yield entry


def record_of(line: str) -> dict[str, Any] | None:
    """Parse a line that is a JSON object; None if it is not."""
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _entry(service: str, line: str) -> Entry | None:
    """Parse a line that has a time; None if it has none."""
    record = record_of(line)
    if record is not None and (time_s := _unix(record.get("time"))) is not None:
        return _of_record(service, record, time_s)
    if found := _SGLANG.match(line):
        time_s = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").astimezone().timestamp()
        return Entry(time_s=time_s, service=service, level=_level_of(line), text=line[found.end() :])
    if found := _REDIS.match(line):
        time_s = datetime.strptime(found[1], "%d %b %Y %H:%M:%S.%f").astimezone().timestamp()
        text, needless = _NEEDLESS.subn("not needed here, this Redis saves nothing: ", line[found.end() :])
        # Redis marks what it says at its start and end like its warnings.
        level = "warning" if found[2] == "#" and "WARNING" in line and not needless else "info"
        return Entry(time_s=time_s, service=service, level=level, text=text)
    return None


def _of_record(service: str, record: dict[str, Any], time_s: float) -> Entry:
    level = str(record.get("level", "info")).lower()
    first, *rest = str(record.get("message", record.get("event", ""))).splitlines() or [""]
    fields = [f"{name}={_short(value)}" for name, value in record.items() if name not in _KNOWN]
    trace = [line for name in ("stack", "exception") for line in str(record.get(name) or "").splitlines()]
    if record.get("logger") == "py.warnings":
        level = "info"
    return Entry(
        time_s=time_s,
        service=service,
        level=level if level in LEVELS else "critical" if level == "fatal" else "info",
        text="  ".join([first, *fields]),
        more=(*rest, *trace),
    )


def _unix(text: Any) -> float | None:
    """Convert an ISO time, of UTC unless it says another zone."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, str):
        return json.dumps(value)
    return json.dumps(value, ensure_ascii=False) if not value or any(mark in value for mark in ' "\n') else value


def _continues(entry: Entry, line: str) -> bool:
    """Whether a line without a time belongs to the entry before: it is indented, or of a traceback."""
    lines = (entry.text, *entry.more)
    # Behind the indented lines of a traceback stands the error.
    has_trace = any(text.startswith("Traceback") for text in lines)
    return line[0] in " \t" or line.startswith(_OF_TRACES) or (has_trace and lines[-1].startswith((" ", "\t")))


def _level_of(line: str) -> str:
    """Guess the level of a line that states none; Python's warnings of libraries are information to a run's user."""
    head = line[:160].lower()
    if "traceback" in head or "error" in head or "exception" in head:
        return "error"
    return "warning" if "warning" in head and "warning:" not in head else "info"
