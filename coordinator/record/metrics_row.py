"""The last step: report. Makes an iteration's row of metrics.jsonl: results and times.

The overhead figure: `overhead_s = iteration_s - evaluate_s - checkpoint_s - export_s - engine_s - trainer_compute_s`,
i.e. all that Tandem adds to the engine's generation and the trainer's model work (RPCs, packing, scoring, weight sync,
waiting). What is generated while the trainer works counts as far as it is waited for (generate_s).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem_clients.flow import Completion, Generation, GroupScores, IterationRecord
from tandem_files.metrics_file import Row
from tandem_files.metrics_table import ACCURACY, ITERATION_PARTS, METRICS, REWARD, STEP_PARTS

# The trainer's metrics, under the same names in a row; null if they were not reported, or the step was skipped. With
# KL in the reward those of it are the coordinator's own.
_TRAINER_FIELDS = tuple(metric.name for metric in METRICS if metric.source == "trainer")
# What is done between iterations, and is no part of one's own work.
_BETWEEN = ("evaluate", "checkpoint", "export")


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of an iteration."""

    # Seconds by part.
    parts: Mapping[str, float]
    # Seconds of the whole iteration, evaluation, checkpoint and export included.
    total_s: float

    @property
    def busy_s(self) -> float:
        """Seconds of the iteration without evaluation, checkpoint and export."""
        return self.total_s - sum(self.parts.get(part, 0.0) for part in _BETWEEN)


def build_row(record: IterationRecord, heldout: GroupScores | None, timing: Timing) -> Row:
    """Make the row of metrics.jsonl. heldout: None if the iteration had no evaluation."""
    completions = [completion for group in record.generation.groups for completion in group.completions]
    num_tokens = record.generation.num_tokens
    rewards_S = record.scored.rewards_PG[record.scored.present_PG]
    measured = {} if record.divergence is None else record.divergence.metrics
    metrics = {**measured, **({} if record.step is None else record.step.metrics)}
    return {
        "iteration": record.iteration,
        "policy_version": record.policy_version,
        REWARD: _mean(rewards_S),
        "reward_std": _std(rewards_S),
        ACCURACY: None if heldout is None else _finite(heldout.accuracy),
        "response_length_mean": num_tokens / len(completions),
        **{name: _finite(metrics.get(name)) for name in _TRAINER_FIELDS},
        "zero_variance_ratio": float(record.zero_variance_P.mean()),
        "truncated_ratio": sum(completion.truncated for completion in completions) / len(completions),
        "dropped_groups": int(record.dropped_P.sum()),
        "dropped_samples": record.scored.num_missing,
        **_scores_row("", record.scored),
        **_scores_row("heldout_", heldout),
        "retried_calls": record.generation.retried_calls,
        "staleness_max": max(record.staleness),
        "token_age_mean": record.mean_ages[0],
        "context_age_mean": record.mean_ages[1],
        "resumed_tokens": record.generation.resumed_tokens,
        "masked_tokens": record.masked_tokens,
        "trained_length_ratio": _length_bias(record),
        "groups_waiting": record.generation.waiting,
        **_turns_row(completions),
        **_mismatch_row(record, metrics),
        "generated_tokens": num_tokens,
        "trained_samples": 0 if record.step is None else _num_trained(record),
        "tokens_per_s": num_tokens / timing.busy_s,
        "sync_bytes_per_rollout_rank": None if record.sync is None else record.sync.bytes_per_rollout_rank,
        "sync_redundancy": None if record.sync is None else record.sync.redundancy,
        **_parts_row("", record.scored),
        **_parts_row("heldout_", heldout),
        **_time_row(record, timing),
    }


def baseline_row(policy_version: int, heldout: GroupScores | None) -> Row:
    """Make row 0 of metrics.jsonl, of the evaluation before the first iteration, without the columns of its sets."""
    measured = {} if heldout is None else _scores_row("heldout_", heldout) | _parts_row("heldout_", heldout)
    accuracy = {} if heldout is None else {ACCURACY: _finite(heldout.accuracy)}
    return {"iteration": 0, "policy_version": policy_version, **accuracy, **measured}


def _turns_row(completions: Sequence[Completion]) -> Row:
    said = [completion.transcript for completion in completions if completion.transcript is not None]
    if not said:
        return {"turns_mean": None, "failed_episodes": None}
    turns = sum(one.num_turns for one in said)
    return {"turns_mean": turns / len(said), "failed_episodes": sum(bool(one.error) for one in said)}


def _mismatch_row(record: IterationRecord, metrics: Mapping[str, float]) -> Row:
    """Take the difference between trainer and engine for what it is where samples are of an older policy."""
    names = [name for name in _TRAINER_FIELDS if name.startswith("logprob_abs_diff_")]
    shift = _finite(metrics.get("logprob_abs_diff_mean")) if record.is_stale else None
    flip = None if record.compared is None else _finite(record.compared.get("flip_abs_diff_mean"))
    measured: Row = {name: _finite(record.mismatch.get(name)) for name in names}
    return measured | {"policy_shift_mean": shift, "flip_abs_diff_mean": flip}


def _scores_row(prefix: str, scored: GroupScores | None) -> Row:
    """Count the scored completions, and those whose score of 0 is not the policy's fault."""
    return {
        f"{prefix}scored_completions": None if scored is None else scored.rewards_PG.size,
        f"{prefix}reward_errors": None if scored is None else scored.num_errors,
        f"{prefix}reward_timeouts": None if scored is None else scored.num_timeouts,
        f"{prefix}unreadable_answers": None if scored is None else scored.num_unreadable,
        f"{prefix}reward_not_applied": None if scored is None else scored.num_absent,
        f"{prefix}reward_parts_left_out": None if scored is None else scored.num_parts_left_out,
    }


def _parts_row(prefix: str, scored: GroupScores | None) -> Row:
    """Make `reward/NAME_mean` and `_std` of every reward's unweighted scores."""
    row: Row = {}
    for name, scores_S in ({} if scored is None else scored.present_parts()).items():
        row[f"{prefix}reward/{name}_mean"] = _mean(scores_S)
        row[f"{prefix}reward/{name}_std"] = _std(scores_S)
    return row


def _mean(values_S: NDArray[np.float64]) -> float | None:
    return float(values_S.mean()) if values_S.size else None


def _std(values_S: NDArray[np.float64]) -> float | None:
    return float(values_S.std(ddof=1)) if values_S.size > 1 else None


def _time_row(record: IterationRecord, timing: Timing) -> Row:
    compute_s = 0.0 if record.step is None else record.step.compute_s
    compute_s += 0.0 if record.divergence is None else record.divergence.seconds
    waited_s = min(record.generation.engine_s, timing.parts.get("generate", 0.0))
    overhead_s = timing.busy_s - waited_s - compute_s
    return {
        # "report" is the previous iteration's: a row cannot hold the seconds of its own writing.
        **{f"{part}_s": timing.parts.get(part, 0.0) for part in ITERATION_PARTS},
        **{f"train_{part}_s": None if record.step is None else record.step.seconds.get(part) for part in STEP_PARTS},
        "iteration_s": timing.total_s,
        "engine_s": record.generation.engine_s,
        "trainer_compute_s": compute_s,
        "overhead_s": overhead_s,
        "overhead_share": overhead_s / timing.busy_s,
        "trainer_idle_ratio": 1.0 - compute_s / timing.busy_s,
        "rollout_idle_ratio": _slots_idle(record.generation, timing.busy_s),
    }


def _slots_idle(generation: Generation, seconds: float) -> float | None:
    """Return the share of the engines' slots in which nothing ran; None: their number is not known."""
    return max(0.0, 1.0 - generation.running_s / (generation.slots * seconds)) if generation.slots else None


def _num_trained(record: IterationRecord) -> int:
    present_PG = record.scored.present_PG if record.old_PG is None else record.scored.present_PG & ~record.old_PG
    return int(present_PG[~record.dropped_P].sum())


def _length_bias(record: IterationRecord) -> float | None:
    """Compare the lengths of what is young enough to be trained with those of all; None: nothing is too old."""
    if record.old_PG is None:
        return None
    lengths_PG = np.array([[one.num_sampled for one in group.completions] for group in record.generation.groups])
    young_S = lengths_PG[~record.old_PG]
    return float(young_S.mean() / lengths_PG.mean()) if young_S.size else None


def _finite(value: float | None) -> float | None:
    """Turn NaN and infinity, which JSON does not have, into None."""
    return value if value is not None and math.isfinite(value) else None


def numeric(row: Row) -> dict[str, float]:
    """Return the values of a row, for an event, without missing ones."""
    return {name: float(value) for name, value in row.items() if value is not None}


def median(values: Sequence[float]) -> float | None:
    """Compute the median; None of no values."""
    return float(np.median(values)) if values else None
