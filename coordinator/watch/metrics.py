"""Prometheus metrics of the coordinator, in base units; their names are part of the interface."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import get_args

from prometheus_client import REGISTRY, Counter, Gauge, Histogram, Summary

from servicekit.buckets import fine_buckets
from servicekit.errors import DigestMismatch, TandemError
from servicekit.tracing import exemplar
from tandem_clients.flow import DataKey, GroupScores, ReplicaOutcome, SyncResult
from tandem_clients.transcript import Transcript
from tandem_files.ledger.account import FATES, Account
from tandem_files.metrics_table import METRICS

# There is one coordinator, and its labels have few values: quantiles of all of its durations are right within 10 %.
# From one RPC round trip (1 ms) to a transfer of a large model (minutes).
_SYNC_BUCKETS = fine_buckets(0.001, 300)
_PART_BUCKETS = fine_buckets(0.001, 3600)


class LateGauge:
    """A gauge that is exported from its first value on, because the 0 before it is not a measurement."""

    def __init__(self, name: str, documentation: str) -> None:
        self._gauge = Gauge(name, documentation, registry=None)
        self._exported = False

    def set(self, value: float) -> None:
        """Export `value`."""
        self._gauge.set(value)
        if not self._exported:
            self._exported = True
            REGISTRY.register(self._gauge)


# fmt: off
ITERATION = Gauge("tandem_iteration", "GRPO iterations completed.")
POLICY_VERSION = Gauge("tandem_policy_version", "Policy version that the coordinator trains and generates with.")
REPLICA_VERSION = Gauge("tandem_replica_policy_version", "Policy version committed on a replica.", ["replica"])
RUN_STATE = Gauge("tandem_run_state", "1 for the state that the run is in.", ["state"])
SCHEDULE = Gauge("tandem_schedule", "1 for the run's schedule.kind (sync, one_step_off, async).", ["kind"])
STANDBY = LateGauge("tandem_standby",
    "Of coordinators with --standby: 1 while it waits to take over, 0 while it leads.")
RUN_START = LateGauge("tandem_run_start_timestamp_seconds",
    "Unix time at which the run began, before its first resume.")
LAST_PROGRESS = LateGauge("tandem_last_progress_timestamp_seconds",
    "Unix time at which a step of an iteration last began or ended.")
ITERATION_SECONDS = Histogram("tandem_iteration_seconds",
    "Seconds of each part of an iteration (generate, reward, batch, train, sync, evaluate, checkpoint, export, total).",
    ["part"], buckets=_PART_BUCKETS)
SYNC_SECONDS = Histogram("tandem_weight_sync_seconds",
    "Seconds of each stage of a weight sync, of the participants that it waited for; they add up to total: other is "
    "what is in none of them.", ["stage"], buckets=_SYNC_BUCKETS)
SYNC_ROUNDS = Counter("tandem_weight_sync_rounds_total",
    "Weight-sync rounds by result (committed, aborted).", ["result"])
SYNC_OUTCOMES = Counter("tandem_weight_sync_outcomes_total",
    "Replicas by how a round ended for them (committed, aborted, poisoned).", ["outcome"])
SYNC_EPOCH = LateGauge("tandem_weight_sync_epoch", "Epoch of the weight group in the last committed weight sync.")
SYNC_RENDEZVOUS_SECONDS = Histogram("tandem_weight_sync_rendezvous_wait_seconds",
    "Seconds that a round waited until its participants were present.", buckets=_SYNC_BUCKETS)
SYNC_VERIFY_FAILURES = Counter("tandem_weight_sync_verify_failures_total",
    "Rounds that failed because a digest did not match the bytes.")
SERVING_REPLICAS = Gauge("tandem_serving_replicas", "Replicas that committed the current policy and get work.")
ANNOUNCED_REPLICAS = Gauge("tandem_announced_replicas",
    "Replicas that are announced, whether they serve or not; not those that evaluate apart (evaluation.replicas).")
EXPECTED_REPLICAS = Gauge("tandem_expected_replicas",
    "Replicas that there should be: rollout.replicas, or in a cluster as many as have pods, pending ones included.")
REPLICAS_WANTED = LateGauge("tandem_replicas_wanted",
    "Replicas that an autoscaler should give the run: as many as keep engines about as busy as the trainer; as many as "
    "there should be, until enough iterations are measured.")
REPLICA_STARTS = Counter("tandem_replica_starts_total",
    "Processes of a replica that the coordinator has found: one more than the replica's restarts.", ["replica"])
REPLICA_SYNC_SECONDS = Gauge("tandem_replica_weight_sync_seconds",
    "Seconds that a replica's slowest rank worked in its last weight sync, over all stages.", ["replica"])
JOINER_SECONDS = Summary("tandem_joiner_seeding_seconds",
    "Seconds in which replicas that joined got weights while others served, by what sent them (replica, trainer, "
    "disk).", ["sender"])
SYNC_LAST_SECONDS = LateGauge("tandem_weight_sync_last_seconds",
    "Seconds of the last committed weight sync, start to end.")
SYNC_GOODPUT = LateGauge("tandem_weight_sync_goodput_bytes_per_second",
    "Bytes that all rollout ranks received / seconds of the whole round, in the last committed weight sync.")
SYNC_PREDICTED_SECONDS = LateGauge("tandem_weight_sync_predicted_seconds",
    "Seconds that the plan predicts for a round of the present fleet over links of sync.link_gbit; NaN: it cannot.")
SYNC_PREDICTED_GOODPUT = LateGauge("tandem_weight_sync_predicted_goodput_bytes_per_second",
    "Bytes that all rollout ranks need / tandem_weight_sync_predicted_seconds.")
INITIAL_ACCURACY = LateGauge("tandem_heldout_initial_accuracy_ratio",
    "Mean held-out greedy score before the first iteration.")
EVALUATION = Gauge("tandem_evaluation",
    "Measures of the last evaluation of each set (mean@k, pass@k, maj@k).", ["set", "measure"])
EVALUATION_VERSION = Gauge("tandem_evaluation_policy_version",
    "Policy version of the last evaluation of each set.", ["set"])
EVICTIONS = Counter("tandem_replica_evictions_total",
    "Pods of stuck replicas that were evicted (fleet.kind: kubernetes).")
SYNC_BYTES = Counter("tandem_weight_sync_bytes_total", "Bytes that rollout ranks received in weight syncs.")
SYNC_RANK_BYTES = LateGauge("tandem_weight_sync_rank_bytes",
    "Bytes that the busiest rollout rank received in the last weight sync.")
SYNC_REDUNDANCY = LateGauge("tandem_weight_sync_redundancy_ratio",
    "Bytes received / bytes of the shards in the last weight sync; 1 is perfect.")
DROPPED_PROMPTS = Gauge("tandem_dropped_prompts",
    "Prompts left out of the data, longer than data.max_prompt_tokens.", ["data"])
SAMPLE_AGES = Counter("tandem_samples_by_age_total",
    "Samples of finished iterations, by age in versions: from the policy that sampled their oldest token to the one "
    "that trained on them.", ["age"])
DISPATCH_STALLS = Counter("tandem_dispatch_stalls_total",
    "Times that dispatch waited for a replica because none was left.")
DISPATCH_JOINERS = Counter("tandem_dispatch_joiners_total",
    "Replicas that joined and were seeded while groups were being generated.")
SAMPLES = Gauge("tandem_samples",
    "Samples in the run's ledger: begun, and what became of them (trained, filtered, dropped, under_way); returned: "
    "those of train steps that a resume has undone.", ["fate"])
TRAINER_RETURNS = Counter("tandem_trainer_returns_total",
    "Times that a trainer was lost, and came back to where it was while the run continued.")
REDONE_STEPS = Counter("tandem_redone_steps_total",
    "Train steps that a trainer that was lost has done again, from their kept samples.")
SCORED_COMPLETIONS = Counter("tandem_scored_completions_total",
    "Completions that were scored, by data file (train, heldout).", ["data"])
REWARD_ERRORS = Counter("tandem_reward_errors_total", "Completions whose scoring failed.", ["data"])
REWARD_TIMEOUTS = Counter("tandem_reward_timeouts_total",
    "Completions whose scoring took longer than reward.timeout_s.", ["data"])
REWARD_SCORE_MEAN = Gauge("tandem_reward_score_mean",
    "Mean unweighted score of each reward, over the last batch that it scored.", ["data", "reward"])
REWARD_SCORE_STD = Gauge("tandem_reward_score_std",
    "Standard deviation of each reward's unweighted scores.", ["data", "reward"])
REWARD_CALL_SECONDS = Histogram("tandem_reward_call_seconds",
    "Seconds of a call of a reward's server or judge, each repetition by itself, by result (answered, failed: it is "
    "repeated, refused: it is not).", ["reward", "result"], buckets=_PART_BUCKETS)
REWARD_CIRCUIT_OPEN = Gauge("tandem_reward_circuit_open",
    "1 while a reward's server gets no calls, because the last ones failed (reward.open_after), else 0.", ["reward"])
UNREADABLE_ANSWERS = Counter("tandem_unreadable_answers_total",
    "Completions that scored 0 because their reference answer cannot be read.", ["data"])
EPISODES = Counter("tandem_episodes_total",
    "Episodes with an environment, in training and evaluations, by end (done, max_turns, max_tokens, timeout, "
    "failed).", ["end"])
EPISODE_FAILURES = Counter("tandem_episode_failures_total",
    "Failed episodes by what happened (late, error, bad_reply, killed, not_repeatable; template: the chat template "
    "refused what the environment returned).", ["kind"])
EPISODE_TURNS = Summary("tandem_episode_turns", "Turns of the policy in an episode.")
EPISODES_OPEN = Gauge("tandem_episodes_open", "Episodes that are under way with an environment now.")
EPISODE_REPLAYS = Counter("tandem_episode_replays_total",
    "Episodes that were built again, because their worker process or server was lost.")
ENVIRONMENT_STEP_SECONDS = Histogram("tandem_environment_step_seconds",
    "Seconds of a call of step, or of all calls of tools in a turn, with the wait for a worker.", buckets=_PART_BUCKETS)
ENVIRONMENT_RESTARTS = Counter("tandem_environment_worker_restarts_total",
    "Worker processes of the environment that were started again, because the one before had ended.")
MISSED_CHECKPOINTS = Gauge("tandem_missed_checkpoints",
    "Checkpoints in a row that were not written; 0 after one that was.")
WARNINGS = Counter("tandem_warnings_total", "Warnings by kind.", ["kind"])
# fmt: on

# What exports a figure of a row or of health, by its name in the table.
_EXPORT: dict[str, Callable[[float], None]] = {
    metric.name: Counter(metric.exported, metric.help).inc
    if metric.exported.endswith("_total")
    else LateGauge(metric.exported, metric.help).set
    for metric in METRICS
    if metric.exported
}

# Exported from 0 on: for a counter that appears with its first event, an alert would see no increase.
for _result in ("committed", "aborted"):
    SYNC_ROUNDS.labels(result=_result)
for _sender in ("replica", "trainer", "disk"):
    JOINER_SECONDS.labels(sender=_sender)
for _data in get_args(DataKey):
    for _counter in (SCORED_COMPLETIONS, REWARD_ERRORS, REWARD_TIMEOUTS, UNREADABLE_ANSWERS):
        _counter.labels(data=_data)
for _outcome in ReplicaOutcome:
    SYNC_OUTCOMES.labels(outcome=_outcome.value)
for _end in ("done", "max_turns", "max_tokens", "timeout", "failed"):
    EPISODES.labels(end=_end)
for _kind in ("late", "error", "bad_reply", "killed", "not_repeatable", "template"):
    EPISODE_FAILURES.labels(kind=_kind)
for _kind in (
    *("logprob_difference", "nothing_to_train", "skipped_update", "training", "reward_error", "reward_timeout"),
    *("unreadable_answer", "reward_remark", "generate_retry", "replicas", "kubernetes", "dropped_prompts"),
    *("missed_checkpoint", "not_removed"),
):
    WARNINGS.labels(kind=_kind)


def observe_episode(said: Transcript, failure: str) -> None:
    """Count an episode that has ended. failure: its kind; "": it did not fail."""
    EPISODES.labels(end=said.end).inc()
    EPISODE_TURNS.observe(said.num_turns)
    if failure:
        EPISODE_FAILURES.labels(kind=failure).inc()


def observe_state(current: str, states: Iterable[str]) -> None:
    """Set the gauge of the current state to 1, those of all other states to 0."""
    for state in states:
        RUN_STATE.labels(state=state).set(1.0 if state == current else 0.0)


def observe_figures(figures: Mapping[str, float | int | None]) -> None:
    """Export figures by their names in the table; None: not measured."""
    for name, export in _EXPORT.items():
        value = figures.get(name)
        if value is not None:
            export(value)


def observe_samples(account: Account) -> None:
    """Export what became of the run's samples."""
    for fate in ("begun", *FATES, "returned"):
        SAMPLES.labels(fate=fate).set(account.total(fate))
    SAMPLES.labels(fate="under_way").set(account.under_way)


def observe_ages(ages: Mapping[int, int]) -> None:
    """Count samples by their age in versions."""
    for age, number in ages.items():
        SAMPLE_AGES.labels(age=str(age)).inc(number)


def progress() -> None:
    """Set the time of the last progress, for the alert TandemNoProgress."""
    LAST_PROGRESS.set(time.time())


def observe_sync(result: SyncResult) -> None:
    """Record a weight sync that succeeded; the outcomes of its rounds are recorded when these end."""
    SYNC_ROUNDS.labels(result="committed").inc()
    SYNC_BYTES.inc(result.bytes_received)
    SYNC_EPOCH.set(result.epoch)
    if not result.source:  # what a replica sends to another is no figure of the fleet's weight sync
        for stage, seconds in {**result.stages, "total": result.total_s}.items():
            SYNC_SECONDS.labels(stage=stage).observe(seconds, exemplar())
        SYNC_RANK_BYTES.set(result.bytes_per_rollout_rank)
        SYNC_REDUNDANCY.set(result.redundancy)
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
    observe_figures(row)
    for part, seconds in parts.items():
        ITERATION_SECONDS.labels(part=part).observe(seconds, exemplar())
    progress()
