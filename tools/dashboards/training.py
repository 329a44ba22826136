"""The dashboard "Training": rewards, evaluations, losses, samples, and where the time goes."""

from tools.dashboards.panels import (
    COORDINATOR,
    TRAINER,
    Board,
    Row,
    Series,
    figure,
    gauge,
    heatmap,
    increase,
    mean,
    panel,
    percentiles,
    rate,
)

_LEARNING = Row(
    title="Learning",
    panels=(
        panel(
            "Reward",
            "Of the samples of the last iteration.",
            gauge("tandem_reward_mean", "mean"),
            gauge("tandem_reward_std", "standard deviation"),
            unit="short",
            alert="TandemRewardCollapsed",
        ),
        panel(
            "Below its best",
            "How far the mean reward of the last iterations is below its best in this run, as a share of what counts "
            "as a collapse, and the last held-out score below that before the training, in standard deviations of its "
            "scores: the same at every sign and scale.",
            gauge("tandem_reward_fall_of_limit_ratio", "reward, of a collapse"),
            gauge("tandem_heldout_fall_stds", "held out, below its start"),
            unit="short",
            alert="TandemRewardCollapsed",
        ),
        panel(
            "Scores",
            "Mean unweighted score of each reward, of the last iteration and of the last evaluation.",
            gauge("tandem_reward_score_mean", "{{reward}}, {{data}}"),
            unit="short",
        ),
        panel(
            "Spread of scores",
            "Standard deviation of each reward's unweighted scores. At 0 that reward teaches nothing.",
            gauge("tandem_reward_score_std", "{{reward}}, {{data}}"),
            unit="short",
        ),
        panel(
            "Held-out score",
            "Mean of the greedy completions, last measured, and before the first iteration: the accuracy, where scores "
            "are 0 or 1.",
            gauge("tandem_heldout_accuracy_ratio", "last"),
            gauge("tandem_heldout_initial_accuracy_ratio", "before the training"),
            unit="short",
            alert="TandemAccuracyBelowStart",
        ),
        panel(
            "Evaluations",
            "Measures of the last evaluation of each set: mean@k, pass@k, maj@k; metrics.jsonl has their intervals.",
            gauge("tandem_evaluation", "{{set}} {{measure}}"),
            unit="short",
        ),
        panel(
            "Evaluated versions",
            "Policy version of the last evaluation of each set, and the one that is trained.",
            gauge("tandem_evaluation_policy_version", "{{set}}"),
            gauge("tandem_policy_version", "trained"),
        ),
        figure("loss"),
        figure(
            "entropy",
            "Towards 0: no exploration is left. Rising without end: noise.",
            alert="TandemEntropyCollapsed",
        ),
        panel(
            "KL",
            "k3 estimates per token: KL(old || new), how far the last step moves the policy, and, with "
            "grpo.kl_coefficient, how far the policy is from the reference policy.",
            gauge("tandem_kl_old", "KL(old || new)"),
            gauge("tandem_kl_reference", "KL(policy || reference)"),
            unit="nats",
            alert="TandemKLHigh",
        ),
        panel(
            "KL term",
            "With grpo.kl_coefficient: its part of the last step's loss, or what it takes off a reward (mean).",
            gauge("tandem_kl_loss", "of the loss"),
            gauge("tandem_kl_reward", "off a reward"),
            unit="short",
        ),
        panel(
            "Clip fractions",
            "Share of trained tokens whose ratio was clipped at each bound.",
            gauge("tandem_clip_fraction_low_ratio", "low"),
            gauge("tandem_clip_fraction_high_ratio", "high"),
            unit="percentunit",
        ),
        figure("grad_norm", logarithmic=True),
        figure("zero_variance_ratio", "The policy does not learn from them.", title="Zero-variance groups"),
        panel(
            "Train steps",
            "By result; not_finite and failed steps change no weights. Updates that were left out: grpo.on_non_finite.",
            increase("tandem_train_steps_total", "{{result}}", TRAINER, by="result"),
            increase("tandem_train_skipped_updates_total", "updates left out", TRAINER),
            increase(
                "tandem_train_engine_logprobs_not_finite_total", "tokens without a log-prob of the engine", TRAINER
            ),
            unit="short",
        ),
    ),
)
_SAMPLES = Row(
    title="Samples",
    panels=(
        figure("response_length_mean", "In tokens.", title="Lengths"),
        figure("trained_length_ratio", "With schedule.max_token_age; below 1, short ones are trained.", title="Bias"),
        figure("truncated_ratio", "That is grpo.max_new_tokens.", title="Truncated"),
        panel(
            "Mismatch",
            "|log pi_trainer - log pi_engine| of the same tokens; grpo.logprob_diff_limit says which is judged.",
            gauge("tandem_logprob_abs_diff_max", "max"),
            gauge("tandem_logprob_abs_diff_p999", "99.9 %"),
            gauge("tandem_logprob_abs_diff_mean", "mean"),
            gauge("tandem_flip_abs_diff_mean", "behind a flip"),
            unit="nats",
            alert="TandemLogprobMismatch",
            logarithmic=True,
        ),
        panel(
            "Age",
            "In versions, 0 when generation waits for the sync: of the oldest sample, and means over tokens, of the "
            "policy that sampled them and of the oldest one in their context.",
            gauge("tandem_staleness_versions", "oldest sample"),
            gauge("tandem_token_age_versions", "token"),
            gauge("tandem_context_age_versions", "context"),
            unit="short",
        ),
        panel(
            "Samples by age",
            "Of finished iterations; age in versions.",
            increase("tandem_samples_by_age_total", "{{age}}", by="age"),
            unit="short",
        ),
        figure("policy_shift_mean", "With schedule.kind: one_step_off or async.", title="Policy shift"),
        figure(
            "trainer_idle_ratio",
            "It waits for samples, or for the weight sync.",
            title="Trainer idle",
            alert="TandemTrainerIdle",
        ),
        figure(
            "rollout_idle_ratio",
            "Nothing runs in so many slots of the engines.",
            title="Slots idle",
            alert="TandemSlotsIdle",
        ),
        figure("groups_waiting", "Finished, and not trained yet (schedule.kind: async).", title="Groups waiting"),
        panel(
            "Dropped and failed",
            "Groups without variance and samples without a score that were dropped, completions (by data file) whose "
            "scoring failed or took too long, calls that were repeated, tokens that were kept then.",
            increase("tandem_dropped_groups_total", "dropped groups"),
            increase("tandem_dropped_samples_total", "dropped samples"),
            increase("tandem_masked_tokens_total", "masked tokens"),
            increase("tandem_resumed_tokens_total", "resumed tokens"),
            increase("tandem_reward_errors_total", "scoring errors, {{data}}", by="data"),
            increase("tandem_reward_timeouts_total", "scoring time-outs, {{data}}", by="data"),
            increase("tandem_generate_retries_total", "retried calls"),
            unit="short",
            alert="TandemTokensTooOld",
        ),
        panel(
            "Trained",
            "Per second: samples sent to the trainer, and completion tokens that its steps have trained on.",
            rate("tandem_trained_samples_total", "samples"),
            rate("tandem_train_tokens_total", "tokens", TRAINER),
            unit="short",
            logarithmic=True,
        ),
        panel(
            "Packing",
            "Tokens of the samples per token that went through the model in the last step, the rest is padding; and "
            "tokens that went through it per token that would have without shared prompts.",
            gauge("tandem_packing_efficiency_ratio", "packing efficiency", TRAINER),
            gauge("tandem_prompt_sharing_ratio", "with shared prompts", TRAINER),
            unit="percentunit",
        ),
        panel(
            "Prompts left out",
            "Longer than data.max_prompt_tokens, since the run began.",
            gauge("tandem_dropped_prompts", "{{data}}"),
        ),
        panel(
            "Samples",
            "In the run's ledger, of which `tandem ledger` shows the records. begun = trained + filtered + dropped + "
            "under_way; returned: of train steps that a resume has undone.",
            gauge("tandem_samples", "{{fate}}"),
        ),
        panel(
            "Trainer came back",
            "Losses of the trainer that the run has outlived, and train steps that it did again because of them.",
            increase("tandem_trainer_returns_total", "losses"),
            increase("tandem_redone_steps_total", "steps done again"),
            unit="short",
        ),
        panel(
            "Warnings",
            "By kind; their text is in the coordinator's log.",
            increase("tandem_warnings_total", "{{kind}}", by="kind"),
            unit="short",
        ),
    ),
)
_FAILED = " / ".join(
    f"sum by (data) (increase({metric}{{{COORDINATOR}}}[$window]))"
    for metric in ("tandem_reward_errors_total", "tandem_scored_completions_total")
)
_REWARDS = Row(
    title="Rewards",
    panels=(
        panel(
            "Scored completions",
            "Per second, by data file.",
            rate("tandem_scored_completions_total", "{{data}}", by="data"),
            unit="short",
        ),
        panel(
            "Share of failed scores",
            "Completions whose scoring failed / all that were scored. Above reward.max_error_share the run ends.",
            Series(expr=_FAILED, legend="{{data}}"),
            unit="percentunit",
        ),
        panel(
            "Unreadable answers",
            "Completions that scored 0 because the reference answer of their row cannot be read.",
            increase("tandem_unreadable_answers_total", "{{data}}", by="data"),
            unit="short",
        ),
        panel(
            "Calls of reward servers",
            "Seconds of a call of a remote reward or a judge, repetitions by themselves.",
            *percentiles("tandem_reward_call_seconds", 0.5, 0.95, by="reward"),
            unit="s",
        ),
        panel(
            "Results of these calls",
            "Per second. failed: repeated, as reward.retries says; refused: the server will never score that.",
            rate("tandem_reward_call_seconds_count", "{{reward}} {{result}}", by="reward, result"),
            unit="reqps",
        ),
        panel(
            "Open circuits",
            "1 while a reward's server gets no calls since the last ones failed (reward.open_after, reward.open_s).",
            gauge("tandem_reward_circuit_open", "{{reward}}"),
        ),
    ),
)
_FAILED_EPISODES = " / ".join(
    f"sum (increase(tandem_episodes_total{{{COORDINATOR}{only}}}[$window]))" for only in (', end="failed"', "")
)
_ENVIRONMENTS = Row(
    title="Environments",
    panels=(
        panel(
            "Episodes",
            "Per second, by how they ended, in training and evaluations.",
            rate("tandem_episodes_total", "{{end}}", by="end"),
            unit="short",
            stacked=True,
        ),
        panel(
            "Share of failed episodes",
            "Failed / all. Above environment.max_error_share of a batch the run ends.",
            Series(expr=_FAILED_EPISODES, legend="failed"),
            unit="percentunit",
            alert="TandemEpisodesFail",
        ),
        panel(
            "Failures of environments",
            "By what happened; docs/environments.md, When an episode fails.",
            increase("tandem_episode_failures_total", "{{kind}}", by="kind"),
            unit="short",
            alert="TandemEpisodesFail",
        ),
        panel(
            "Turns",
            "Of the policy in an episode; mean.",
            mean("tandem_episode_turns", "mean"),
            unit="short",
        ),
        panel(
            "Seconds of a step",
            "Of a call of step, or of all calls of tools in a turn, with the wait for a worker.",
            *percentiles("tandem_environment_step_seconds", 0.5, 0.95, 0.99),
            unit="s",
        ),
        heatmap("Steps by duration", "How many calls took how long.", "tandem_environment_step_seconds"),
        panel(
            "Workers of the environment",
            "Episodes that they hold now; processes that were started again, and episodes that were built again then.",
            gauge("tandem_episodes_open", "open episodes"),
            increase("tandem_environment_worker_restarts_total", "processes started again"),
            increase("tandem_episode_replays_total", "episodes built again"),
            unit="short",
        ),
    ),
)
_TIME = Row(
    title="Time",
    panels=(
        panel(
            "State of the run",
            "The one that it is in; starting: it waits for its services. finished, failed and interrupted are final.",
            Series(expr=f"tandem_run_state{{{COORDINATOR}}} == 1", legend="{{state}}"),
        ),
        heatmap(
            "Iterations by duration",
            "How many iterations took how long.",
            "tandem_iteration_seconds",
            f'{COORDINATOR}, part="total"',
        ),
        panel(
            "Where an iteration's time goes",
            "Mean seconds of each part.",
            mean("tandem_iteration_seconds", "{{part}}", f'{COORDINATOR}, part!="total"', by="part"),
            unit="s",
            stacked=True,
        ),
        panel(
            "Where a train step's time goes",
            "Mean seconds of each part, on the trainer.",
            mean("tandem_train_step_seconds", "{{part}}", f'{TRAINER}, part!="total"', by="part"),
            unit="s",
            stacked=True,
        ),
        figure("train_tokens_per_s", title="Trainer's tokens per second"),
        figure(
            "model_flops_utilization",
            "Small models and short samples cannot fill a device.",
            title="Model-FLOPs utilisation",
        ),
        panel(
            "FLOP/s",
            "What the devices of all ranks can do (trainer.peak_tflops, or measured), and what the last step did.",
            gauge("tandem_train_peak_flops_per_second", "peak", TRAINER),
            Series(
                expr=f"tandem_train_model_flops_utilization_ratio{{{TRAINER}}} "
                f"* tandem_train_peak_flops_per_second{{{TRAINER}}}",
                legend="last step",
            ),
            unit="short",
            logarithmic=True,
        ),
        figure("train_peak_memory_bytes", title="Trainer's peak memory"),
        panel(
            "Checkpoints",
            "Seconds to write one, and of these for which the trainer waited.",
            mean("tandem_checkpoint_seconds", "write", TRAINER),
            mean("tandem_checkpoint_blocking_seconds", "wait", TRAINER),
            unit="s",
        ),
        panel(
            "Missed checkpoints",
            "In a row; 0 after one that was written.",
            gauge("tandem_missed_checkpoints", "missed"),
            alert="TandemCheckpointsMissed",
        ),
        figure("overhead_share", title="Overhead"),
        panel("Iterations", "Completed.", gauge("tandem_iteration", "iteration")),
        figure("tokens_per_s"),
        panel(
            "Time since progress",
            "Seconds since a part of an iteration last began or ended.",
            Series(expr=f"time() - tandem_last_progress_timestamp_seconds{{{COORDINATOR}}}", legend="standstill"),
            unit="s",
            alert="TandemNoProgress",
        ),
    ),
)

BOARD = Board(
    uid="tandem-training",
    title="Tandem: training",
    help="Rewards, evaluations, losses, samples, and where the time goes.",
    rows=(_LEARNING, _REWARDS, _ENVIRONMENTS, _SAMPLES, _TIME),
)
