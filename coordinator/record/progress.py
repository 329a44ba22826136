"""How far a run is: counts finished iterations into its state, and says in events, metrics and log what is new."""

import asyncio
import errno
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.record.health import Trouble, judged
from coordinator.record.iteration_warnings import remarks, score_remarks
from coordinator.record.metrics_row import numeric
from coordinator.record.state import RunState
from coordinator.watch import metrics
from coordinator.watch.events import EventKind, EventLog
from coordinator.watch.life import Life
from servicekit.errors import Internal
from servicekit.logs import get_logger
from tandem_clients.flow import DataKey, GroupScores, IterationRecord, SyncResult
from tandem_files.metrics_file import Heldout, Row, thin_rows
from tandem_files.metrics_table import REWARD

# Iterations in a row without anything to train on (grpo.zero_variance: drop) before the run stops: the policy does not
# change meanwhile, so waiting cannot change the outcome.
MAX_SKIPPED_IN_A_ROW = 10
# Between two tries to write where there was no room.
_LOOK_S = 1.0

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of a run.

    Attributes:
        limits: health.logprob_limits.
        life: notes that the run begins, and a full disk.
    """

    state: RunState
    events: EventLog
    limits: Mapping[str, float]
    life: Life = field(default_factory=Life)
    # By data file or set, rows with an unreadable answer that were warned about.
    _remarked_rows: dict[str, set[str]] = field(default_factory=dict, init=False)
    _curves: list[dict[str, float]] = field(default_factory=list, init=False)
    # Those of the last iteration: one that ended and returns is new again.
    _troubles: list[Trouble] = field(default_factory=list, init=False)
    # By what it is of, files that could not be removed.
    _left: dict[str, list[str]] = field(default_factory=dict, init=False)

    def load(self, rows: Sequence[Row]) -> None:
        """Begin with the rows of earlier processes."""
        self._curves.extend(numeric(row) for row in rows)
        thin_rows(self._curves)

    def start(self) -> None:
        """Set the metrics to the state with which the first iteration begins."""
        self._set_position()
        self.life.begin(self.state.iteration, self.state.totals.generated_tokens)
        self.state.not_removed = []  # of the process before: tried again
        if self.state.initial_accuracy is not None:
            metrics.INITIAL_ACCURACY.set(self.state.initial_accuracy)
        metrics.observe_figures(judged(self._curves, Heldout.of_state(vars(self.state)), self.limits)[0])

    def announce(self, part: str) -> None:
        """Announce that a part of an iteration begins; "": that it has ended."""
        self.state.last_progress_s = time.time()
        metrics.progress()
        self.events.append(EventKind.PROGRESS, part)

    async def until_room(self, write: Callable[[], None], timeout_s: float) -> None:
        """Write a file of the run, again every second while its disk has no room for it.

        Raises: OSError: there is none after `timeout_s`; or for another reason.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                write()
                self.life.note("disk room", "the run continues")
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or time.monotonic() >= deadline_s:
                    raise
                if self.life.note("disk full", str(error)):
                    self.warn("disk", f"waiting {timeout_s:g} s (run.full_disk_timeout_s) for room: {error}")
            await asyncio.sleep(_LOOK_S)

    def warn(self, kind: str, message: str) -> None:
        """Warn the run's user."""
        self.state.totals.warnings += 1
        metrics.WARNINGS.labels(kind=kind).inc()
        self.events.append(EventKind.WARNING, message)
        log.warning(message, kind=kind)

    def warn_if(self, kind: str, message: str) -> None:
        """Warn, if there is a message."""
        if message:
            self.warn(kind, message)

    def note_left(self, what: str, left: Sequence[str]) -> None:
        """Show what could not be removed as a trouble of the run; warn of it once, and when it changes.

        Args:
            what: "checkpoints", ...
            left: which files, and why.
        """
        if list(left) == self._left.get(what, []):
            return
        self._left[what] = list(left)
        before = self.state.not_removed
        self.state.not_removed = [_not_removed(name, texts) for name, texts in self._left.items() if texts]
        self.state.troubles = [*(text for text in self.state.troubles if text not in before), *self.state.not_removed]
        if left:
            self.warn("not_removed", _not_removed(what, left))

    def note_dropped_prompts(self, dropped: Mapping[DataKey, Mapping[str, int]]) -> None:
        """Warn of dropped prompts (data.overlong_prompts: drop), by part and source: they change what is trained."""
        for data, by_source in dropped.items():
            count = sum(by_source.values())
            metrics.DROPPED_PROMPTS.labels(data=data).set(count)
            if count:
                shares = ", ".join(f"{name}: {number}" for name, number in by_source.items())
                which = f" ({shares})" if len(by_source) > 1 else ""
                message = f"{count} prompts of data.{data} were dropped{which}: longer than max_prompt_tokens"
                self.warn("dropped_prompts", message)

    def note_scores(self, data: DataKey, scored: GroupScores, where: str = "data.train") -> None:
        """Count scores of 0 that are not the policy's fault, and warn of them."""
        totals = self.state.totals
        (totals if data == "train" else totals.heldout).note_scores(scored)
        metrics.observe_scores(data, scored)
        for kind, message in score_remarks(where, scored, self._remarked_rows.setdefault(where, set())):
            self.warn(kind, message)

    def note_sync(self, sync: SyncResult) -> None:
        """Count a weight sync."""
        totals = self.state.totals
        totals.note_sync(sync.total_s)
        totals.bytes_per_rollout_rank, totals.redundancy = sync.bytes_per_rollout_rank, sync.redundancy

    def advance(self, record: IterationRecord, row: Row) -> None:
        """Bring state and metrics to the end of an iteration, and warn of what is odd about it."""
        state = self.state
        state.iteration, state.policy_version = record.iteration, record.policy_version
        state.step_id = state.step_id if record.step is None else record.step.step_id
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if record.step is None else 0
        self._count(record, row)
        if record.sync is not None:
            self.note_sync(record.sync)
        self._set_position()
        metrics.observe_ages(record.staleness)
        for kind, message in remarks(record, self.limits):
            self.warn(kind, message)
        self.note_scores("train", record.scored)
        self._check_training(row)

    def report(self, row: Row, parts: Mapping[str, float]) -> None:
        """Report an iteration whose row is written to those who watch. parts: seconds by part."""
        metrics.observe_row(row, parts)
        self.events.append(EventKind.ITERATION, f"iteration {row['iteration']}", numeric(row))
        log.info("iteration done", **{name: row[name] for name in ("iteration", REWARD, "iteration_s")})

    def check_not_stuck(self) -> None:
        """Raise Internal if there has been nothing to train on for too many iterations."""
        skipped = self.state.skipped_in_a_row
        if skipped > MAX_SKIPPED_IN_A_ROW:
            raise Internal(
                f"{skipped} iterations in a row had nothing to train on, because all rewards of each group were equal: "
                "set grpo.zero_variance=keep, or look at the reward and the task's difficulty"
            )

    def _set_position(self) -> None:
        metrics.ITERATION.set(self.state.iteration)
        metrics.POLICY_VERSION.set(self.state.policy_version)

    def _count(self, record: IterationRecord, row: Row) -> None:
        """Add an iteration to the totals."""
        totals = self.state.totals
        totals.generated_tokens += int(row["generated_tokens"] or 0)
        totals.trained_samples += int(row["trained_samples"] or 0)
        totals.dropped_groups += int(row["dropped_groups"] or 0)
        totals.dropped_samples += record.scored.num_missing
        totals.skipped_steps += record.step is None
        totals.retried_calls += record.generation.retried_calls
        difference = row["logprob_abs_diff_max"]
        if difference is not None:
            totals.logprob_abs_diff_max = max(difference, totals.logprob_abs_diff_max or 0.0)

    def _check_training(self, row: Row) -> None:
        """Record the troubles of the training, and warn of new ones."""
        self._curves.append(numeric(row))
        thin_rows(self._curves)
        found, now = judged(self._curves, Heldout.of_state(vars(self.state)), self.limits)
        metrics.observe_figures(found)
        of_disk = [*self.state.missed_checkpoints[-1:], *self.state.not_removed]
        self.state.troubles = [*of_disk, *(trouble.text for trouble in now)]
        known = {"mismatch", *(trouble.kind for trouble in self._troubles)}  # the first: a remark of each iteration
        self._troubles[:] = now
        for trouble in now:
            if trouble.kind not in known:
                self.warn("training", f"iteration {self.state.iteration}: {trouble.text}")


def _not_removed(what: str, left: Sequence[str]) -> str:
    """Describe what could not be removed."""
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return f"Old {what} cannot be removed, and fill the disk ({left[0]}{more}); each is tried again with the next."
