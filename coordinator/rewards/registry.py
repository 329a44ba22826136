"""Builds the rewards that the configuration names."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from coordinator.data.scan import Scan
from coordinator.rewards.base import Reward, StoppedOnly
from coordinator.rewards.episodes import EpisodeReward
from coordinator.rewards.exact_match import ExactMatch
from coordinator.rewards.function import OwnFunction
from coordinator.rewards.lengths import PerLength, length_score, overlong_score
from coordinator.rewards.servers.remote import RemoteScores
from coordinator.rewards.taken import columns_of, rows_without
from coordinator.rewards.work import WorkedReward
from coordinator.workers.tasks import FORMAT, MATH, REGEX
from servicekit.errors import in_part
from servicekit.lifecycle.tasks import cancel
from servicekit.security.tls import Identity
from tandem_config.checks.reward import entry_key
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import (
    EnvironmentReward,
    ExactMatchReward,
    FormatReward,
    FunctionReward,
    LengthReward,
    MathVerifyReward,
    OverlongReward,
    RegexReward,
)
from tandem_config.sections.rewards.base import FailureSection, RewardSection, StopSection
from tandem_config.sections.rewards.servers import JudgeReward, RemoteReward
from tandem_files.rows.problems import DataError

# Part of grpo.max_new_tokens over which `overlong` falls, as in DAPO: 4,096 of 20,480.
_CACHE_SHARE = 5
_WITHOUT_SETTINGS: Mapping[type[RewardSection], type[Reward]] = {
    ExactMatchReward: ExactMatch,
    EnvironmentReward: EpisodeReward,
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A reward of the run, and what its scores are used for.

    Attributes:
        key: its key in the configuration, for messages: `reward`, or `reward[1]` of several.
        name: its name in metrics.
        on_error: "zero", "drop" or "stop": what a completion gets that could not be scored.
        max_error_share: share of a batch's completions whose scoring may fail.
    """

    key: str
    name: str
    reward: Reward
    weight: float = 1.0
    is_accuracy: bool = False
    on_error: str = "stop"
    max_error_share: float = 0.0


def build_rewards(config: RunConfig, identity: Identity | None = None) -> list[Part]:
    """Build the configured rewards; nothing is started.

    Args:
        identity: of the coordinator, for servers of the run; None: no TLS.
    Raises: ValueError: a setting is malformed.
    """
    marked = [place for place, section in enumerate(config.reward) if section.accuracy]
    accuracy = marked[0] if marked else 0
    return [_part(config, place, identity, is_accuracy=place == accuracy) for place in range(len(config.reward))]


async def start_rewards(parts: Sequence[Part], scans: Sequence[Scan]) -> None:
    """Start all rewards at the same time, and compare what they take with the rows of the data.

    Args:
        scans: of all data that they will score.
    Raises: ValueError: one cannot work, by its key, or rows lack a column that it takes; all are closed then.
        Cancelled, it closes them too.
    """
    await start_with_columns(parts, columns_of(scans))
    problems = rows_without(scans, [(part.name, part.reward.takes) for part in parts])
    if problems:
        await close_rewards(parts)
        raise DataError(problems)


async def start_with_columns(parts: Sequence[Part], columns: Sequence[str]) -> None:
    """Start all rewards, for rows that have these columns. Raises: as start_rewards."""
    starting = [asyncio.create_task(_start(part, columns), name=f"reward {part.name}") for part in parts]
    try:
        await asyncio.gather(*starting)
    except BaseException:
        await cancel(*starting)
        await close_rewards(parts)
        raise


async def _start(part: Part, columns: Sequence[str]) -> None:
    try:
        with in_part(f"reward {part.name}"):
            await part.reward.start(columns)
    except ValueError as error:
        raise ValueError(f"{part.key}: {error}") from error


async def close_rewards(parts: Sequence[Part]) -> None:
    """Release the processes of all rewards."""
    await asyncio.gather(*(part.reward.close() for part in parts))


def _part(config: RunConfig, place: int, identity: Identity | None, *, is_accuracy: bool) -> Part:
    section = config.reward[place]
    reward = build_reward(section, max_new_tokens=config.grpo.max_new_tokens, identity=identity)
    part = Part(
        key=entry_key(config, place),
        name=section.label,
        reward=reward,
        weight=section.weight,
        is_accuracy=is_accuracy,
    )
    if not isinstance(section, FailureSection):
        return part
    return replace(part, on_error=section.on_error, max_error_share=section.max_error_share)


def build_reward(section: RewardSection, *, max_new_tokens: int, identity: Identity | None = None) -> Reward:
    """Build one reward.

    Args:
        max_new_tokens: grpo.max_new_tokens.
        identity: as for build_rewards.
    Raises: ValueError: a setting is malformed.
    """
    plain = _WITHOUT_SETTINGS.get(type(section))
    reward = _build(section, max_new_tokens, identity) if plain is None else plain()
    return StoppedOnly(reward) if isinstance(section, StopSection) and section.require_stop else reward


def _build(section: RewardSection, max_new_tokens: int, identity: Identity | None) -> Reward:
    match section:
        case RegexReward():
            return WorkedReward(REGEX, section, pattern=section.pattern)
        case FormatReward():
            return WorkedReward(FORMAT, section, pattern=section.pattern)
        case MathVerifyReward():
            return WorkedReward(MATH, section, find=section.find_answer)
        case LengthReward():
            return PerLength(partial(length_score, full=section.full_tokens, zero=section.zero_tokens))
        case OverlongReward():
            cache = section.cache_tokens or max(1, max_new_tokens // _CACHE_SHARE)
            return PerLength(partial(overlong_score, longest=max_new_tokens, cache=cache))
        case FunctionReward():
            return OwnFunction(section)
        case RemoteReward():
            return RemoteScores(section, identity)
        case JudgeReward():
            from coordinator.rewards.servers.judge import JudgedScores  # httpx and jinja2: 0.3 s

            return JudgedScores(section)
        case _:
            raise ValueError(f"reward.kind {section.label!r} cannot be built")
