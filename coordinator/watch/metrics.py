"""Prometheus metrics of the coordinator, in base units; their names are part of the interface."""

import time
from collections.abc import Iterable, Mapping
from typing import get_args

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from coordinator.flow import DataKey, GroupScores, ReplicaOutcome, SyncResult
from servicekit.buckets import fine_buckets
from servicekit.errors import DigestMismatch, TandemError
from servicekit.tracing import exemplar

# There is one coordinator, and its labels have few values: quantiles of all of its durations are right within 10 %.
# From one RPC round trip (1 ms) to a transfer of a large model (minutes).
_SYNC_BUCKETS = fine_buckets(0.001, 300)
_PART_BUCKETS = fine_buckets(0.001, 3600)


class LateGauge:
    """A gauge that is exported from its first value on, since the 0 before it is not a measurement."""

    def __init__(self, name: str, documentation: str) -> None:
        self._gauge = Gauge(name, documentation, registry=None)
        self._exported = False

    def set(self, value: float) -> None:
        """Export `value`."""
        self._gauge.set(value)
        if not self._exported:
            self._exported = True
            REGISTRY.register(self._gauge)


ITERATION = Gauge("tandem_iteration", "GRPO iterations completed.")
POLICY_VERSION = Gauge("tandem_policy_version", "Policy version that the coordinator trains and generates with.")
REPLICA_VERSION = Gauge("tandem_replica_policy_version", "Policy version committed on a replica.", ["replica"])
RUN_STATE = Gauge("tandem_run_state", "1 for the state that the run is in.", ["state"])
RUN_START = LateGauge(
    "tandem_run_start_timestamp_seconds", "Unix time at which the run began, before its first resume."
)
LAST_PROGRESS = LateGauge(
    "tandem_last_progress_timestamp_seconds", "Unix time at which a step of an iteration last began or ended."
)
ITERATION_SECONDS = Histogram(
    "tandem_iteration_seconds",
    "Seconds of each part of an iteration (generate, reward, batch, train, sync, evaluate, checkpoint, export, total).",
    ["part"],
    buckets=_PART_BUCKETS,
)
SYNC_SECONDS = Histogram(
    "tandem_weight_sync_seconds",
    "Seconds of each stage of a weight sync, of the participants that it waited for; they add up to total: other is "
    "what is in none of them.",
    ["stage"],
    buckets=_SYNC_BUCKETS,
)
SYNC_ROUNDS = Counter(
    "tandem_weight_sync_rounds_total", "Weight-sync rounds by result (committed, aborted).", ["result"]
)
SYNC_OUTCOMES = Counter(
    "tandem_weight_sync_outcomes_total",
    "Replicas by how a round ended for them (committed, aborted, poisoned).",
    ["outcome"],
)
SYNC_EPOCH = LateGauge("tandem_weight_sync_epoch", "Epoch of the weight group in the last committed weight sync.")
SYNC_RENDEZVOUS_SECONDS = Histogram(
    "tandem_weight_sync_rendezvous_wait_seconds",
    "Seconds that a round waited until its participants were present.",
    buckets=_SYNC_BUCKETS,
)
SYNC_VERIFY_FAILURES = Counter(
    "tandem_weight_sync_verify_failures_total", "Rounds that failed because a digest did not match the bytes."
)
SERVING_REPLICAS = Gauge("tandem_serving_replicas", "Replicas that committed the current policy and get work.")
ANNOUNCED_REPLICAS = Gauge("tandem_announced_replicas", "Replicas that are announced, whether they serve or not.")
EXPECTED_REPLICAS = Gauge(
    "tandem_expected_replicas",
    "Replicas that there should be: rollout.replicas, or in a cluster as many as have pods, pending ones included.",
)
REPLICA_STARTS = Counter(
    "tandem_replica_starts_total",
    "Processes of a replica that the coordinator has found: one more than the replica's restarts.",
    ["replica"],
)
REPLICA_SYNC_SECONDS = Gauge(
    "tandem_replica_weight_sync_seconds",
    "Seconds that a replica's slowest rank worked in its last weight sync, over all stages.",
    ["replica"],
)
SYNC_LAST_SECONDS = LateGauge(
    "tandem_weight_sync_last_seconds", "Seconds of the last committed weight sync, start to end."
)
SYNC_GOODPUT = LateGauge(
    "tandem_weight_sync_goodput_bytes_per_second",
    "Bytes that all rollout ranks received / seconds of the whole round, in the last committed weight sync.",
)
SYNC_PREDICTED_SECONDS = LateGauge(
    "tandem_weight_sync_predicted_seconds",
    "Seconds that the plan predicts for a round of the present fleet over links of sync.link_gbit; NaN: it cannot.",
)
SYNC_PREDICTED_GOODPUT = LateGauge(
    "tandem_weight_sync_predicted_goodput_bytes_per_second",
    "Bytes that all rollout ranks need / tandem_weight_sync_predicted_seconds.",
)
INITIAL_ACCURACY = LateGauge(
    "tandem_heldout_initial_accuracy_ratio", "Mean held-out greedy score before the first iteration."
)
EVALUATION = Gauge(
    "tandem_evaluation", "Measures of the last evaluation of each set (mean@k, pass@k, maj@k).", ["set", "measure"]
)
EVALUATION_VERSION = Gauge(
    "tandem_evaluation_policy_version", "Policy version of the last evaluation of each set.", ["set"]
)
EVICTIONS = Counter(
    "tandem_replica_evictions_total", "Pods of stuck replicas that were evicted (fleet.kind: kubernetes)."
)
SYNC_BYTES = Counter("tandem_weight_sync_bytes_total", "Bytes that rollout ranks received in weight syncs.")
SYNC_RANK_BYTES = LateGauge(
    "tandem_weight_sync_rank_bytes", "Bytes that the busiest rollout rank received in the last weight sync."
)
SYNC_REDUNDANCY = LateGauge(
    "tandem_weight_sync_redundancy_ratio", "Bytes received / bytes of the shards in the last weight sync; 1 is perfect."
)
GENERATED_TOKENS = Counter("tandem_generated_tokens_total", "Completion tokens sampled for training.")
TRAINED_SAMPLES = Counter("tandem_trained_samples_total", "Samples sent to the trainer.")
DROPPED_PROMPTS = Gauge(
    "tandem_dropped_prompts", "Prompts left out of the data, longer than data.max_prompt_tokens.", ["data"]
)
DROPPED_GROUPS = Counter("tandem_dropped_groups_total", "Groups left out because all of their rewards were equal.")
DROPPED_SAMPLES = Counter(
    "tandem_dropped_samples_total", "Samples left out of training since a reward of theirs failed (on_error: drop)."
)
RETRIED_CALLS = Counter("tandem_generate_retries_total", "Generate calls that failed and were repeated.")
DISPATCH_STALLS = Counter(
    "tandem_dispatch_stalls_total", "Times that dispatch waited for a replica because none was left."
)
DISPATCH_JOINERS = Counter(
    "tandem_dispatch_joiners_total", "Replicas that joined and were seeded while groups were being generated."
)
SCORED_COMPLETIONS = Counter(
    "tandem_scored_completions_total", "Completions that were scored, by data file (train, heldout).", ["data"]
)
REWARD_ERRORS = Counter("tandem_reward_errors_total", "Completions whose scoring failed.", ["data"])
REWARD_TIMEOUTS = Counter(
    "tandem_reward_timeouts_total", "Completions whose scoring took longer than reward.timeout_s.", ["data"]
)
REWARD_SCORE_MEAN = Gauge(
    "tandem_reward_score_mean",
    "Mean unweighted score of each reward, over the last batch that it scored.",
    ["data", "reward"],
)
REWARD_SCORE_STD = Gauge(
    "tandem_reward_score_std", "Standard deviation of each reward's unweighted scores.", ["data", "reward"]
)
REWARD_CALL_SECONDS = Histogram(
    "tandem_reward_call_seconds",
    "Seconds of a call of a reward's server or judge, each repetition by itself, by result (answered, failed: it is "
    "repeated, refused: it is not).",
    ["reward", "result"],
    buckets=_PART_BUCKETS,
)
REWARD_CIRCUIT_OPEN = Gauge(
    "tandem_reward_circuit_open",
    "1 while a reward's server gets no calls, since the last ones failed (reward.open_after), else 0.",
    ["reward"],
)
UNREADABLE_ANSWERS = Counter(
    "tandem_unreadable_answers_total",
    "Completions that scored 0 because their reference answer cannot be read.",
    ["data"],
)
MISSED_CHECKPOINTS = Gauge(
    "tandem_missed_checkpoints", "Checkpoints in a row that were not written; 0 after one that was."
)
WARNINGS = Counter("tandem_warnings_total", "Warnings by kind.", ["kind"])

# By the name of coordinator/record/health.py.
_FIGURES = {
    "reward": LateGauge(
        "tandem_reward_fall_stds",
        "How far the mean reward of the last iterations is below its best, in standard deviations of the rewards.",
    ),
    "heldout": LateGauge(
        "tandem_heldout_fall_stds",
        "How far the last held-out accuracy is below that before the training, in standard deviations of its scores.",
    ),
    "mismatch": LateGauge(
        "tandem_logprob_diff_of_limit_ratio",
        "Difference of the last iteration's log-probs in trainer and engine / its limit (grpo.logprob_diff_limit).",
    ),
    "mismatch_rise": LateGauge(
        "tandem_logprob_diff_rise_ratio",
        "Mean difference of log-probs over the last iterations / over the first ones, at least 1e-3.",
    ),
}

# Row field of metrics.jsonl to its gauge.
_ROW_GAUGES = {
    "reward_mean": LateGauge("tandem_reward_mean", "Mean reward of the last iteration."),
    "reward_std": LateGauge("tandem_reward_std", "Standard deviation of the last iteration's rewards."),
    "heldout_accuracy": LateGauge(
        "tandem_heldout_accuracy_ratio",
        "Mean held-out greedy score, last measured: the accuracy, if scores are 0 or 1.",
    ),
    "response_length_mean": LateGauge("tandem_response_length_tokens", "Mean completion length of the last iteration."),
    "entropy": LateGauge("tandem_entropy", "Mean token entropy over the full vocabulary, in nats."),
    "logprob_abs_diff_max": LateGauge(
        "tandem_logprob_abs_diff_max", "Largest |log pi_trainer - log pi_engine| of a token."
    ),
    "logprob_abs_diff_p999": LateGauge(
        "tandem_logprob_abs_diff_p999", "|log pi_trainer - log pi_engine| that one token in a thousand exceeds."
    ),
    "logprob_abs_diff_mean": LateGauge("tandem_logprob_abs_diff_mean", "Mean |log pi_trainer - log pi_engine|."),
    "zero_variance_ratio": LateGauge("tandem_zero_variance_ratio", "Share of groups whose rewards are all equal."),
    "kl_old": LateGauge("tandem_kl_old", "k3 estimate of KL(old || new) per trained token of the last step."),
    "kl_reference": LateGauge("tandem_kl_reference", "k3 estimate of KL(policy || reference policy) per token."),
    "kl_loss": LateGauge("tandem_kl_loss", "Part of the last step's loss that is the KL term (grpo.kl_in: loss)."),
    "kl_reward": LateGauge(
        "tandem_kl_reward", "Mean over the last iteration's samples of what KL takes off a reward (grpo.kl_in: reward)."
    ),
    "staleness_max": LateGauge(
        "tandem_staleness_versions", "Age of the oldest sample of the last iteration, in versions."
    ),
    "truncated_ratio": LateGauge("tandem_truncated_ratio", "Share of completions cut off by the length limit."),
    "loss": LateGauge("tandem_loss", "Policy loss of the last step."),
    "grad_norm": LateGauge("tandem_grad_norm", "Gradient norm before clipping of the last step."),
    "clip_fraction_low": LateGauge("tandem_clip_fraction_low_ratio", "Share of tokens clipped at the lower bound."),
    "clip_fraction_high": LateGauge("tandem_clip_fraction_high_ratio", "Share of tokens clipped at the upper bound."),
    "tokens_per_s": LateGauge("tandem_tokens_per_second", "Completion tokens per second of the last iteration."),
    "overhead_share": LateGauge(
        "tandem_overhead_ratio", "Share of the last iteration outside the engine's and the trainer's computation."
    ),
}

# Exported from 0 on: for a counter that appears with its first event, an alert would see no increase.
for _result in ("committed", "aborted"):
    SYNC_ROUNDS.labels(result=_result)
for _data in get_args(DataKey):
    for _counter in (SCORED_COMPLETIONS, REWARD_ERRORS, REWARD_TIMEOUTS, UNREADABLE_ANSWERS):
        _counter.labels(data=_data)
for _outcome in ReplicaOutcome:
    SYNC_OUTCOMES.labels(outcome=_outcome.value)
for _kind in (
    "logprob_difference",
    "nothing_to_train",
    "skipped_update",
    "training",
    "reward_error",
    "reward_timeout",
    "unreadable_answer",
    "reward_remark",
    "generate_retry",
    "replicas",
    "kubernetes",
    "dropped_prompts",
    "missed_checkpoint",
    "not_removed",
):
    WARNINGS.labels(kind=_kind)


def observe_state(current: str, states: Iterable[str]) -> None:
    """Set the gauge of the current state to 1, those of all other states to 0."""
    for state in states:
        RUN_STATE.labels(state=state).set(1.0 if state == current else 0.0)


def observe_figures(figures: Mapping[str, float]) -> None:
    """Set what rules judge by (health.figures)."""
    for name, figure in figures.items():
        _FIGURES[name].set(figure)


def progress() -> None:
    """Set the time of the last progress, for the alert TandemNoProgress."""
    LAST_PROGRESS.set(time.time())


def observe_sync(result: SyncResult) -> None:
    """Record a weight sync that succeeded; the outcomes of its rounds are recorded when these end."""
    SYNC_ROUNDS.labels(result="committed").inc()
    for stage, seconds in {**result.stages, "total": result.total_s}.items():
        SYNC_SECONDS.labels(stage=stage).observe(seconds, exemplar())
    SYNC_BYTES.inc(result.bytes_received)
    SYNC_RANK_BYTES.set(result.bytes_per_rollout_rank)
    SYNC_REDUNDANCY.set(result.redundancy)
    SYNC_EPOCH.set(result.epoch)
    SYNC_LAST_SECONDS.set(result.total_s)
    SYNC_GOODPUT.set(result.bytes_received / result.total_s if result.total_s > 0 else 0.0)
    for replica, seconds in result.replica_s.items():
        REPLICA_SYNC_SECONDS.labels(replica=replica).set(seconds)
    for replica, outcome in result.outcomes.items():
        if outcome is ReplicaOutcome.COMMITTED:
            REPLICA_VERSION.labels(replica=replica).set(result.policy_version)


def forget_replica(replica: str) -> None:
    """Remove the series of a replica that is lost."""
    REPLICA_VERSION.remove(replica)
    REPLICA_SYNC_SECONDS.remove(replica)


def observe_failed_round(error: TandemError, outcomes: Mapping[str, ReplicaOutcome]) -> None:
    """Record a round that was given up."""
    SYNC_ROUNDS.labels(result="aborted").inc()
    if isinstance(error, DigestMismatch):
        SYNC_VERIFY_FAILURES.inc()
    observe_outcomes(outcomes)


def observe_outcomes(outcomes: Mapping[str, ReplicaOutcome]) -> None:
    """Record how a round ended for each replica."""
    for outcome in outcomes.values():
        SYNC_OUTCOMES.labels(outcome=outcome.value).inc()


def observe_scores(data: DataKey, scored: GroupScores) -> None:
    """Record a batch that was scored."""
    SCORED_COMPLETIONS.labels(data=data).inc(scored.rewards_PG.size)
    REWARD_ERRORS.labels(data=data).inc(scored.num_errors)
    REWARD_TIMEOUTS.labels(data=data).inc(scored.num_timeouts)
    UNREADABLE_ANSWERS.labels(data=data).inc(scored.num_unreadable)
    for name, scores_S in scored.present_parts().items():
        if scores_S.size > 1:
            REWARD_SCORE_MEAN.labels(data=data, reward=name).set(float(scores_S.mean()))
            REWARD_SCORE_STD.labels(data=data, reward=name).set(float(scores_S.std(ddof=1)))


def observe_evaluation(name: str, measures: Mapping[str, float], policy_version: int) -> None:
    """Record an evaluation of the set `name`."""
    for measure, value in measures.items():
        EVALUATION.labels(set=name, measure=measure).set(value)
    EVALUATION_VERSION.labels(set=name).set(policy_version)


def observe_row(row: Mapping[str, float | int | None], parts: Mapping[str, float]) -> None:
    """Record an iteration.

    Args:
        row: its row of metrics.jsonl.
        parts: seconds by part.
    """
    for field, gauge in _ROW_GAUGES.items():
        value = row.get(field)
        if value is not None:
            gauge.set(value)
    for part, seconds in parts.items():
        ITERATION_SECONDS.labels(part=part).observe(seconds, exemplar())
    progress()
