"""Checks of the evaluations."""

from collections import Counter

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig
from tandem_config.sections.base import LOWEST_TEMPERATURE


@check("evaluation.sets", "data.heldout")
def _sets_have_different_names(config: RunConfig) -> Problems:
    twice = [name for name, count in Counter(chosen.name for chosen in config.evaluation_sets()).items() if count > 1]
    if twice:
        heldout = twice[0] == "heldout" and config.data.heldout is not None
        yield problem(
            "evaluation.sets",
            twice[0],
            "is the name of two sets" + (", of which data.heldout makes one" if heldout else ""),
            "set data.heldout: null, or choose another name" if heldout else "choose another name for one",
        )


@check("evaluation.sets")
def _no_set_is_called_train(config: RunConfig) -> Problems:
    if "train" in [chosen.name for chosen in config.evaluation.sets]:
        yield problem("evaluation.sets", "train", "is the name of the training samples", "choose another name")


@check("evaluation.sets")
def _sets_can_be_sampled(config: RunConfig) -> Problems:
    for number, chosen in enumerate(config.evaluation.sets, 1):
        for is_wrong, message, suggestion in (
            (
                chosen.samples > 1 and chosen.temperature == 0.0,
                f"samples: {chosen.samples} with temperature 0: all completions would be equal",
                "set a temperature, e.g. 1.0, or samples: 1",
            ),
            (
                0.0 < chosen.temperature < LOWEST_TEMPERATURE,
                f"temperature {chosen.temperature:g} is below {LOWEST_TEMPERATURE:g}, the lowest that replicas take",
                f"use 0 (greedy), or {LOWEST_TEMPERATURE:g} and more",
            ),
            (chosen.top_k == 0, "top_k: 0 keeps no token", "use -1 for all tokens"),
        ):
            if is_wrong:
                yield problem("evaluation.sets", chosen.name, f"entry {number}: {message}", suggestion)
                return


@check("evaluation.best", "evaluation.sets", "data.heldout")
def _best_is_measured(config: RunConfig) -> Problems:
    measured = [f"{chosen.name}/{metric}" for chosen in config.evaluation_sets() for metric in chosen.metrics()]
    if config.evaluation.best not in (None, *measured):
        yield problem(
            "evaluation.best",
            config.evaluation.best,
            "is not measured",
            f"measured are {', '.join(measured)}" if measured else "set data.heldout, or evaluation.sets",
        )


@check("grpo.max_new_tokens", "evaluation.sets", "rollout.context_length", "rollout.max_total_tokens")
def _completions_of_sets_fit(config: RunConfig) -> Problems:
    limits = {
        "rollout.context_length": config.rollout.context_length,
        "rollout.max_total_tokens": config.rollout.max_total_tokens,
    }
    for number, chosen in enumerate(config.evaluation.sets, 1):
        for key, limit in limits.items():
            if limit is not None and chosen.max_new_tokens is not None and chosen.max_new_tokens >= limit:
                yield problem(
                    "evaluation.sets",
                    chosen.name,
                    f"entry {number}: max_new_tokens {chosen.max_new_tokens} leaves no room for a prompt in "
                    f"{key} ({limit})",
                    f"raise {key} or lower max_new_tokens",
                )
                return
