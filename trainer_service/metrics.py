"""Prometheus metrics of the trainer, served by rank 0."""

from collections.abc import Mapping, Sequence

from prometheus_client import Counter, Gauge, Histogram

from servicekit.buckets import fine_buckets
from servicekit.tracing import exemplar
from tandem_api.weights.v1 import weights_pb2

# There is one trainer, and its labels have few values: quantiles of all of its durations are right within 10 %.
STEP_SECONDS = Histogram(
    "tandem_train_step_seconds",
    "Wall seconds of a train step by part: receive, pack, old_logprobs, reference (with a KL term), forward_backward, "
    "optimizer, onload and offload (trainer.offload), total.",
    ["part"],
    buckets=fine_buckets(0.001, 3600),
)
STEPS = Counter("tandem_train_steps_total", "Train steps by result.", ["result"])
SKIPPED_UPDATES = Counter(
    "tandem_train_skipped_updates_total",
    "Optimizer updates that were left out, since a loss or gradient was not finite (grpo.on_non_finite: skip).",
)
ENGINE_NOT_FINITE = Counter(
    "tandem_train_engine_logprobs_not_finite_total",
    "Completion tokens of the policy whose log-prob the engine gave as NaN or infinite.",
)
TOKENS = Counter("tandem_train_tokens_total", "Completion tokens of the policy in the samples of all train steps.")
SAMPLES = Counter("tandem_train_samples_total", "Samples of all train steps.")
POLICY_VERSION = Gauge("tandem_policy_version", "Policy version that the trainer holds.")
GRAD_NORM = Gauge("tandem_grad_norm", "Gradient norm before clipping, mean over the last step's updates.")
LOSS = Gauge("tandem_loss", "Loss of the last step, mean over its updates.")
ENTROPY = Gauge("tandem_entropy", "Mean entropy per completion token at the start of the last step, in nats.")
KL_OLD = Gauge("tandem_kl_old", "k3 estimate of KL(old || new) per trained token of the last step.")
CLIP_FRACTION = Gauge("tandem_clip_fraction", "Share of trained tokens whose ratio was clipped, by bound.", ["bound"])
LOGPROB_DIFF = Gauge("tandem_logprob_abs_diff", "|log pi_trainer - log pi_engine| of the last step.", ["statistic"])
PACKING_EFFICIENCY = Gauge(
    "tandem_packing_efficiency_ratio",
    "Tokens of the samples, shared prompts once, per token that went through the model in the last step, on all ranks.",
)
PROMPT_SHARING = Gauge(
    "tandem_prompt_sharing_ratio",
    "Tokens that went through the model in the last step per token that would have without shared prompts.",
)
TOKENS_PER_SECOND = Gauge(
    "tandem_train_tokens_per_second", "Tokens of the last step's samples, prompts included, per second of the step."
)
FLOPS_UTILIZATION = Gauge(
    "tandem_train_model_flops_utilization_ratio",
    "FLOPs that the last step needed / what the devices of all ranks could have done meanwhile (MFU).",
)
PEAK_FLOPS = Gauge(
    "tandem_train_peak_flops_per_second",
    "Highest speed of all ranks' devices: by trainer.peak_tflops, or measured before the first step.",
)
PEAK_MEMORY = Gauge(
    "tandem_train_peak_memory_bytes",
    "Most bytes in the last step on the rank that had most: allocated on its GPU, resident on a host without one.",
)
PUBLISH_SECONDS = Histogram(
    "tandem_trainer_publish_seconds",
    "Wall seconds of a weight-sync phase on the trainer.",
    ["phase"],
    buckets=fine_buckets(0.001, 300),
)
STAGING_BYTES = Gauge(
    "tandem_weight_sync_staging_bytes", "Most bytes that a rank's transfer buffers took in the last transfer."
)
CHECKPOINT_SECONDS = Histogram(
    "tandem_checkpoint_seconds", "Wall seconds to write a checkpoint.", buckets=fine_buckets(0.01, 1000)
)
CHECKPOINT_BLOCKING_SECONDS = Histogram(
    "tandem_checkpoint_blocking_seconds",
    "Wall seconds for which a checkpoint kept the trainer from its work: with run.checkpoint_async those of the copy.",
    buckets=fine_buckets(0.01, 1000),
)

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
    TOKENS.inc(metrics["tokens"])
    SKIPPED_UPDATES.inc(metrics["skipped_updates"])
    ENGINE_NOT_FINITE.inc(metrics.get("engine_logprobs_not_finite", 0.0))
    SAMPLES.inc(metrics["samples"])
    POLICY_VERSION.set(policy_version)
    GRAD_NORM.set(metrics["grad_norm"])
    LOSS.set(metrics["loss"])
    ENTROPY.set(metrics["entropy"])
    KL_OLD.set(metrics["kl_old"])
    CLIP_FRACTION.labels(bound="low").set(metrics["clip_fraction_low"])
    CLIP_FRACTION.labels(bound="high").set(metrics["clip_fraction_high"])
    LOGPROB_DIFF.labels(statistic="mean").set(metrics["logprob_abs_diff_mean"])
    LOGPROB_DIFF.labels(statistic="p999").set(metrics["logprob_abs_diff_p999"])
    LOGPROB_DIFF.labels(statistic="max").set(metrics["logprob_abs_diff_max"])
    PACKING_EFFICIENCY.set(metrics["packing_efficiency"])
    PROMPT_SHARING.set(metrics["prompt_sharing"])
    TOKENS_PER_SECOND.set(metrics["train_tokens_per_s"])
    FLOPS_UTILIZATION.set(metrics["model_flops_utilization"])
    PEAK_FLOPS.set(metrics["train_peak_flops_per_s"])
    PEAK_MEMORY.set(metrics["train_peak_memory_bytes"])
