"""Prometheus metrics of the trainer, served by rank 0."""

from collections.abc import Callable, Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from servicekit.buckets import fine_buckets
from servicekit.tracing import exemplar
from tandem_api.weights.v1 import weights_pb2
from tandem_files.metrics_table import METRICS

# There is one trainer, and its labels have few values: quantiles of all of its durations are right within 10 %.
# fmt: off
STEP_SECONDS = Histogram("tandem_train_step_seconds",
    "Wall seconds of a train step by part: receive, pack, old_logprobs, reference (with a KL term), forward_backward, "
    "optimizer, onload and offload (trainer.offload), total.", ["part"], buckets=fine_buckets(0.001, 3600))
STEPS = Counter("tandem_train_steps_total", "Train steps by result.", ["result"])
POLICY_VERSION = Gauge("tandem_policy_version", "Policy version that the trainer holds.")
CLIP_FRACTION = Gauge("tandem_clip_fraction", "Share of trained tokens whose ratio was clipped, by bound.", ["bound"])
LOGPROB_DIFF = Gauge("tandem_logprob_abs_diff", "|log pi_trainer - log pi_engine| of the last step.", ["statistic"])
PUBLISH_SECONDS = Histogram("tandem_trainer_publish_seconds",
    "Wall seconds of a weight-sync phase on the trainer.", ["phase"], buckets=fine_buckets(0.001, 300))
STAGING_BYTES = Gauge("tandem_weight_sync_staging_bytes",
    "Most bytes that a rank's transfer buffers took in the last transfer.")
CHECKPOINT_SECONDS = Histogram("tandem_checkpoint_seconds",
    "Wall seconds to write a checkpoint.", buckets=fine_buckets(0.01, 1000))
CHECKPOINT_BLOCKING_SECONDS = Histogram("tandem_checkpoint_blocking_seconds",
    "Wall seconds for which a checkpoint kept the trainer from its work: with run.checkpoint_async those of the copy.",
    buckets=fine_buckets(0.01, 1000))
# fmt: on
# What exports a figure of a step, by its name in the table.
_EXPORT: dict[str, Callable[[float], None]] = {
    metric.name: Counter(metric.trainer, metric.help).inc
    if metric.trainer.endswith("_total")
    else Gauge(metric.trainer, metric.help).set
    for metric in METRICS
    if metric.trainer
}

for _result in ("ok", "not_finite", "failed"):
    # Start at 0: a counter that appears with its first event shows no increase to an alert.
    STEPS.labels(result=_result)


def observe_phase(phase: weights_pb2.RoundPhase.ValueType, reports: Sequence[weights_pb2.PhaseReport]) -> None:
    """Record a sync phase that succeeded.

    Args:
        reports: of each rank.
    """
    if phase == weights_pb2.ROUND_PHASE_TRANSFER:
        STAGING_BYTES.set(max(report.staging_bytes for report in reports))


def observe_step(metrics: Mapping[str, float], seconds: Mapping[str, float], policy_version: int) -> None:
    """Record a train step that succeeded."""
    for part, value in seconds.items():
        STEP_SECONDS.labels(part=part).observe(value, exemplar())
    STEPS.labels(result="ok").inc()
    POLICY_VERSION.set(policy_version)
    for name in _EXPORT.keys() & metrics.keys():
        _EXPORT[name](metrics[name])
    for bound in ("low", "high"):
        CLIP_FRACTION.labels(bound=bound).set(metrics[f"clip_fraction_{bound}"])
    for statistic in ("mean", "p999", "max"):
        LOGPROB_DIFF.labels(statistic=statistic).set(metrics[f"logprob_abs_diff_{statistic}"])
