"""When a run evaluates its policy, and what it keeps of it: baseline, events, metrics, the best policy.

| evaluation.concurrent | the policy after iteration N is evaluated    | and stands in      |
|-----------------------|----------------------------------------------|--------------------|
| false                 | after iteration N                            | the row of N       |
| true                  | beside scoring and training of iteration N+1 | the row of N+1     |
| both: N = 0           | before iteration 1, which is the baseline    | state, an event    |
| both: N the last      | after it                                     | the row of N       |

Columns `eval/<set>/policy_version` say which policy it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from coordinator.learn.evaluation import Evaluated, Evaluator
from coordinator.leaving import Leaving
from coordinator.meanwhile import Meanwhile
from coordinator.record.evaluations import evaluation_row, message_of, note_best
from coordinator.record.report import numeric
from coordinator.record.state import RunState
from coordinator.watch import metrics
from coordinator.watch.events import EventKind, EventLog
from tandem_config.schema import HELDOUT, EvaluationSection


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """The evaluations of a run.

    Attributes:
        settings: the configuration's section `evaluation`.
        leaving: an evaluation is cancelled when the run is asked to end.
    """

    settings: EvaluationSection
    evaluator: Evaluator
    state: RunState
    events: EventLog
    leaving: Leaving

    async def at_the_start(self) -> list[Evaluated]:
        """Evaluate the policy before the first iteration, unless an earlier process has done so."""
        state = self.state
        if state.baseline or state.initial_accuracy is not None:
            return []
        return await self.evaluator.evaluate(self.evaluator.sets, state.policy_version)

    def beside(self, number: int) -> Meanwhile[list[Evaluated] | None]:
        """Make the evaluation, beside iteration `number`, of the policy with which it begins."""
        due = self.evaluator.due(number - 1) if self.settings.concurrent and number > 1 else []
        if not due:
            return Meanwhile()
        evaluate = partial(self.evaluator.evaluate, due, self.state.policy_version, beside_training=True)
        return Meanwhile(lambda: self.leaving.unless_asked(evaluate()))

    def is_due(self, number: int, *, last: bool) -> bool:
        """Whether the policy is evaluated after iteration `number`; last: no iteration follows."""
        return bool(self.evaluator.sets if last else not self.settings.concurrent and self.evaluator.due(number))

    async def after(self, number: int, policy_version: int, *, last: bool) -> list[Evaluated]:
        """Evaluate the policy after iteration `number`. Returns: nothing if the run was asked to end meanwhile."""
        due = self.evaluator.sets if last else self.evaluator.due(number)
        return await self.leaving.unless_asked(self.evaluator.evaluate(due, policy_version)) or []

    def note(self, evaluated: Sequence[Evaluated], iteration: int, *, has_checkpoint: bool) -> bool:
        """Record evaluations of the policy after `iteration`.

        Args:
            has_checkpoint: whether there is or will be a checkpoint of that policy anyway.
        Returns: whether it is the best policy so far.
        """
        for each in evaluated:
            values = {"policy_version": float(each.policy_version), "iteration": float(iteration)}
            if each.name == HELDOUT:
                self.state.note_accuracy(each.scored.accuracy)
                values["heldout_accuracy"] = each.scored.accuracy
            measures = {name: estimate.value for name, estimate in each.estimates.items()}
            metrics.observe_evaluation(each.name, measures, each.policy_version)
            self.events.append(EventKind.EVALUATION, message_of(each), numeric(evaluation_row([each])) | values)
        self.state.evaluations.update(evaluation_row(evaluated))
        if not (self.settings.save_best or has_checkpoint):
            return False
        return note_best(self.state, self.settings.best, evaluated, iteration)

    def wants_checkpoint(self, number: int, *, improved: bool) -> bool:
        """Whether iteration `number` is to be saved as the best; improved: it has made the best policy so far."""
        if self.settings.best is None or not self.settings.save_best:
            return False
        # Evaluated beside the next iteration, a policy cannot be saved any more when it is found to be the best.
        name = self.settings.best.rpartition("/")[0]
        due = [each.name for each in self.evaluator.due(number)] if self.settings.concurrent else []
        return improved or name in due
