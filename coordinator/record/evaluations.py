"""What stays of evaluations: columns of metrics.jsonl, an event, the state's accuracies, the best policy so far."""

import math
from collections.abc import Iterator, Sequence

from coordinator.flow import Scored
from coordinator.learn.evaluation import Evaluated
from coordinator.record.state import BestPolicy, RunState
from tandem_config.schema import HELDOUT
from tandem_files.metrics_file import Row


def evaluation_row(evaluated: Sequence[Evaluated]) -> Row:
    """Make the columns `eval/<set>/...`; of a set that was evaluated twice those of the later one."""
    return {f"eval/{each.name}/{name}": value for each in evaluated for name, value in _columns(each)}


def _columns(each: Evaluated) -> Iterator[tuple[str, float | int | None]]:
    for name, estimate in each.estimates.items():
        for suffix, value in (("", estimate.value), ("_low", estimate.low), ("_high", estimate.high)):
            yield f"{name}{suffix}", value if math.isfinite(value) else None
    completions = [completion for group in each.generation.groups for completion in group.completions]
    yield "length_mean", each.generation.num_tokens / len(completions)
    yield "truncated_ratio", sum(completion.truncated for completion in completions) / len(completions)
    yield "failed_scores", each.scored.num_errors + each.scored.num_timeouts + each.scored.num_unreadable
    yield "policy_version", each.policy_version


def heldout_of(evaluated: Sequence[Evaluated]) -> Scored | None:
    """Return the scores of the set `heldout`; None: it was not evaluated."""
    return next((each.scored for each in reversed(evaluated) if each.name == HELDOUT), None)


def message_of(each: Evaluated) -> str:
    """Describe an evaluation in a sentence."""
    if each.name == HELDOUT:
        return f"held-out accuracy {each.scored.accuracy:.3f} at version {each.policy_version}"
    found = ", ".join(
        f"{name} {estimate.value:.3f} ({estimate.low:.3f} to {estimate.high:.3f})"
        for name, estimate in each.estimates.items()
    )
    return f"{each.name}: {found} at version {each.policy_version}"


def note_best(state: RunState, metric: str | None, evaluated: Sequence[Evaluated], iteration: int) -> bool:
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
