"""A run from its first weight sync to its summary: iterations, evaluations, checkpoints, and when to stop.

start      trainer's version == ours; sync it to every replica; first evaluation
iterate    gate -> iteration (loop.py) -> evaluation (record/evaluations.py) -> checkpoint -> report
finish     checkpoint, Hugging Face export, summary
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from structlog.contextvars import bound_contextvars

from coordinator.flow import DataKey, Scored, SyncResult
from coordinator.lead import Lead, check_lead, last_look
from coordinator.learn.evaluation import Evaluated
from coordinator.leaving import Leaving
from coordinator.loop import GrpoLoop
from coordinator.record.checkpoint import Checkpointer, set_damaged_aside
from coordinator.record.evaluations import Evaluations, evaluation_row, heldout_of
from coordinator.record.exporting import Exporter
from coordinator.record.health import Watch, troubles
from coordinator.record.remarks import check_same_model, remarks, score_remarks
from coordinator.record.report import IterationRecord, Timing, build_row, numeric
from coordinator.record.resuming import reward_warning
from coordinator.record.sinks import Finished, Sink, Sinks
from coordinator.record.state import RunState
from coordinator.sync.take_over import take_over
from coordinator.watch import metrics
from coordinator.watch.control import RunControl
from coordinator.watch.events import EventKind, EventLog
from servicekit.errors import Internal, WrongVersion
from servicekit.life.tasks import cancel
from servicekit.logs import get_logger
from servicekit.stopwatch import Stopwatch
from servicekit.tracing import span
from tandem_config.schema import RunSection
from tandem_files.checkpoints import Sound
from tandem_files.metrics_file import METRICS_FILE, MetricsFile, Row
from tandem_files.run_config import adopt_next
from tandem_files.run_folder import STATE_FILE

# Iterations in a row without anything to train on (grpo.zero_variance: drop) before the run stops: the policy does not
# change meanwhile, so waiting cannot change the outcome.
MAX_SKIPPED_IN_A_ROW = 10
# Name of the evaluation on data.heldout.
HELDOUT: DataKey = "heldout"

log = get_logger(__name__)


@dataclass(kw_only=True)
class Run:
    """A run in progress.

    Attributes:
        settings: the configuration's section `run`.
        logprob_diff_limit: grpo.logprob_diff_limit.
        logprob_diff_stop: grpo.logprob_diff_stop.
        state: progress of the run, by this process and earlier ones.
        resumed: whether earlier processes may have worked on this run, with the same services.
        checkpoint: the one that the run resumes from.
        lead: checked before anything is written.
        lead_patience_s: how long to wait for Redis to confirm that we lead the run.
        reward_facts: what the scores depend on (resuming.py).
        dropped_prompts: by part of the data and name of the source, prompts dropped since they are longer than
            data.max_prompt_tokens.
        leaving: the state shared with the code that stops the run.
        sinks: get every finished iteration.
    """

    settings: RunSection
    logprob_diff_limit: float
    logprob_diff_stop: float | None
    run_dir: Path
    loop: GrpoLoop
    evaluations: Evaluations
    checkpointer: Checkpointer
    exporter: Exporter
    control: RunControl
    events: EventLog
    state: RunState
    lead: Lead
    lead_patience_s: float
    reward_facts: Mapping[str, str] = field(default_factory=dict)
    dropped_prompts: Mapping[DataKey, Mapping[str, int]] = field(default_factory=dict)
    leaving: Leaving = field(default_factory=Leaving)
    sinks: Sequence[Sink] = ()
    resumed: bool = False
    checkpoint: Sound | None = None
    _report_s: float = field(default=0.0, init=False)
    _checkpointed: int = field(default=-1, init=False)
    # By data file or set, rows with an unreadable answer that were warned about.
    _remarked_rows: dict[str, set[str]] = field(default_factory=dict, init=False)
    _curves: list[dict[str, float]] = field(default_factory=list, init=False)
    _watch: Watch = field(default_factory=Watch, init=False)

    def __post_init__(self) -> None:
        self._rows = MetricsFile(self.run_dir / METRICS_FILE)
        self._sinks = Sinks(self.sinks, partial(self._warn, "sink"))
        # Seconds of work of earlier processes on this run.
        self._earlier_s = self.state.wall_s
        self._start_s = time.monotonic()
        self._checkpointed = self.state.iteration if self.state.iteration else -1

    async def execute(self) -> None:
        """Execute the whole run; when asked to end early, do what leaving.py says.

        Raises: TandemError: of the service that failed, with its name; the state on disk is that of the last iteration.
        """
        working = asyncio.create_task(self._work(), name="iterations")
        try:
            await self.leaving.until_safe(working)
            if working.done() or self._is_over(self.state.iteration):
                await working
                return
            await cancel(working)
            await self._save()
            self.leaving.left = True
        finally:
            await cancel(working)
            await self._sinks.close()

    async def _work(self) -> None:
        await self._start()
        while not self._is_over(self.state.iteration):
            await self.control.gate()
            if not self.control.stop_requested:
                await self._traced_iteration(self.state.iteration + 1)
        await self._finish()

    async def _start(self) -> None:
        await self.loop.weights.take_over()
        await self._check_lead()
        lost = self._rows.cut_after(self.state.iteration)
        if lost:
            message = f"{METRICS_FILE} lacks the rows of {lost} iterations up to {self.state.iteration}"
            self._warn("lost_rows", f"{message}: lost in a crash or on a full disk")
        self._curves = [numeric(row) for row in self._rows.rows()]
        self._note_dropped_prompts()
        self._warn_if("reward_changed", reward_warning(self.state.rewards, self.reward_facts))
        self.state.rewards = dict(self.reward_facts)
        self.exporter.note_template()
        self._announce("sync")
        await self._agree_on_version()
        self._step_over_damaged()
        # On a resume too: replicas start without weights, and no other process would send them.
        self._note_sync(await self.loop.weights.publish(self.state.policy_version))
        metrics.POLICY_VERSION.set(self.state.policy_version)
        metrics.ITERATION.set(self.state.iteration)
        metrics.LOGPROB_DIFF_LIMIT.set(self.logprob_diff_limit)
        await self._evaluate_at_the_start()
        if self.state.initial_accuracy is not None:
            metrics.INITIAL_ACCURACY.set(self.state.initial_accuracy)
        await self._check_lead()
        self._save_state("running")
        self.leaving.settled.set()
        self.leaving.saves = True

    async def _evaluate_at_the_start(self) -> None:
        """Evaluate the policy before the first iteration: the baseline of all later ones."""
        evaluated = await self.evaluations.at_the_start()
        if evaluated:
            self._note_evaluated(evaluated, self.state.iteration)
            row = self.evaluations.note_baseline()
            self._sinks.take(Finished(record=None, row=row, evaluated=evaluated))

    async def _agree_on_version(self) -> None:
        """Bring run and trainer to one policy version.

        Raises: WrongVersion: a new run finds a trainer that has trained already.
        """
        trainer, ours = self.loop.trainer, self.state.policy_version
        if self.resumed:
            folder = self.checkpointer.trainer_folder(self.state.iteration) if self.state.iteration else None
            version = await take_over(trainer, self.loop.weights, ours, folder)
            if version != ours:
                self._warn("take_over", f"the checkpoint's version {ours} is now {version}: services were ahead of it")
            self.state.policy_version = version
            return
        trained = (await trainer.status()).policy_version
        if trained != ours:
            raise WrongVersion(
                f"the trainer is at policy version {trained}, this run begins at {ours}: "
                "start a new trainer too, or resume from a checkpoint (--resume)"
            )

    def _step_over_damaged(self) -> None:
        """Warn of newer checkpoints that could not be used, and rename them, so that later ones can be written."""
        if self.checkpoint is None:
            return
        for complaint, remark in set_damaged_aside(self.checkpoint):
            self.state.damaged_checkpoints.append(complaint)
            self._warn("damaged_checkpoint", complaint + remark)
        self.checkpoint = None

    def _note_dropped_prompts(self) -> None:
        """Warn of dropped prompts (data.overlong_prompts: drop): they change what is trained."""
        for data, by_source in self.dropped_prompts.items():
            count = sum(by_source.values())
            metrics.DROPPED_PROMPTS.labels(data=data).set(count)
            if count:
                shares = ", ".join(f"{name}: {dropped}" for name, dropped in by_source.items())
                which = f" ({shares})" if len(by_source) > 1 else ""
                message = f"{count} prompts of data.{data} were dropped{which}: longer than max_prompt_tokens"
                self._warn("dropped_prompts", message)

    def _is_over(self, iteration: int) -> bool:
        """Whether no iteration follows `iteration`."""
        target, accuracy = self.settings.target_accuracy, self.state.last_accuracy
        reached = target is not None and accuracy is not None and accuracy >= target
        return reached or self.control.stop_requested or iteration >= self.settings.iterations

    async def _traced_iteration(self, number: int) -> None:
        """Run an iteration as one trace, with its number in every log line."""
        where = {"iteration": number, "policy_version": self.state.policy_version}
        with bound_contextvars(**where), span("iteration", **where):
            await self._iterate(number)

    async def _iterate(self, number: int) -> None:
        watch = Stopwatch(self._part)
        before = self.evaluations.beside(number)
        record = await self.loop.iterate(number, self.state.policy_version, watch, before)
        check_same_model(record, self.logprob_diff_stop)
        evaluated = await before.result() or []
        self._note_evaluated(evaluated, number - 1)
        improved = False
        if self.evaluations.is_due(number, last=self._is_over(number)):
            with watch.part("evaluate"):
                after = await self.evaluations.after(number, record.policy_version, last=self._is_over(number))
            improved = self._note_evaluated(after, number)
            evaluated = [*evaluated, *after]
        checkpoint = self._has_checkpoint(number) or self.evaluations.wants_checkpoint(number, improved=improved)
        if checkpoint:
            with watch.part("checkpoint"):
                await self._check_lead()
                await self.checkpointer.save_trainer(number)
        if self.exporter.is_due(number) and not self._is_over(number):  # the final policy is exported in any case
            with watch.part("export"):
                await self._check_lead()
                self._warn_if("export", await self.exporter.export(number))
        parts = {**watch.parts, "report": self._report_s}
        await self._report(record, evaluated, Timing(parts=parts, total_s=watch.total_s() + self._report_s), checkpoint)

    def _has_checkpoint(self, number: int) -> bool:
        """Whether iteration `number` ends with a checkpoint, or has ended with one."""
        every, over = self.settings.checkpoint_every, self._is_over(number)
        return number % every == 0 or over or number == self._checkpointed

    async def _report(
        self, record: IterationRecord, evaluated: Sequence[Evaluated], timing: Timing, checkpoint: bool
    ) -> None:
        """Write the row, then the state, then complete the checkpoint, which a resume starts from."""
        start_s = time.perf_counter()
        await self._check_lead()
        row = build_row(record, heldout_of(evaluated), timing) | evaluation_row(evaluated)
        self._advance(record, row)
        for kind, message in remarks(record, self.logprob_diff_limit):
            self._warn(kind, message)
        self._note_scores("train", record.scored)
        self._check_training(row)
        self._rows.append(row, self._last_look)
        self._save_state("running")
        if adopt_next(self.run_dir):
            log.info("configuration of this launch adopted")
        if checkpoint:
            self._rows.sync()
            await self.checkpointer.complete(self.state, self._check_lead, self._last_look)
            self._checkpointed = record.iteration
        if evaluated:
            await self.checkpointer.mark_best(self.state.best, self._last_look)
        metrics.observe_row(row, {**timing.parts, "total": timing.total_s})
        self.events.append(EventKind.ITERATION, f"iteration {record.iteration}", numeric(row))
        log.info("iteration done", **{name: row[name] for name in ("iteration", "reward_mean", "iteration_s")})
        self._sinks.take(Finished(record=record, row=row, evaluated=evaluated))
        self._report_s = time.perf_counter() - start_s
        self.leaving.settled.set()
        if self.state.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise Internal(
                f"{self.state.skipped_in_a_row} iterations in a row had nothing to train on, since all rewards of each "
                "group were equal: set grpo.zero_variance=keep, or look at the reward and the task's difficulty"
            )

    def _check_training(self, row: Row) -> None:
        """Record the troubles of the training, and warn of new ones."""
        self._curves.append(numeric(row))
        now = troubles(self._curves, self.state.initial_accuracy, self.logprob_diff_limit)
        self.state.troubles = [trouble.text for trouble in now]
        for trouble in self._watch.begun(now):
            if trouble.kind != "mismatch":  # a remark of each iteration
                self._warn("training", f"iteration {self.state.iteration}: {trouble.text}")

    def _advance(self, record: IterationRecord, row: Row) -> None:
        """Update the state and its metrics to the end of the iteration."""
        state, totals = self.state, self.state.totals
        state.iteration, state.policy_version = record.iteration, record.policy_version
        state.cursor, state.batch_rng = self.loop.cursor.state(), dict(self.loop.rng.bit_generator.state)
        state.skipped_in_a_row = state.skipped_in_a_row + 1 if record.step is None else 0
        dropped, trained = int(row["dropped_groups"] or 0), int(row["trained_samples"] or 0)
        totals.generated_tokens += record.generation.num_tokens
        totals.trained_samples += trained
        totals.dropped_groups += dropped
        totals.dropped_samples += record.scored.num_missing
        totals.skipped_steps += record.step is None
        totals.retried_calls += record.generation.retried_calls
        difference = row["logprob_abs_diff_max"]
        if difference is not None:
            totals.logprob_abs_diff_max = max(difference, totals.logprob_abs_diff_max or 0.0)
        if record.sync is not None:
            self._note_sync(record.sync)
        metrics.ITERATION.set(state.iteration)
        metrics.POLICY_VERSION.set(state.policy_version)
        metrics.GENERATED_TOKENS.inc(record.generation.num_tokens)
        metrics.TRAINED_SAMPLES.inc(trained)
        metrics.DROPPED_GROUPS.inc(dropped)
        metrics.DROPPED_SAMPLES.inc(record.scored.num_missing)
        metrics.RETRIED_CALLS.inc(record.generation.retried_calls)

    def _note_scores(self, data: DataKey, scored: Scored, where: str = "data.train") -> None:
        """Count scores of 0 that are not the policy's fault, and warn of them."""
        totals = self.state.totals
        (totals if data == "train" else totals.heldout).note_scores(scored)
        metrics.observe_scores(data, scored)
        for kind, message in score_remarks(where, scored, self._remarked_rows.setdefault(where, set())):
            self._warn(kind, message)

    def _note_evaluated(self, evaluated: Sequence[Evaluated], iteration: int) -> bool:
        """Record evaluations of the policy after `iteration`. Returns: whether it is the best so far."""
        for result in evaluated:
            self._note_scores("heldout", result.scored, f"evaluation set {result.name}")
        return self.evaluations.note(evaluated, iteration, has_checkpoint=self._has_checkpoint(iteration))

    async def _save(self) -> None:
        """Write a checkpoint of the last iteration, if there is one and it has none yet."""
        if self.state.iteration in (0, self._checkpointed):
            return
        await self._check_lead()
        await self.checkpointer.save_trainer(self.state.iteration)
        self._rows.sync()
        await self.checkpointer.complete(self.state, self._check_lead, self._last_look)
        self._checkpointed = self.state.iteration
        log.info("checkpoint saved at the end", iteration=self.state.iteration)

    async def _finish(self) -> None:
        """Write the run's results: a last checkpoint and the policy as a Hugging Face folder."""
        await self._save()
        self._announce("export")
        problem = await self.exporter.export_final()
        self._warn_if("export", problem)
        await self._check_lead()
        self.state.troubles += [problem] if problem else []
        self._save_state("finished")

    async def _check_lead(self) -> None:
        """Wait until it is certain that we lead the run. Raises: Evicted: another coordinator has taken over."""
        await check_lead(self.lead, self.lead_patience_s)

    def _last_look(self) -> None:
        last_look(self.lead)

    def rows(self) -> list[Row]:
        """Return the rows of metrics.jsonl."""
        return self._rows.rows()

    def _note_sync(self, sync: SyncResult) -> None:
        totals = self.state.totals
        totals.note_sync(sync.total_s)
        totals.bytes_per_rollout_rank, totals.redundancy = sync.bytes_per_rollout_rank, sync.redundancy

    def _part(self, part: str) -> AbstractContextManager[object]:
        """Announce that a part of an iteration begins. Returns: its span."""
        self._announce(part)
        return span(part)

    def _announce(self, part: str) -> None:
        if part == "train":
            self.leaving.settled.clear()
        self.state.last_progress_s = time.time()
        metrics.progress()
        self.events.append(EventKind.PROGRESS, part)

    def _warn(self, kind: str, message: str) -> None:
        self.state.totals.warnings += 1
        metrics.WARNINGS.labels(kind=kind).inc()
        self.events.append(EventKind.WARNING, message)
        log.warning(message, kind=kind)

    def _warn_if(self, kind: str, message: str) -> None:
        """Warn, if there is a message."""
        if message:
            self._warn(kind, message)

    def _save_state(self, status: str) -> None:
        self.state.status = status
        self.state.wall_s = self._earlier_s + time.monotonic() - self._start_s
        self.state.note(self.run_dir / STATE_FILE, self._last_look)
