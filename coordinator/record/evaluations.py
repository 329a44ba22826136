"""When a run evaluates its policy, and what it keeps of it: baseline, events, metrics, the best policy.

| evaluation.concurrent | the policy after iteration N is evaluated    | and stands in      |
|-----------------------|----------------------------------------------|--------------------|
| false                 | after iteration N                            | the row of N       |
| true                  | during scoring and training of iteration N+1 | the row of N+1     |
| true, with `async`    | on replicas of its own (evaluation.replicas) | the row of the one |
|                       | which keep that policy until it is done      | in which it ends   |
| both: N = 0           | before iteration 1, which is the baseline    | row 0              |
| both: N the last      | after it                                     | the row of N       |

Columns `eval/<set>/policy_version` say which policy it was. A set that a resume adds or changes has its baseline then,
in the row of the next iteration.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from coordinator.fleet.lending import LendingFleet
from coordinator.learn.evaluation import EvaluationResult, Evaluator
from coordinator.record.metrics_row import baseline_row, numeric
from coordinator.record.state import BestPolicy, RunState
from coordinator.shutdown import Leaving
from coordinator.watch import metrics
from coordinator.watch.events import EventKind, EventLog
from servicekit.errors import DeadlineExceeded, Unavailable
from servicekit.lifecycle.background import BackgroundTask
from servicekit.lifecycle.tasks import cancel
from tandem_clients.flow import GroupScores
from tandem_clients.replica import Replica
from tandem_config.schema import HELDOUT, EvaluationSection
from tandem_files.metrics_file import Heldout, Row, score_text, set_of
from tandem_files.metrics_table import ACCURACY


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """The evaluations of a run.

    Attributes:
        settings: the configuration's section `evaluation`.
        leaving: an evaluation is cancelled when the run is asked to end.
        lending: lends replicas to evaluations beside training; None: all evaluate, and a weight sync waits for the end.
        warn: gets the kind and text of a warning.
    """

    settings: EvaluationSection
    evaluator: Evaluator
    state: RunState
    events: EventLog
    leaving: Leaving
    lending: LendingFleet | None = None
    warn: Callable[[str, str], None]
    # The evaluation on replicas of its own, if there is one; state.evaluating says of which policy.
    _apart: list[asyncio.Task[list[EvaluationResult]]] = field(default_factory=list, init=False)

    async def at_the_start(self) -> list[EvaluationResult]:
        """Evaluate the policy before the first iteration, or with what begins anew at a resume."""
        state = self.state
        lacking = [asked for asked in self.evaluator.sets if state.iteration == 0 or self._is_renewed(asked.name)]
        return await self.evaluator.evaluate(lacking, state.policy_version) if lacking else []

    def _is_renewed(self, name: str) -> bool:
        """Whether a set has begun anew at this resume, and has no baseline yet."""
        measured = {set_of(column) for column in self.state.baseline}
        return self.state.renewed.get(name) == self.state.iteration and name not in measured

    def beside(self, number: int) -> BackgroundTask[list[EvaluationResult] | None]:
        """Make the evaluation, beside iteration `number`, of the policy with which it begins, or begin it apart."""
        if not self.is_due_beside(number):
            return BackgroundTask()
        due = self.evaluator.due(number - 1)
        evaluate = partial(self.evaluator.evaluate, due, self.state.policy_version, beside_training=True)
        if self.lending is not None and (lent := self.lending.lend(self.settings.replicas or 1)):
            self.state.evaluating = number - 1
            work = self._evaluate_apart(evaluate(replicas=lent), self.lending, lent)
            self._apart.append(asyncio.create_task(work, name="evaluation"))
            return BackgroundTask()
        return BackgroundTask(lambda: self._unless_lost(evaluate(), number - 1))

    def is_due_beside(self, number: int) -> bool:
        """Whether the policy with which iteration `number` begins is evaluated beside it."""
        return self.settings.concurrent and number > 1 and bool(self.evaluator.due(number - 1))

    async def _unless_lost(
        self, evaluating: Coroutine[Any, Any, list[EvaluationResult]], iteration: int
    ) -> list[EvaluationResult] | None:
        try:
            return await self.leaving.unless_asked(evaluating)
        except (Unavailable, DeadlineExceeded) as error:  # the step that is beside it is not lost with it
            self.warn("evaluation_lost", f"the policy after iteration {iteration} is not evaluated: {error}")
            return None

    async def _evaluate_apart(
        self, evaluating: Coroutine[Any, Any, list[EvaluationResult]], lending: LendingFleet, lent: Sequence[Replica]
    ) -> list[EvaluationResult]:
        try:
            return await self.leaving.unless_asked(evaluating) or []
        except (Unavailable, DeadlineExceeded) as error:  # training continues without these replicas
            self.note_lost(str(error))
            return []
        finally:
            lending.give_back(lent)

    def note_lost(self, why: str) -> None:
        """Warn that an evaluation apart was lost, if there was one."""
        if self.state.evaluating:
            self.warn("evaluation_lost", f"the policy after iteration {self.state.evaluating} is not evaluated: {why}")
            self.state.evaluating = 0

    def has_apart(self, number: int, *, waits: bool) -> bool:
        """Whether an evaluation apart has ended, or must end now.

        Args:
            number: an iteration that has ended; another evaluation may follow.
            waits: it must.
        """
        return bool(self._apart) and (waits or self._apart[0].done() or self.is_due_beside(number + 1))

    async def apart(self) -> tuple[list[EvaluationResult], int]:
        """Wait for the evaluation apart. Returns: also the iteration after which the policy was evaluated."""
        work = self._apart.pop()
        evaluated, iteration = await work, self.state.evaluating
        if evaluated:  # else the run was asked to end: its resume says so
            self.state.evaluating = 0
        return evaluated, iteration

    async def close(self) -> None:
        """Cancel the evaluation apart."""
        await cancel(*self._apart)

    def is_due(self, number: int, *, last: bool) -> bool:
        """Whether the policy is evaluated after iteration `number`; last: no iteration follows."""
        return bool(self.evaluator.sets if last else not self.settings.concurrent and self.evaluator.due(number))

    async def after(self, number: int, policy_version: int, *, last: bool) -> list[EvaluationResult]:
        """Evaluate the policy after iteration `number`. Returns: nothing if the run was asked to end meanwhile."""
        due = self.evaluator.sets if last else self.evaluator.due(number)
        return await self.leaving.unless_asked(self.evaluator.evaluate(due, policy_version)) or []

    def note(self, evaluated: Sequence[EvaluationResult], iteration: int) -> bool:
        """Record evaluations of the policy after `iteration`. Returns: whether it is the best policy so far."""
        for result in evaluated:
            values = {"policy_version": float(result.policy_version), "iteration": float(iteration)}
            if result.name == HELDOUT and not math.isnan(result.scored.accuracy):
                self.state.note_accuracy(result.scored)
                values[ACCURACY] = result.scored.accuracy
            measures = {name: estimate.value for name, estimate in result.estimates.items()}
            metrics.observe_evaluation(result.name, measures, result.policy_version)
            self.events.append(
                EventKind.EVALUATION,
                message_of(result, Heldout.of_state(vars(self.state)).title),
                numeric(evaluation_row([result])) | values,
            )
        self.state.evaluations.update(evaluation_row(evaluated))
        return note_best(self.state, self.settings.best, evaluated, iteration)

    def note_baseline(self, evaluated: Sequence[EvaluationResult]) -> Row:
        """Keep evaluations as those that later ones are compared with. Returns: row 0, if there is no iteration yet."""
        self.state.baseline.update(evaluation_row(evaluated))
        if self.state.initial_accuracy is not None:
            metrics.INITIAL_ACCURACY.set(self.state.initial_accuracy)
        return baseline_row(self.state.policy_version, heldout_of(evaluated)) | evaluation_row(evaluated)

    def wants_checkpoint(self, number: int, *, improved: bool) -> bool:
        """Whether iteration `number` is to be saved as the best; improved: it has made the best policy so far."""
        if self.settings.best is None:
            return False
        # Evaluated during the next iteration, a policy cannot be saved any more when it is found to be the best.
        name = self.settings.best.rpartition("/")[0]
        due = [prompts.name for prompts in self.evaluator.due(number)] if self.settings.concurrent else []
        return improved or name in due


def evaluation_row(evaluated: Sequence[EvaluationResult]) -> Row:
    """Make the columns `eval/<set>/...`; of a set that was evaluated twice those of the later one."""
    return {f"eval/{result.name}/{name}": value for result in evaluated for name, value in _columns(result)}


def _columns(result: EvaluationResult) -> Iterator[tuple[str, float | int | None]]:
    for name, estimate in result.estimates.items():
        for suffix, value in (("", estimate.value), ("_low", estimate.low), ("_high", estimate.high)):
            yield f"{name}{suffix}", value if math.isfinite(value) else None
    completions = [completion for group in result.generation.groups for completion in group.completions]
    yield "length_mean", result.generation.num_tokens / len(completions)
    yield "truncated_ratio", sum(completion.truncated for completion in completions) / len(completions)
    yield "failed_scores", result.scored.num_errors + result.scored.num_timeouts + result.scored.num_unreadable
    yield "policy_version", result.policy_version


def heldout_of(evaluated: Sequence[EvaluationResult]) -> GroupScores | None:
    """Return the scores of the set `heldout`; None: it was not evaluated."""
    return next((result.scored for result in reversed(evaluated) if result.name == HELDOUT), None)


def message_of(result: EvaluationResult, title: str) -> str:
    """Describe an evaluation in a sentence. title: of the figure of data.heldout."""
    if result.name == HELDOUT:
        return f"{title} {score_text(result.scored.accuracy)} at version {result.policy_version}"
    found = ", ".join(
        f"{name} {score_text(estimate.value)} ({score_text(estimate.low)} to {score_text(estimate.high)})"
        for name, estimate in result.estimates.items()
    )
    return f"{result.name}: {found} at version {result.policy_version}"


def note_best(state: RunState, metric: str | None, evaluated: Sequence[EvaluationResult], iteration: int) -> bool:
    """Record the best policy so far in the state.

    Args:
        metric: evaluation.best.
        iteration: after which the policy was evaluated.
    Returns: whether it is the one that was evaluated.
    """
    column = f"eval/{metric}"
    row = evaluation_row(evaluated)
    value = row.get(column)
    best = None if state.best is None or state.best.metric != metric else state.best
    if metric is None or value is None or (best is not None and value <= best.value):
        return False
    version = row[f"eval/{metric.rpartition('/')[0]}/policy_version"]
    state.best = BestPolicy(metric=metric, value=value, iteration=iteration, policy_version=int(version or 0))
    return True
