"""Checks of the data and what is measured on them."""

import re

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import ExactMatchReward, FormatReward, LengthReward, MathVerifyReward, RegexReward
from tandem_config.sections.rewards.base import RewardSection
from tandem_config.sections.run import HELDOUT

# Their scores are 0 to 1; those of others have any sign and scale.
_SHARES = (ExactMatchReward, FormatReward, LengthReward, MathVerifyReward, RegexReward)


@check("run.target_accuracy", "data.heldout", "evaluation.sets")
def _target_needs_heldout(config: RunConfig) -> Problems:
    if config.run.target_accuracy is not None and HELDOUT not in [one.name for one in config.evaluation_sets()]:
        yield problem(
            "run.target_accuracy",
            config.run.target_accuracy,
            f"needs data.heldout, or a set in evaluation.sets that is called {HELDOUT}: without it no accuracy is "
            "measured and the run would never stop early",
            "set data.heldout, or run.target_accuracy: null",
        )


@check("run.target_accuracy", "reward")
def _target_is_a_score(config: RunConfig) -> Problems:
    target, reward = config.run.target_accuracy, max(config.reward, key=lambda reward: reward.accuracy)
    if target is not None and not 0 <= target <= 1 and isinstance(reward, _SHARES):
        yield problem(
            "run.target_accuracy",
            f"{target:g}",
            f"is no mean score of reward {reward.label}, which gives 0 to 1: it must be at least 0 and at most 1",
            "0.9 for nine right answers of ten",
        )


@check("data.train", "data.heldout")
def _heldout_is_other_data(config: RunConfig) -> Problems:
    trained = {source.path for source in config.data.train}
    both = [source.path for source in config.data.heldout or () if source.path in trained]
    if both:
        yield problem(
            "data.heldout",
            both[0],
            "is a training file, so the held-out accuracy will measure memorization",
            "use rows that are not trained on",
            severity="warning",
        )


@check("data.heldout")
def _heldout_has_no_weights(config: RunConfig) -> Problems:
    weighted = [source for source in config.data.heldout or () if source.weight is not None]
    if weighted:
        yield problem(
            "data.heldout",
            weighted[0].path,
            f"has weight {weighted[0].weight}: every held-out row is scored once, whatever its weight",
            "leave the weight out",
        )


@check("data.answer_key", "data.train", "data.heldout", "reward")
def _a_reward_needs_answers(config: RunConfig) -> Problems:
    sources = [*config.data.train, *(config.data.heldout or ())]
    has_answers = config.data.answer_key is not None or all(source.answer_key is not None for source in sources)
    needing = [section.label for section in config.reward if _compares(section)]
    if needing and not has_answers:
        yield problem(
            "data.answer_key",
            "null",
            f"reward {needing[0]} compares completions with answers, and rows have none",
            "name the column of the answers",
        )


def _compares(section: RewardSection) -> bool:
    """Whether a reward cannot score without an answer."""
    if isinstance(section, RegexReward):
        return re.compile(section.pattern).groups > 0
    return isinstance(section, ExactMatchReward | MathVerifyReward)


@check("data.prompt_as", "data.chat_template")
def _a_user_message_needs_a_template(config: RunConfig) -> Problems:
    if config.data.prompt_as != "text" and config.data.chat_template == "none":
        yield problem(
            "data.prompt_as",
            config.data.prompt_as,
            "a message is rendered with a chat template, and data.chat_template is none",
            "set data.chat_template: auto, or data.prompt_as: text",
        )


@check("data.chat_template", "data.system_prompt", "data.system_key", "data.tools_key", "data.chat_template_kwargs")
def _what_a_template_takes_needs_one(config: RunConfig) -> Problems:
    data = config.data
    given = [key for key in ("system_prompt", "system_key", "tools_key", "chat_template_kwargs") if getattr(data, key)]
    if given and data.chat_template == "none":
        yield problem(
            f"data.{given[0]}",
            getattr(data, given[0]),
            "is given to a chat template, and data.chat_template is none",
            "set data.chat_template: auto, or leave it out",
        )
