"""The one table of metrics: what is measured, what it is called, where it is shown; and the thresholds of alerts.

A new metric is a row here, and the line that measures it. From the table follow: what a row of metrics.jsonl takes from
the trainer, Prometheus metrics of coordinator and trainer, the page's curves and figures, columns of the progress view,
medians of the summary, what `tandem compare` calls best, panels of dashboards, the reference in docs/monitoring.md.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

# Parts of an iteration in their order; seconds in the rows' fields `PART_s`.
ITERATION_PARTS = (
    *("generate", "reward", "reference", "batch", "train", "sync", "checkpoint", "export", "evaluate", "report"),
)
# Parts of a train step, as the trainer names them and in their order; seconds in the rows' fields `train_PART_s`.
STEP_PARTS = ("receive", "onload", "pack", "old_logprobs", "reference", "forward_backward", "optimizer", "offload")


class Column(NamedTuple):
    """A column of the progress view; `metric`, whose it is, is filled in there."""

    title: str
    form: str  # of the number
    width: int  # in characters
    rank: int = 0  # columns of a higher one are the first to go where there is no room
    metric: str = ""


@dataclass(frozen=True)
class Metric:
    """A metric; the order of the table is that of curves and columns."""

    # What measures it: the run, the trainer's step (`step`: without a field in rows), record/health.py.
    source: Literal["run", "trainer", "step", "health"]
    name: str  # field of metrics.jsonl; of held-out scores some are there too, with `heldout_` before the name
    unit: str  # share, nats, tokens, bytes, s, or ""
    help: str
    title: str = ""  # of its curve on the page; "": no curve
    exported: str = ""  # Prometheus name at the coordinator, of a counter if it ends with _total; "": not exported
    trainer: str = ""  # Prometheus name at the trainer
    tile: str = ""  # title at the head of the page; "": not there
    column: Column | None = None
    median: bool = False  # the summary has its median over all iterations
    less: bool = False  # less of it is better


# The fields that code asks for by name: what the training raises, and what shows that it has learnt.
REWARD, ACCURACY = "reward_mean", "heldout_accuracy"
# fmt: off
METRICS = (
    Metric("run", REWARD, "", "Mean reward of the last iteration.", "Reward", "tandem_reward_mean",
           tile="reward", column=Column("reward", ".3f", 6)),
    Metric("run", ACCURACY, "", "Last mean held-out greedy score: the accuracy, if scores are 0 or 1.",
           "Held-out accuracy", "tandem_heldout_accuracy_ratio", tile="held-out", column=Column("heldout", ".3f", 7)),
    Metric("run", "reward_std", "", "Standard deviation of the last iteration's rewards.",
           "Reward, standard deviation", "tandem_reward_std"),
    Metric("run", "response_length_mean", "tokens", "Mean completion length of the last iteration.",
           "Completion length", "tandem_response_length_tokens", column=Column("length", ".1f", 6)),
    Metric("run", "truncated_ratio", "share", "Share of completions cut off by the length limit.",
           "Cut off", "tandem_truncated_ratio", column=Column("cut%", ".0f", 4), less=True),
    Metric("run", "zero_variance_ratio", "share", "Share of groups whose rewards are all equal.",
           "Groups of equal rewards", "tandem_zero_variance_ratio", column=Column("same%", ".0f", 5), less=True),
    Metric("trainer", "entropy", "nats", "Mean token entropy over the full vocabulary, in nats.",
           "Entropy", "tandem_entropy", "tandem_entropy", column=Column("entropy", ".3f", 7)),
    Metric("trainer", "kl_old", "nats", "k3 estimate of KL(old || new) per trained token of the last step.",
           "KL(old || new)", "tandem_kl_old", "tandem_kl_old", less=True),
    Metric("trainer", "kl_reference", "nats", "k3 estimate of KL(policy || reference policy) per token.",
           exported="tandem_kl_reference", less=True),
    Metric("trainer", "kl_loss", "", "Part of the last step's loss that is the KL term (grpo.kl_in: loss).",
           exported="tandem_kl_loss", less=True),
    Metric("trainer", "kl_reward", "", "Mean over the last iteration's samples of what KL takes off a reward "
           "(grpo.kl_in: reward).", exported="tandem_kl_reward"),
    Metric("trainer", "loss", "", "Loss of the last step, mean over its updates.",
           "Loss", "tandem_loss", "tandem_loss", less=True),
    Metric("trainer", "grad_norm", "", "Gradient norm before clipping, mean over the last step's updates.",
           "Gradient norm", "tandem_grad_norm", "tandem_grad_norm"),
    Metric("trainer", "learning_rate", "", "Learning rate of the last step.", "Learning rate"),
    Metric("trainer", "clip_fraction_high", "share", "Share of tokens clipped at the upper bound.",
           "Clipped above", "tandem_clip_fraction_high_ratio"),
    Metric("trainer", "clip_fraction_low", "share", "Share of tokens clipped at the lower bound.",
           "Clipped below", "tandem_clip_fraction_low_ratio"),
    Metric("trainer", "ratio_mean", "", "Mean probability of a trained token / its old one."),
    Metric("trainer", "correction_weight_mean", "", "Mean weight by which grpo.correction changes a token's loss."),
    Metric("trainer", "correction_outside_fraction", "share", "Share of tokens outside the bounds of grpo.correction."),
    Metric("trainer", "skipped_updates", "", "Optimizer updates that were left out, because a loss or gradient was not "
           "finite (grpo.on_non_finite: skip).", trainer="tandem_train_skipped_updates_total", less=True),
    Metric("trainer", "engine_logprobs_not_finite", "", "Completion tokens of the policy whose log-prob the engine "
           "gave as NaN or infinite.", trainer="tandem_train_engine_logprobs_not_finite_total", less=True),
    Metric("trainer", "logprob_abs_diff_mean", "nats", "Mean |log pi_trainer - log pi_engine|.",
           "Log-prob mismatch, mean", "tandem_logprob_abs_diff_mean", less=True),
    Metric("trainer", "logprob_abs_diff_p999", "nats", "|log pi_trainer - log pi_engine| that one token in a thousand "
           "exceeds.", "Log-prob mismatch, 99.9 %", "tandem_logprob_abs_diff_p999", less=True),
    Metric("trainer", "logprob_abs_diff_max", "nats", "Largest |log pi_trainer - log pi_engine| of a token.",
           "Log-prob mismatch, max", "tandem_logprob_abs_diff_max",
           tile="log-prob mismatch", column=Column("|dlogp|", ".1e", 7, 1), less=True),
    Metric("run", "tokens_per_s", "", "Completion tokens per second of the last iteration.",
           "Tokens per second", "tandem_tokens_per_second", tile="tokens/s", column=Column("tok/s", ".0f", 6)),
    Metric("trainer", "train_tokens_per_s", "", "Tokens of the last step's samples, prompts included, per second of "
           "the step.", "Trainer, tokens per second", trainer="tandem_train_tokens_per_second"),
    Metric("trainer", "model_flops_utilization", "share", "FLOPs of the last step / what all devices could do (MFU).",
           "Trainer, share of peak FLOP/s", trainer="tandem_train_model_flops_utilization_ratio"),
    Metric("step", "train_peak_flops_per_s", "", "Highest speed of all ranks' devices: by trainer.peak_tflops, or "
           "measured before the first step.", trainer="tandem_train_peak_flops_per_second"),
    Metric("trainer", "train_peak_memory_bytes", "bytes", "Most bytes of a rank in the last step: GPU, else host.",
           "Trainer, peak memory of a rank", trainer="tandem_train_peak_memory_bytes"),
    Metric("trainer", "packing_efficiency", "share", "Tokens of samples, shared prompts once, per token computed.",
           "Packing efficiency", trainer="tandem_packing_efficiency_ratio"),
    Metric("trainer", "prompt_sharing", "share", "Tokens computed in the last step per token without shared prompts.",
           "Tokens left by shared prompts", trainer="tandem_prompt_sharing_ratio"),
    Metric("step", "tokens", "tokens", "Completion tokens of the policy in the samples of all train steps.",
           trainer="tandem_train_tokens_total"),
    Metric("step", "samples", "", "Samples of all train steps.", trainer="tandem_train_samples_total"),
    Metric("run", "generated_tokens", "tokens", "Completion tokens sampled for training.",
           exported="tandem_generated_tokens_total"),
    Metric("run", "trained_samples", "", "Samples sent to the trainer.", exported="tandem_trained_samples_total"),
    Metric("run", "dropped_groups", "", "Groups left out because all of their rewards were equal.",
           exported="tandem_dropped_groups_total", less=True),
    Metric("run", "dropped_samples", "", "Samples left out of training since a reward of theirs failed (on_error: "
           "drop).", exported="tandem_dropped_samples_total"),
    Metric("run", "retried_calls", "", "Generate calls that failed; what they left continued elsewhere.",
           exported="tandem_generate_retries_total", less=True),
    Metric("run", "staleness_max", "", "Age of the oldest sample of the last iteration, in versions.",
           exported="tandem_staleness_versions"),
    Metric("run", "token_age_mean", "", "Mean age of a completion token in the last iteration, in versions: from the "
           "policy that sampled it to the one that trained on it.", "Token age", "tandem_token_age_versions"),
    Metric("run", "context_age_mean", "", "The same of the oldest token before it in its completion: with sync.pause: "
           "keep_kv the KV cache of its context is that old.", exported="tandem_context_age_versions"),
    Metric("run", "flip_abs_diff_mean", "nats", "Mean |log pi_trainer - log pi_engine| of tokens that new weights have "
           "sampled in a completion of old ones; measured each 20 iterations (schedule.kind: async).",
           exported="tandem_flip_abs_diff_mean"),
    Metric("run", "resumed_tokens", "tokens", "Tokens after which completions continued on another replica, or after "
           "a pause that had aborted them; they were not sampled again.", exported="tandem_resumed_tokens_total"),
    Metric("run", "policy_shift_mean", "nats", "Mean |log pi_trainer - log pi_engine| where samples are of an older "
           "policy; the mismatch is measured each 20 iterations then.", "Policy shift", "tandem_policy_shift_mean"),
    Metric("run", "trainer_idle_ratio", "share", "Share of the last iteration in which the trainer computed nothing.",
           "Trainer idle", "tandem_trainer_idle_ratio", less=True),
    Metric("run", "rollout_idle_ratio", "share", "Share of the engines' slots (rollout.max_running_requests) in which "
           "nothing ran during the last iteration.", "Slots idle", "tandem_rollout_idle_ratio", less=True),
    Metric("run", "masked_tokens", "tokens", "Completion tokens left out as older than schedule.max_token_age.",
           exported="tandem_masked_tokens_total", less=True),
    Metric("run", "trained_length_ratio", "", "Mean length of the completions that are young enough to be trained / of "
           "all; schedule.stale: drop leaves out long ones.", exported="tandem_trained_length_ratio"),
    Metric("run", "groups_waiting", "", "Finished groups that waited when the last batch was taken (schedule.kind: "
           "async).", "Groups waiting", "tandem_groups_waiting"),
    Metric("run", "turns_mean", "", "Mean number of the policy's turns in an episode (environment).", "Turns"),
    Metric("run", "failed_episodes", "", "Episodes whose environment has failed.", less=True),
    Metric("run", "scored_completions", "", "Completions that were scored."),
    Metric("run", "reward_errors", "", "Completions whose scoring failed.", less=True),
    Metric("run", "reward_timeouts", "", "Completions whose scoring took longer than reward.timeout_s.", less=True),
    Metric("run", "unreadable_answers", "", "Completions that score 0 since their answer cannot be read.", less=True),
    Metric("run", "reward_not_applied", "", "Scores of rewards that do not apply to their row."),
    Metric("run", "reward_parts_left_out", "", "Parts of scores that are no numbers, or too many."),
    Metric("run", "sync_bytes_per_rollout_rank", "bytes", "Bytes that the busiest rollout rank received."),
    Metric("run", "sync_redundancy", "", "Bytes received / bytes of the shards in the weight sync; 1 is perfect."),
    Metric("run", "generate_s", "s", "Generation.", column=Column("gen s", ".2f", 6, 3), median=True),
    Metric("run", "engine_s", "s", "Engines' part of the generation, with an environment's seconds.", median=True),
    Metric("run", "reward_s", "s", "Scoring.", median=True),
    Metric("run", "reference_s", "s", "Log-probs of the reference policy (grpo.kl_in: reward)."),
    Metric("run", "batch_s", "s", "Advantages, and the batch.", median=True),
    Metric("run", "train_s", "s", "The train step.", column=Column("train s", ".2f", 7, 3), median=True),
    *(Metric("run", f"train_{part}_s", "s", f"The part `{part}` of the train step.") for part in STEP_PARTS),
    Metric("run", "trainer_compute_s", "s", "The trainer's own part of steps and log-probs.", median=True),
    Metric("run", "sync_s", "s", "The weight sync.", "Weight sync", column=Column("sync s", ".3f", 6, 2), median=True),
    *(Metric("run", f"{part}_s", "s", f"The part `{part}` of the iteration.") for part in ITERATION_PARTS[6:9]),
    Metric("run", "report_s", "s", "The report of the iteration before."),
    Metric("run", "iteration_s", "s", "The iteration.", "Iteration", column=Column("all s", ".1f", 5), median=True),
    Metric("run", "overhead_s", "s", "What neither engines nor trainer nor evaluation nor files take.", median=True),
    Metric("run", "overhead_share", "share", "Share of the last iteration outside the engine's and the trainer's "
           "computation.", exported="tandem_overhead_ratio", median=True, less=True),
    Metric("run", "policy_version", "", "Version after the iteration.", column=Column("version", ".0f", 7, 4)),
    Metric("health", "reward", "", "How far the mean reward of the last iterations is below its best / the fall that "
           "is a collapse.", exported="tandem_reward_fall_of_limit_ratio"),
    Metric("health", "heldout", "", "How far the last held-out accuracy is below that before the training, in standard "
           "deviations of its scores.", exported="tandem_heldout_fall_stds"),
    Metric("health", "mismatch", "", "Difference of the last iteration's log-probs in trainer and engine / its limit "
           "(grpo.logprob_diff_limit).", exported="tandem_logprob_diff_of_limit_ratio"),
    Metric("health", "mismatch_rise", "", "Mean difference of log-probs over the last iterations / over the first "
           "ones, at least 1e-3.", exported="tandem_logprob_diff_rise_ratio"),
)
# fmt: on
BY_NAME = {metric.name: metric for metric in METRICS}


class Threshold(NamedTuple):
    """Where an alert begins, in deploy/monitoring/rules and for the coordinator itself."""

    alert: str
    value: float
    rule: str = "> {}"  # part of the rule's expression


NO_PROGRESS_S = Threshold("TandemNoProgress", 900)
NO_PROGRESS_ITERATIONS = Threshold("TandemNoProgress", 3, "{} * tandem:iteration_seconds:mean6h")
DISK_FULL = Threshold("TandemDiskFull", 0.05, "< {} * ")
# Mean difference of log-probs / that of the first iterations.
MISMATCH_RISEN = Threshold("TandemLogprobMismatchRising", 3)
KL_HIGH = Threshold("TandemKLHigh", 0.1)
ENTROPY_COLLAPSED = Threshold("TandemEntropyCollapsed", 0.05, "< {}")
NOTHING_TO_LEARN = Threshold("TandemNothingToLearn", 0.9)
# How far the mean reward is below its best / the fall that is a collapse (coordinator/record/health.py).
REWARD_COLLAPSED = Threshold("TandemRewardCollapsed", 1)
# Standard deviations of the held-out scores: two standard errors of the mean over 400 prompts.
ACCURACY_LOST = Threshold("TandemAccuracyBelowStart", 0.1)
ALL_TRUNCATED = Threshold("TandemCompletionsTruncated", 0.9)
# Shares of completions that count as wrong because scoring failed, or took too long. Above scoring.py's budgets (5 %
# and 25 % of one batch) the run ends.
REWARD_ERRORS = Threshold("TandemRewardErrors", 0.01, "> {} * ")
REWARD_TIMEOUTS = Threshold("TandemRewardTimeouts", 0.05, "> {} * ")
THRESHOLDS = tuple(value for value in globals().values() if isinstance(value, Threshold))
