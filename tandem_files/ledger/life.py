"""life.jsonl: who came to a run, left it or was lost, why, and what that cost; its coordinators append to it in turn.

Each line also has what was noted so far, so that the last one says everything, however long the file is.
"""

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

LIFE_FILE = "life.jsonl"
# For more than is ever shown of the longest lines: 4 KiB with 64 replicas, usually 0.5.
_END_BYTES = 256 << 10


@dataclass(frozen=True, kw_only=True)
class LifeEntry:
    """A line.

    Attributes:
        kind: what happened (coordinator/watch/life.py), e.g. "replica lost".
        who: "rollout-1", "trainer", ...
        seconds: that whoever is back was lost; None: that is not over, or it took none.
        tokens: of completions that ran there, or of iterations that are done again; None: not known.
        totals: by kind how often it has happened, seconds and tokens.
        lost: who is lost now, from when, in Unix time.
        serve: names of replicas.
    """

    time_s: float
    kind: str
    who: str
    why: str = ""
    seconds: float | None = None
    tokens: int | None = None
    totals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    lost: Mapping[str, float] = field(default_factory=dict)
    serve: Sequence[str] = ()

    def __str__(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time_s))
        return f"{when}  {self.who} {self.kind.partition(' ')[2]}: {self.why}{cost(self.seconds, self.tokens)}"


def cost(seconds: float | None, tokens: float | None) -> str:
    """Write what something cost, behind what it was.

    >>> cost(12.34, 1500), cost(None, 7), cost(0.0, 0)
    (' (12.3 s, 1,500 tokens)', ' (7 tokens)', '')
    """
    parts = [*([f"{seconds:,.1f} s"] if seconds else ()), *([f"{tokens:,.0f} tokens"] if tokens else ())]
    return f" ({', '.join(parts)})" if parts else ""


def read_life(run_dir: Path, most: int) -> list[LifeEntry]:
    """Read the newest entries, the newest last; none if there are none that can be read."""
    entries, names = list[LifeEntry](), {one.name for one in fields(LifeEntry)}  # a newer release may have more
    with contextlib.suppress(OSError), (run_dir / LIFE_FILE).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        for line in file.read().splitlines()[-2 * most :]:
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # torn
                found = json.loads(line).items()
                entries.append(LifeEntry(**{name: value for name, value in found if name in names}))
    return entries[-most:]
