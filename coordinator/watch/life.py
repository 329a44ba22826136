"""Notes the run's life (tandem_files/ledger/life.py): each coordinator continues what those before it have noted.

kind                             who is lost     seconds
... lost, full                   from then on    -
... back, room, restarted        not any more    of its absence
coordinator started, took over   not any more    the same; of one that was lost, from its last sign on

Who is lost already is not noted again, nor does who is not lost come back: callers need not know which it is.
"""

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args

from coordinator.leader_lease import LeaderCheck
from servicekit.errors import ConfigError, TandemError
from servicekit.logs import get_logger
from tandem_clients.replica import Replica
from tandem_files.atomic import append_json
from tandem_files.ledger.life import LIFE_FILE, LifeEntry, read_life
from tandem_files.run_folder import STATE_FILE, read_scale, read_state

Loss = Literal["replica lost", "trainer lost", "disk full", "redis lost"]
Return = Literal["replica back", "trainer back", "disk room", "redis back"]
Beginning = Literal["coordinator started", "coordinator took over", "trainer restarted"]
Kind = Loss | Return | Beginning | Literal["replica joined", "replica left", "replica quarantined", "coordinator ended"]
# Entries that are shown; that wait while the disk is full or Redis does not answer; letters of a reason.
SHOWN, _MOST_WAITING, _MOST_LETTERS = 50, 1000, 300

log = get_logger(__name__)


class Life:
    """The run's life so far.

    Args:
        run_dir: None: it is not kept.
    Attributes:
        newest: the last entries, in order.
    """

    def __init__(self, run_dir: Path | None = None) -> None:
        self._run_dir, self.newest = run_dir, deque[LifeEntry](maxlen=SHOWN)
        self._leading: LeaderCheck | None = None
        self._waiting = deque[LifeEntry](maxlen=_MOST_WAITING)
        self._totals: dict[str, Sequence[float]] = {}
        self._lost_s: dict[str, float] = {}
        # By name, replicas that serve, and that did; None: which process it is, is not known after a take-over.
        self._serve: dict[str, Replica | None] = {}
        self._gone: dict[str, Replica | None] = {}
        # What is noted when the run works, and how far the one before was: iterations, generated tokens.
        self._beginning: tuple[Beginning, int, int] | None = None
        self._early: tuple[Sequence[Replica], Mapping[str, str]] = (), {}  # a look before that

    def load(self, leading: LeaderCheck) -> None:
        """Continue the life of a run whose folder we have taken. Blocking."""
        if (run_dir := self._run_dir) is None:
            return
        for last in read_life(run_dir, SHOWN):
            self.newest.append(last)
            self._totals, self._lost_s, self._serve = dict(last.totals), dict(last.lost), dict.fromkeys(last.serve)
        state = read_state(run_dir)
        self._lost_s.pop("coordinator", None)  # of one that never began
        if (status := state.get("status")) in ("running", "failed"):
            self._lost_s["coordinator"] = time.time()
            with contextlib.suppress(OSError):
                files = (run_dir / STATE_FILE, *run_dir.glob("*.jsonl"), *run_dir.glob("ledger/*"))
                self._lost_s["coordinator"] = max(path.stat().st_mtime for path in files)
        kind: Beginning = "coordinator took over" if status == "running" else "coordinator started"
        self.begins(kind, state.get("iteration", 0), (state.get("totals") or {}).get("generated_tokens", 0))
        self._leading = leading

    def note(
        self, kind: Kind, why: str, *, who: str = "", tokens: int | None = None, since_s: float | None = None
    ) -> bool:
        """Note what has happened. since_s: Unix time of a loss that is noticed later. Returns: whether it is new."""
        now_s, who, seconds = time.time(), who or kind.partition(" ")[0], None
        if who in self._lost_s if kind in get_args(Loss) else kind in get_args(Return) and who not in self._lost_s:
            return False
        if kind in get_args(Loss):
            self._lost_s[who] = since_s or now_s
        elif kind in (*get_args(Return), *get_args(Beginning)) and who in self._lost_s:
            seconds = round(max(0.0, now_s - self._lost_s.pop(who)), 3)
        times, total_s, all_tokens = self._totals.get(kind, (0, 0.0, 0))
        self._totals[kind] = (times + 1, round(total_s + (seconds or 0.0), 3), all_tokens + (tokens or 0))
        entry = LifeEntry(
            time_s=now_s,
            kind=kind,
            who=who,
            why=" ".join(why.split())[:_MOST_LETTERS],
            seconds=seconds,
            tokens=tokens,
            totals=dict(self._totals),
            lost=dict(self._lost_s),
            serve=list(self._serve),
        )
        log.info(f"life of the run: {kind}", who=who, why=why, seconds=seconds, tokens=tokens)
        self.newest.append(entry)
        self._waiting.append(entry)
        self.write()
        return True

    def write(self) -> None:
        """Write what waits, as far as it can be written now: without it the run continues."""
        with contextlib.suppress(OSError, TandemError):
            # Without a lease that lasts, the check would wait for Redis.
            while self._waiting and self._run_dir and self._leading is not None and self._leading.lease.left_s > 0:
                append_json(self._run_dir / LIFE_FILE, asdict(self._waiting[0]), self._leading.check)
                self._waiting.popleft()

    def begins(self, kind: Beginning, iteration: int, generated_tokens: int) -> None:
        """Say who begins soon, and how far the one before was."""
        self._beginning = kind, iteration, generated_tokens

    def begin(self, iteration: int, generated_tokens: int) -> None:
        """Note that the run works, from this iteration on."""
        self._serve = dict.fromkeys(self._serve)  # their clients are new ones
        if self._beginning is not None:
            kind, done, generated = self._beginning
            why = f"after iteration {iteration}" if iteration else "from the beginning"
            why += f", {done} were done" if done > iteration else ""
            self.note(kind, why, tokens=max(0, generated - generated_tokens))
        self._beginning = None
        self.note("trainer back", "it was there when the coordinator began", tokens=0)
        self.look(*self._early)

    def look(self, serving: Sequence[Replica], left_out: Mapping[str, str]) -> None:
        """Note who of the replicas serves now. left_out: why others do not, by name."""
        if self._beginning is not None:  # that comes first
            self._early = serving, left_out
            return
        now, is_first = {replica.name: replica for replica in serving}, not (self._serve or self._gone)
        for name, before in list(self._serve.items()):
            is_over = before is None or not before.is_generating  # else more of its tokens come
            if is_over and (name not in now or before not in (None, now[name])):
                del self._serve[name]
                self._gone[name] = before
                self._note_gone(name, before, left_out.get(name) or "it does not serve: killed, frozen or cut off")
        for name, gone in self._gone.items():
            if gone is not None and gone.why and not gone.left:  # it has said that it failed last of all
                self.note("replica lost", gone.why, who=name)
        for name, replica in now.items():
            if self._serve.get(name) is not None:  # it, or one before it that is not over
                continue
            is_new, self._serve[name] = name not in self._serve, replica
            before = self._gone.pop(name, None)
            if name in self._lost_s:
                self.note("replica back", "the same process" if before is replica else "a new process", who=name)
            elif is_new:
                why = "new to the run" if before is None else "a new process of one that had left"
                self.note("replica joined", "at the start" if is_first else why, who=name)
        self.write()

    def _note_gone(self, name: str, before: Replica | None, why: str) -> None:
        if before is None and self._is_too_many(name):
            self.note("replica left", "fewer were asked for before the coordinator began", who=name)
        elif before is None:
            self.note("replica lost", "it did not serve when the coordinator began", who=name)
        elif before.left:
            self.note("replica left", before.why or "it was asked to end", who=name, tokens=before.cut[1])
        else:
            self.note("replica lost", before.why or why, who=name, tokens=before.cut[1], since_s=before.cut[0])

    def _is_too_many(self, name: str) -> bool:
        """Whether its number says that it is none of as many replicas as there should be."""
        with contextlib.suppress(ConfigError, ValueError):
            scale = None if self._run_dir is None else read_scale(self._run_dir)
            return scale is not None and int(name.rpartition("-")[2]) >= scale.replicas
        return False
