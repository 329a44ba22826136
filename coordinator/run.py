"""A run from its first weight sync to its summary: iterations, evaluations, checkpoints, and when to stop.

start      trainer's version == ours; sync it to every replica; first evaluation
iterate    gate -> iteration (schedule/) -> evaluation (record/evaluations.py) -> checkpoint -> report
finish     checkpoint, Hugging Face export, summary
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from structlog.contextvars import bound_contextvars

from coordinator.checkpoints.run_checkpoints import RunCheckpoints
from coordinator.leader_lease import LeaderCheck
from coordinator.learn.evaluation import EvaluationResult
from coordinator.ledger.returning import ReturningTrainer
from coordinator.record.evaluations import Evaluations, evaluation_row, heldout_of
from coordinator.record.exporting import Exporter
from coordinator.record.iteration_warnings import check_same_model
from coordinator.record.metrics_row import Timing, build_row
from coordinator.record.progress import Progress
from coordinator.record.resuming import Renewal, reward_warning
from coordinator.record.sinks import FinishedIteration, Sink, Sinks
from coordinator.record.state import RunState
from coordinator.schedule.sync import SyncSchedule
from coordinator.shutdown import Leaving
from coordinator.take_over import LastIteration, take_over
from coordinator.watch.control import RunControl
from servicekit.errors import Internal, TandemError, WrongVersion, in_part
from servicekit.lifecycle.background import BackgroundTask
from servicekit.lifecycle.tasks import cancel
from servicekit.lifecycle.termination import watch
from servicekit.logs import get_logger
from servicekit.stopwatch import Stopwatch
from servicekit.tracing import span
from tandem_clients.flow import DataKey, IterationRecord
from tandem_clients.trainer import Trainer
from tandem_config.comparing.resuming import UNRECORDED, RunComparison
from tandem_config.schema import RunSection
from tandem_files.checkpoints import UndamagedCheckpoint
from tandem_files.metrics_file import METRICS_FILE, Baseline, MetricsFile
from tandem_files.run_config import adopt_next
from tandem_files.run_folder import STATE_FILE

log = get_logger(__name__)
# What the end of a run calls the parts of an iteration.
_PARTS = {
    "generate": "generation",
    "reward": "rewards",
    "reference": "reference log-probs",
    "batch": "batch",
    "train": "trainer",
    "evaluate": "evaluation",
    "sync": "weight sync",
    "checkpoint": "checkpoint",
    "export": "export",
}


@dataclass(kw_only=True)
class Run:
    """A run in progress.

    Attributes:
        state: what this process and earlier ones have done; `progress` keeps it up to date.
        resumed: whether earlier processes may have worked on this run, with the same services.
        checkpoint: the one that the run resumes from, unless its trainer has more.
        last: the run after the iterations since that checkpoint, if there were any.
        comparison: of the run with the checkpoint that it resumes from; None: it does not.
        renewal: what is not compared with that checkpoint's evaluations.
        dropped_prompts: longer than data.max_prompt_tokens, by part of the data and source.
        leaving: shared with the code that stops the run.
        returning: the same trainer, which may be lost and come back.
    """

    settings: RunSection
    logprob_diff_stop: float | None
    run_dir: Path
    schedule: SyncSchedule
    trainer: Trainer
    returning: ReturningTrainer
    evaluations: Evaluations
    rows: MetricsFile
    checkpoints: RunCheckpoints
    exporter: Exporter
    control: RunControl
    state: RunState
    progress: Progress
    lead: LeaderCheck
    reward_facts: Mapping[str, str] = field(default_factory=dict)
    comparison: RunComparison | None = None
    renewal: Renewal = field(default_factory=Renewal)
    dropped_prompts: Mapping[DataKey, Mapping[str, int]] = field(default_factory=dict)
    leaving: Leaving = field(default_factory=Leaving)
    sinks: Sequence[Sink] = ()
    resumed: bool = False
    checkpoint: UndamagedCheckpoint | None = None
    last: LastIteration | None = None
    _report_s: float = field(default=0.0, init=False)
    # The step after the state's iteration, which the trainer has done already.
    _sent: str = field(default="", init=False)
    # Baselines of a resume, for the next row.
    _renewed: list[EvaluationResult] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._sinks = Sinks(self.sinks, partial(self.progress.warn, "sink"))
        self._earlier_s, self._start_s = self.state.wall_s, time.monotonic()

    async def execute(self) -> None:
        """Execute the whole run; when asked to end early, do what shutdown.py says.

        Raises: TandemError: of the service that failed, with its name; the state on disk is that of the last iteration.
        """
        working = asyncio.create_task(self._work(), name="iterations")
        seeding = asyncio.create_task(self.schedule.weights.run_seeding(), name="seeding")
        watch(seeding, lambda error: self.progress.warn("replicas", f"joiners wait for the trainer now: {error}"))
        try:
            await self.leaving.until_safe(working)
            if working.done() or self._is_over(self.state.iteration):
                await working
                return
            await cancel(working)
            await self.checkpoints.save_last()
            self.leaving.left = True
        except TandemError:
            await self.checkpoints.checkpointer.linger(self.settings.stop_timeout_s)
            raise
        finally:
            await cancel(working, seeding)
            await self.schedule.close()
            await self.evaluations.close()
            await self.checkpoints.checkpointer.close()
            await self.schedule.ledger.close()
            await self._sinks.close()

    async def _work(self) -> None:
        with in_part("start of the run"):
            await self._start()
        while not self._is_over(self.state.iteration):
            await self.control.gate()
            if not self.control.stop_requested:
                await self._traced_iteration(self.state.iteration + 1)
        with in_part("end of the run"):
            await self._finish()

    async def _start(self) -> None:
        await self.schedule.weights.take_over()
        log.info("services taken over", token=self.lead.leader.token)
        await self.lead.confirm()
        is_ahead = await self._is_ahead()
        self.state.fence = self.lead.leader.token
        saved = self.state.policy_version
        lost = self.rows.cut_after(self.state.iteration, self.lead.check)
        if lost:
            message = f"{METRICS_FILE} lacks the rows of {lost} iterations up to {self.state.iteration}"
            self.progress.warn("lost_rows", f"{message}: lost in a crash or on a full disk")
        since = Baseline(renewed=self.state.renewed)
        self.progress.load([since.comparable(row) for row in self.rows.rows()])
        self.progress.note_dropped_prompts(self.dropped_prompts)
        self._note_comparison()
        self.progress.warn_if("reward_changed", reward_warning(self.state.rewards, self.reward_facts))
        self.state.rewards = dict(self.reward_facts)
        await self._note_renewal()
        self.exporter.note_template()
        self._announce("sync")
        serves = saved + 1 if self._sent else None
        if not is_ahead:
            await self._agree_on_version()
        await self.schedule.ledger.open(self.state, saved=saved, step_id=self._sent)
        self.returning.stands_at(serves or self.state.policy_version, self._sent or self.state.step_id)
        self.checkpoints.set_damaged_aside(self.checkpoint)
        # On a resume too: replicas start without weights, and no other process would send them.
        with self._part("sync"):
            self.progress.note_sync(await self.schedule.weights.publish(serves or self.state.policy_version))
        self.progress.start()
        if is_ahead and not self._sent:
            await self.checkpoints.make_up()
        else:
            self.checkpoints.missed.none()
        if self.state.evaluating < self.state.iteration:  # else it is evaluated again
            self.evaluations.note_lost("the run was stopped before")
        await self._evaluate_at_the_start()
        await self.lead.confirm()
        self._save_state("running")
        self.leaving.settled.set()
        self.leaving.saves = True

    async def _is_ahead(self) -> bool:
        """Continue after the last iteration, if the trainer stands there, or at most one known step further.

        Returns: whether it does.
        """
        last, checkpoint, ledger = self.last, self.state.iteration, self.schedule.ledger
        if last is None:
            return False
        sends = not self.schedule.grpo.kl_in_reward  # a trainer beyond the step measures another divergence
        if last.may_repeat:
            folder = None if self.checkpoint is None else self.checkpoint.folder
            served = await self.schedule.weights.newest_version()
            await last.bring(self.returning, folder, ledger, served, sends=sends)
        trainer = await self.trainer.status()
        if sends:
            self._sent = await last.sent_step(trainer, ledger)
        if not self._sent and not last.is_of(trainer):
            return False
        self.state.become(last.state)
        self.state.error, self.renewal = "", last.renewal
        self.schedule.cursor.restore(self.state.cursor)
        self.schedule.rng.bit_generator.state = self.state.batch_rng
        self._earlier_s, self._start_s = self.state.wall_s, time.monotonic()
        where = {"iteration": self.state.iteration, "checkpoint": checkpoint}
        log.info("continuing after the last iteration", **where, step_done=self._sent)
        return True

    def _note_comparison(self) -> None:
        """Log the settings that have changed since the checkpoint, or warn if it does not say what they were."""
        if self.comparison is None:
            return
        if not self.comparison.recorded:
            self.progress.warn("unrecorded_run", UNRECORDED)
        if self.comparison.changed:
            log.info("resumed with other settings", changed=self.comparison.changed)

    async def _note_renewal(self) -> None:
        """Warn of evaluation sets that begin anew, and keep the checkpoint of the best policy by the former ones."""
        best = self.renewal.former_best
        if best is not None and best.iteration:
            await asyncio.to_thread(self.checkpoints.keep, best.iteration)
        for message in self.renewal.messages:
            self.progress.warn("evaluation_changed", message)

    async def _evaluate_at_the_start(self) -> None:
        """Evaluate the policy before the first iteration: the baseline of all later ones."""
        with self._part("evaluate"):
            evaluated = await self.evaluations.at_the_start()
        if not evaluated:
            return
        self._note_evaluated(evaluated, self.state.iteration)
        row = self.evaluations.note_baseline(evaluated)
        if self.state.iteration:
            self._renewed = evaluated
            return
        await self.lead.confirm()
        self.rows.append(row, self.lead.check)
        self._sinks.take(FinishedIteration(record=None, row=row, evaluated=evaluated))

    async def _agree_on_version(self) -> None:
        """Bring run and trainer to one policy version.

        Raises: WrongVersion: a new run finds a trainer that has trained already.
        """
        trainer, ours = self.trainer, self.state.policy_version
        if self.resumed:
            version = await take_over(trainer, self.schedule.weights, ours, self.checkpoints.trainer_folder())
            if version != ours:
                self.progress.warn(
                    "take_over", f"the checkpoint's version {ours} is now {version}: services were ahead of it"
                )
            self.state.policy_version = version
            return
        trained = (await trainer.status()).policy_version
        if trained != ours:
            raise WrongVersion(
                f"the trainer is at policy version {trained}, this run begins at {ours}: "
                "start a new trainer too, or resume from a checkpoint (--resume)"
            )

    def _is_over(self, iteration: int) -> bool:
        """Whether no iteration follows `iteration`."""
        target, accuracy = self.settings.target_accuracy, self.state.last_accuracy
        reached = target is not None and accuracy is not None and accuracy >= target
        return reached or self.control.stop_requested or iteration >= self.settings.iterations

    async def _traced_iteration(self, number: int) -> None:
        """Run an iteration as one trace, with its number in every log line."""
        where = {"iteration": number, "policy_version": self.state.policy_version}
        with bound_contextvars(**where), span("iteration", **where), in_part(f"iteration {number}"):
            await self._iterate(number)

    async def _iterate(self, number: int) -> None:
        watch = Stopwatch(self._part)
        before = BackgroundTask[list[EvaluationResult] | None]() if self._sent else self.evaluations.beside(number)
        if self._sent and self.evaluations.is_due_beside(number):
            self.progress.warn(
                "evaluation_lost", f"the policy after iteration {number - 1} is not evaluated: it is gone"
            )
        self._sent = ""
        record = await self.schedule.iterate(number, self.state.policy_version, watch, before)
        check_same_model(record, self.logprob_diff_stop)
        evaluated = await before.result() or []
        self._note_evaluated(evaluated, number - 1)
        evaluated, self._renewed = [*self._renewed, *evaluated], []
        # Its policy's checkpoint must not be old when it is found to be the best.
        is_last = self._is_over(number)
        decides = self.evaluations.settings.best is not None and self.checkpoints.has(number, last=is_last)
        if self.evaluations.has_apart(number, waits=is_last or decides):
            with watch.part("evaluate"):
                apart, evaluated_after = await self.evaluations.apart()
                await self.schedule.weights.seed_by_replicas()  # those that have evaluated
                await self.schedule.seed_joiners(record.policy_version)
            self._note_evaluated(apart, evaluated_after)
            evaluated = [*evaluated, *apart]
        improved = False
        if self.evaluations.is_due(number, last=self._is_over(number)):
            with watch.part("evaluate"):
                after = await self.evaluations.after(number, record.policy_version, last=self._is_over(number))
            improved = self._note_evaluated(after, number)
            evaluated = [*evaluated, *after]
        checkpoint = self.checkpoints.has(number, last=self._is_over(number)) or self.evaluations.wants_checkpoint(
            number, improved=improved
        )
        if checkpoint:
            with watch.part("checkpoint"):
                checkpoint = await self.returning.when_there(partial(self.checkpoints.save_trainer, number))
        if self.exporter.is_due(number) and not self._is_over(number):  # the final policy is exported in any case
            with watch.part("export"):
                await self.lead.confirm()
                self.progress.warn_if("export", await self.returning.when_there(partial(self.exporter.export, number)))
        parts = {**watch.parts, "report": self._report_s}
        await self._report(record, evaluated, Timing(parts=parts, total_s=watch.total_s() + self._report_s), checkpoint)

    async def _report(
        self, record: IterationRecord, evaluated: Sequence[EvaluationResult], timing: Timing, checkpoint: bool
    ) -> None:
        """Write the row, then the state, then complete the checkpoint, which a resume starts from."""
        start_s = time.perf_counter()
        if self.checkpoints.checkpointer.has_ended:
            await self.returning.persist(self.checkpoints.settle)
        await self.lead.confirm()
        row = build_row(record, heldout_of(evaluated), timing) | evaluation_row(evaluated)
        self.state.cursor, self.state.batch_rng = (
            self.schedule.position(),
            dict(self.schedule.rng.bit_generator.state),
        )
        self.state.steps_digest = self.schedule.ledger.digest
        self.progress.advance(record, row)
        for write in (partial(self.rows.append, row, self.lead.check), partial(self._save_state, "running")):
            await self.progress.until_room(write, self.settings.full_disk_timeout_s)
        self.schedule.ledger.done(self.state.wave)
        if adopt_next(self.run_dir, self.lead.check):
            log.info("configuration of this launch adopted")
        if checkpoint:
            await self.checkpoints.complete()
        if evaluated:
            await self.checkpoints.mark_best()
        self.progress.report(row, {**timing.parts, "total": timing.total_s})
        self._sinks.take(FinishedIteration(record=record, row=row, evaluated=evaluated))
        self._report_s = time.perf_counter() - start_s
        self.leaving.settled.set()
        self.progress.check_not_stuck()

    def _note_evaluated(self, evaluated: Sequence[EvaluationResult], iteration: int) -> bool:
        """Record evaluations of the policy after `iteration`. Returns: whether it is the best so far."""
        for result in evaluated:
            self.progress.note_scores("heldout", result.scored, f"evaluation set {result.name}")
        return self.evaluations.note(evaluated, iteration)

    async def _finish(self) -> None:
        """Write a last checkpoint, and the policy as a Hugging Face folder."""
        self._announce("checkpoint")
        await self.returning.when_there(self.checkpoints.save_last)
        self._announce("export")
        problem = await self.returning.when_there(self.exporter.export_final)
        self.progress.warn_if("export", problem)
        await self.lead.confirm()
        self.state.troubles += [problem] if problem else []
        self._save_state("finished")

    @contextlib.contextmanager
    def _part(self, part: str) -> Iterator[None]:
        """Announce that a part of an iteration begins; in its span, and named by its errors."""
        self._announce(part)
        with span(part), in_part(_PARTS[part]):
            try:
                yield
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                raise Internal("its work was cancelled from inside, which nothing should do: see the log") from error
            finally:
                self.progress.announce("")

    def _announce(self, part: str) -> None:
        if part == "train":
            self.leaving.settled.clear()
        self.progress.announce(part)

    def _save_state(self, status: str) -> None:
        self.state.status = status
        self.state.wall_s = self._earlier_s + time.monotonic() - self._start_s
        self.state.save(self.run_dir / STATE_FILE, self.lead.check, durable=False)
