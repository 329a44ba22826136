"""Makes summary.json from the run's state, its rows and the software of its services."""

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.record.metrics_row import median
from coordinator.record.state import RunState
from tandem_files.metrics_file import Row
from tandem_files.metrics_table import METRICS

_COUNTS = (
    *("dropped_groups", "dropped_samples", "skipped_steps", "reward_errors", "reward_timeouts", "unreadable_answers"),
    *("retried_calls", "warnings"),
)
_MEDIANS = [metric.name for metric in METRICS if metric.median]


def build_summary(state: RunState, rows: Sequence[Row], versions: Mapping[str, str]) -> dict[str, Any]:
    """Make the content of summary.json.

    Args:
        rows: all rows of metrics.jsonl.
        versions: software of all services, merged.
    """
    totals = state.totals
    known = {name: [value for row in rows if (value := row.get(name)) is not None] for name in _MEDIANS}
    return {
        "status": state.status,
        "iterations": state.iteration,
        "initial_accuracy": state.initial_accuracy,
        "final_accuracy": state.last_accuracy,
        "best_accuracy": state.best_accuracy,
        "accuracy_is_share": state.accuracy_is_share,
        "evaluation": {
            "initial": dict(state.baseline),
            "final": dict(state.evaluations),
            "best": None if state.best is None else state.best.model_dump(),
            # By set that a resume added or changed, the iteration after which `initial` was measured.
            "renewed": dict(state.renewed),
        },
        "wall_s": state.wall_s,
        "generated_tokens": totals.generated_tokens,
        "trained_samples": totals.trained_samples,
        "policy_version": state.policy_version,
        "weight_sync": {
            "count": totals.num_weight_syncs,
            "total_s_median": median(totals.weight_sync_s),
            "total_s_max": totals.weight_sync_max_s,
            "bytes_per_rollout_rank": totals.bytes_per_rollout_rank,
            "redundancy": totals.redundancy,
        },
        "logprob_abs_diff_max": totals.logprob_abs_diff_max,
        "time": {f"{name}_median": median(values) for name, values in known.items()},
        "counts": {
            **{name: getattr(totals, name) for name in _COUNTS},
            **{f"heldout_{name}": count for name, count in totals.heldout.model_dump().items()},
        },
        "troubles": list(state.troubles),
        "damaged_checkpoints": list(state.damaged_checkpoints),
        "model_fingerprint": state.model_fingerprint,
        "versions": dict(versions),
    }
