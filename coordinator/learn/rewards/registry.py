"""Rewards by their names in `reward.kind`."""

from collections.abc import Callable

from coordinator.learn.rewards.base import Reward, StoppedOnly
from coordinator.learn.rewards.exact_match import ExactMatch
from coordinator.learn.rewards.math_verify import MathVerify
from coordinator.learn.rewards.regex import RegexMatch
from tandem_config.schema import RewardSection


def _exact_match(section: RewardSection) -> Reward:
    return ExactMatch()


def _regex(section: RewardSection) -> Reward:
    if section.pattern is None:
        raise ValueError("reward.kind is 'regex', but reward.pattern is not set: give it a regular expression")
    return RegexMatch(pattern=section.pattern, num_workers=section.workers, timeout_s=section.timeout_s)


def _math_verify(section: RewardSection) -> Reward:
    return MathVerify(find=section.find_answer, num_workers=section.workers, timeout_s=section.timeout_s)


REWARDS: dict[str, Callable[[RewardSection], Reward]] = {
    "exact_match": _exact_match,
    "regex": _regex,
    "math_verify": _math_verify,
}


def build_reward(section: RewardSection) -> Reward:
    """Build the configured reward.

    Raises: ValueError: an unknown kind, or a setting that it needs is missing or malformed.
    """
    if section.kind not in REWARDS:
        raise ValueError(f"reward.kind {section.kind!r} is unknown; known are {', '.join(REWARDS)}")
    reward = REWARDS[section.kind](section)
    return StoppedOnly(reward) if section.require_stop else reward
