"""Checks of the reward."""

import re

from tandem_config.checks.registry import Find, check
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RewardSection, RunConfig


@check("reward.kind", "reward.pattern")
def _regex_needs_pattern(config: RunConfig) -> ConfigProblem | None:
    if config.reward.kind != "regex":
        return None
    if config.reward.pattern is None:
        return ConfigProblem(
            key="reward.pattern",
            value="null",
            message="reward.kind: regex needs a pattern",
            suggestion="e.g. pattern: 'answer is (\\d+)'; group 1 is compared with the answer",
        )
    try:
        re.compile(config.reward.pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return ConfigProblem(
            key="reward.pattern",
            value=config.reward.pattern,
            message=f"is not a regular expression: {error}",
            suggestion="in YAML, put the pattern in single quotes",
        )
    return None


# Settings of the reward -> the kinds that read them.
_REWARD_SETTINGS = {
    "pattern": ("regex",),
    "find_answer": ("math_verify",),
    "timeout_s": ("regex", "math_verify"),
    "workers": ("regex", "math_verify"),
}


def _unread_reward_setting(name: str) -> Find:
    def find(config: RunConfig) -> ConfigProblem | None:
        value, default = getattr(config.reward, name), RewardSection.model_fields[name].default
        kinds = _REWARD_SETTINGS[name]
        if config.reward.kind in kinds or value == default:
            return None
        return ConfigProblem(
            key=f"reward.{name}",
            value=str(value),
            message=f"does nothing with reward.kind: {config.reward.kind}",
            suggestion=f"set reward.kind: {' or '.join(kinds)}, or leave reward.{name} out",
            severity="warning",
        )

    return find


for _name in _REWARD_SETTINGS:
    check("reward.kind", f"reward.{_name}")(_unread_reward_setting(_name))
