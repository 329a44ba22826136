"""Checks of the loss: objective and correction fit together, and read all settings that are given."""

import math
from collections.abc import Mapping
from functools import partial

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import GrpoSection, RunConfig, ScheduleSection

# What some choices do not read; a value that is not the default would do nothing.
_NOT_READ: Mapping[str, tuple[str, ...]] = {
    "objective: gspo": ("dual_clip",),
    "objective: cispo": ("clip_low", "dual_clip"),
    "correction: none": ("correction_high", "correction_low", "correction_level"),
    "correction: importance": ("correction_high", "correction_low"),
    "kl_coefficient: 0.0": ("kl_estimator", "kl_in", "reference_path", "reference_refresh_every"),
    "on_non_finite: fail": ("non_finite_budget",),
}
# Bounds that a correction needs, with usual values.
_NEEDED: Mapping[str, Mapping[str, str]] = {
    "tis": {"correction_high": "2"},
    "icepop": {"correction_high": "5", "correction_low": "0.5"},
    "mis": {"correction_high": "2"},
}
# A sequence's ratio is a mean over its tokens: it leaves 1 by thousandths, GSPO's bounds are 3e-4 and 4e-4.
_WIDE_FOR_SEQUENCES = 0.05


def _not_read(choice: str, config: RunConfig) -> Problems:
    """Find a setting that is not the default and that the chosen objective or correction does not read."""
    chosen = getattr(config.grpo, choice)
    for name in _NOT_READ.get(f"{choice}: {chosen}", ()):
        value, default = getattr(config.grpo, name), GrpoSection.model_fields[name].default
        if value != default:
            yield problem(
                f"grpo.{name}",
                value,
                f"does nothing with grpo.{choice}: {chosen}",
                f"leave it out ({'null' if default is None else default}), or choose another grpo.{choice}",
            )
            return


for _choice in dict.fromkeys(text.partition(":")[0] for text in _NOT_READ):
    _settings = {name: None for text, names in _NOT_READ.items() if text.startswith(f"{_choice}:") for name in names}
    check(*(f"grpo.{name}" for name in (_choice, *_settings)))(partial(_not_read, _choice))


@check("grpo.correction", "grpo.correction_low", "grpo.correction_high")
def _correction_has_its_bounds(config: RunConfig) -> Problems:
    for name, usual in _NEEDED.get(config.grpo.correction, {}).items():
        if getattr(config.grpo, name) is None:
            yield problem(
                "grpo.correction",
                config.grpo.correction,
                f"needs grpo.{name}, a bound of pi_old / pi_roll",
                f"set grpo.{name}, e.g. {usual}",
            )
            return


@check("schedule.kind", "grpo.correction")
def _older_samples_are_corrected(config: RunConfig) -> Problems:
    if config.schedule.kind != "sync" and config.grpo.correction == "none":
        yield problem(
            "schedule.kind",
            config.schedule.kind,
            "trains on samples of an older policy, which grpo.correction: none takes for samples of the present one",
            "set grpo.preset: decoupled (importance weights), or grpo.correction: tis, icepop or mis",
        )


# What other schedules do not read.
_ASYNC_ONLY = ("depth", "max_staleness", "window", "stale", "max_token_age")


@check("schedule.kind", *[f"schedule.{name}" for name in _ASYNC_ONLY])
def _schedule_reads_its_settings(config: RunConfig) -> Problems:
    for name in _ASYNC_ONLY if config.schedule.kind != "async" else ():
        value, default = getattr(config.schedule, name), ScheduleSection.model_fields[name].default
        if value != default:
            why = f"does nothing with schedule.kind: {config.schedule.kind}"
            yield problem(f"schedule.{name}", value, why, "leave it out, or set schedule.kind: async")
            return


@check("schedule.kind", "evaluation.replicas", "evaluation.concurrent", "rollout.replicas", "rollout.min_replicas")
def _replicas_evaluate_apart(config: RunConfig) -> Problems:
    asked, kept = config.evaluation.replicas, max(1, config.rollout.min_replicas)
    if asked is not None and (config.schedule.kind != "async" or not config.evaluation.concurrent):
        why = "does nothing without schedule.kind: async and evaluation.concurrent: true"
        yield problem("evaluation.replicas", asked, why, "leave it out: all replicas evaluate")
    elif asked is not None and asked + kept > config.rollout.replicas:
        most, others = config.rollout.replicas - kept, f"{kept} of {config.rollout.replicas} replicas"
        change = f"set it to {most} at most" if most > 0 else "leave it out: weight syncs wait for the evaluation"
        why = f"leaves fewer than the {others} (rollout.min_replicas) that train on"
        yield problem("evaluation.replicas", asked, why, change)


@check("schedule.kind", "schedule.depth", "schedule.max_staleness", "schedule.window", "grpo.prompts_per_iteration")
def _pipeline_has_room(config: RunConfig) -> Problems:
    schedule, batch = config.schedule, config.grpo.prompts_per_iteration
    if schedule.kind != "async":
        return
    if schedule.depth > schedule.max_staleness:
        why = f"is more than ever wait: schedule.max_staleness is {schedule.max_staleness}"
        yield problem("schedule.depth", schedule.depth, why, f"set it to {schedule.max_staleness} at most")
    elif schedule.window_groups(batch) > schedule.max_staleness * batch:
        why = f"is more than the {schedule.max_staleness * batch} groups that are under way beside a step"
        yield problem("schedule.window", schedule.window, why, f"set it to {schedule.max_staleness} at most")
    elif schedule.window > 0 and schedule.window_groups(batch) == 1 < batch:
        why = f"is less than two of {batch} groups: they are trained in their order, and each slow one delays a step"
        suggestion = f"set it to 1.0, to {math.ceil(200 / batch) / 100:g} at least, or to 0 for their order"
        yield problem("schedule.window", schedule.window, why, suggestion, severity="warning")


@check("schedule.kind", "schedule.stale", "schedule.max_token_age")
def _nothing_is_older(config: RunConfig) -> Problems:
    schedule = config.schedule
    if schedule.stale == "wait" and schedule.max_token_age is not None:
        yield problem(
            "schedule.max_token_age",
            schedule.max_token_age,
            "does nothing with schedule.stale: wait",
            "leave it out, or set schedule.stale: mask; a smaller schedule.max_staleness lets fewer groups begin",
        )


@check("schedule.kind", "grpo.zero_variance")
def _others_are_under_way(config: RunConfig) -> Problems:
    if config.grpo.zero_variance == "replace" and config.schedule.kind != "async":
        yield problem(
            "grpo.zero_variance",
            "replace",
            f"needs further groups, which schedule.kind: {config.schedule.kind} does not generate",
            "set schedule.kind: async, or grpo.zero_variance: drop",
        )


@check("schedule.kind", "sync.pause", "grpo.stop")
def _generation_continues_in_a_sync(config: RunConfig) -> Problems:
    pause, message = config.sync.pause, ""
    if config.schedule.kind == "async" and pause == "drain":
        message = "would let each weight sync wait for all completions under way; schedule.kind: async always has some"
    elif config.schedule.kind == "async" and pause == "abort_requeue" and config.grpo.stop:
        message = "lets completions begin anew in each weight sync with grpo.stop, so that long ones would never end"
    if not message:
        return
    suggestion = "set keep_kv, the default of async (with sync.install: staged), or recompute: exact, by a new prefill"
    if not config.grpo.stop:
        suggestion += "; or abort_requeue: completions continue after it on any replica"
    yield problem("sync.pause", pause, message, suggestion)


@check("grpo.correction", "grpo.old_logprobs")
def _correction_needs_recompute(config: RunConfig) -> Problems:
    if config.grpo.correction != "none" and config.grpo.old_logprobs != "recompute":
        yield problem(
            "grpo.correction",
            config.grpo.correction,
            "needs grpo.old_logprobs: recompute; with `rollout` the weight pi_old / pi_roll is always 1",
            "set grpo.old_logprobs: recompute, or grpo.correction: none",
        )


@check("grpo.objective", "grpo.correction", "grpo.correction_level")
def _level_suits(config: RunConfig) -> Problems:
    grpo = config.grpo
    if grpo.correction == "icepop" and grpo.correction_level != "token":
        message, suggestion = "does not suit grpo.correction: icepop, which weights tokens", "use grpo.correction: mis"
    elif grpo.objective == "gspo" and grpo.correction != "none" and grpo.correction_level == "token":
        message = "does not suit grpo.objective: gspo: its ratio, and so its loss, is of whole sequences"
        suggestion = "set grpo.correction_level: sequence or geometric"
        if grpo.correction == "icepop":
            suggestion += ", and grpo.correction: mis"
    else:
        return
    yield problem("grpo.correction_level", grpo.correction_level, message, suggestion)


@check("grpo.objective", "grpo.clip_low", "grpo.clip_high")
def _sequences_are_clipped_closely(config: RunConfig) -> Problems:
    grpo = config.grpo
    name = max(("clip_low", "clip_high"), key=lambda name: float(getattr(grpo, name)))
    if grpo.objective == "gspo" and getattr(grpo, name) > _WIDE_FOR_SEQUENCES:
        yield problem(
            f"grpo.{name}",
            getattr(grpo, name),
            "would clip next to nothing with grpo.objective: gspo, whose ratio is a mean over a sequence's tokens",
            "GSPO takes clip_low 3e-4 and clip_high 4e-4: grpo.preset: gspo",
            severity="warning",
        )


@check("grpo.kl_coefficient", "grpo.kl_estimator", "grpo.kl_in")
def _estimator_has_a_gradient(config: RunConfig) -> Problems:
    grpo = config.grpo
    if grpo.kl_coefficient != 0 and (grpo.kl_estimator, grpo.kl_in) == ("k1", "loss"):
        yield problem(
            "grpo.kl_estimator",
            "k1",
            "does not bind the policy with grpo.kl_in: loss: its gradient is that of log pi, 0 in the mean",
            "use k2 or k3, or grpo.kl_in: reward",
            severity="warning",
        )


@check("grpo.kl_coefficient", "grpo.kl_in", "grpo.zero_variance")
def _equal_rewards_differ_by_their_kl(config: RunConfig) -> Problems:
    grpo = config.grpo
    if grpo.kl_coefficient != 0 and grpo.kl_in == "reward" and grpo.zero_variance != "keep":
        yield problem(
            "grpo.zero_variance",
            grpo.zero_variance,
            "would drop groups whose rewards are equal, which differ by the KL that grpo.kl_in: reward takes off",
            "set grpo.zero_variance: keep, or grpo.kl_in: loss",
        )
