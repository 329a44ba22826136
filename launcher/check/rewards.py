"""Checks that the rewards can work: what they need is installed or set, and a user's own function can be called."""

import asyncio
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from coordinator.rewards.base import TakenColumns
from coordinator.rewards.servers.judge import columns_in
from coordinator.rewards.taken import columns_of, rows_without
from launcher.check.data.columns import unused_columns, unused_line
from launcher.check.data.rows import CheckedData
from launcher.check.patterns import check_patterns
from launcher.check.trial import Trial, TrialResult
from tandem_config.checks.reward import entry_key
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import FormatReward, FunctionReward, MathVerifyReward, RegexReward
from tandem_config.sections.rewards.base import RewardSection
from tandem_config.sections.rewards.servers import JudgeReward, RemoteReward


def check_rewards(config: RunConfig, usable: Callable[..., bool], data: CheckedData) -> Iterator[ConfigProblem]:
    """Import every own function in a worker process, as the run will; compare it with the data, and call it once.

    Args:
        usable: whether all of the given keys have valid values.
        data: the rows; without any, they are not compared and nothing is called.
    """
    columns = columns_of(scan for scans in data.scans.values() for scan in scans) or None
    first = data.first if usable("grpo.group_size") else None
    decoding = decoding_of(config) if usable("grpo.stop_token_ids", "rollout.skip_special_tokens") else {}
    trial = (
        None
        if first is None
        else Trial(
            *first,
            codec=data.codec,
            group_size=config.grpo.group_size,
            decoding=decoding,
            alone=len(config.reward) == 1,
        )
    )
    tried = try_functions(config, usable, columns, trial)
    yield from _without_data(config, usable, tried)
    yield from check_patterns(config, usable, data.ends)
    scans = [scan for of_key in data.scans.values() for scan in of_key]
    reset_gets_all = data.episodes is not None and data.episodes.schemas is None
    if not reset_gets_all and not any(found.error for found in tried.values()):
        taken = [takes_of(section, tried.get(place)) for place, section in enumerate(config.reward)]
        data.notes += unused_line(unused_columns(scans, None if data.first is None else data.first[0], taken))
    if data.codec is not None and decoding:
        yield from _left_out_of_texts(config, usable, data.codec.left_out(**decoding))
    takers = [(config.reward[place].label, found.takes) for place, found in tried.items()]
    for key, scans in data.scans.items():
        yield from (problem(key, found.place, found.text) for found in rows_without(scans, takers))


def takes_of(section: RewardSection, tried: TrialResult | None) -> TakenColumns:
    """Return the columns that a reward takes; a server's that it may."""
    if isinstance(section, JudgeReward):
        return columns_in(section.prompt)
    return TakenColumns(everything=isinstance(section, RemoteReward)) if tried is None else tried.takes


def decoding_of(config: RunConfig) -> dict[str, Any]:
    """Return how completions are decoded for rewards: arguments of TextCodec.decode."""
    return {
        "stop_ids": config.grpo.stop_token_ids,
        "skip_special_tokens": config.rollout.skip_special_tokens,
    }


def _left_out_of_texts(
    config: RunConfig, usable: Callable[..., bool], left_out: Sequence[str]
) -> Iterator[ConfigProblem]:
    """Warn of patterns with tokens that no reward sees."""
    for place, section in enumerate(config.reward):
        key = entry_key(config, place)
        if not usable(key) or not isinstance(section, RegexReward | FormatReward):
            continue
        text = section.pattern.replace("\\", "")
        names = [name for name in left_out if name in text]
        if names:
            skipped = config.rollout.skip_special_tokens
            yield problem(
                f"{key}.pattern",
                section.pattern,
                f"holds the special token {names[0]!r}, which is removed from the texts that rewards get",
                "leave rollout.skip_special_tokens out" if skipped else "leave the token out of the pattern",
                severity="warning",
            )


def check_imports(config: RunConfig, usable: Callable[..., bool], columns: Sequence[str]) -> Iterator[ConfigProblem]:
    """Import every own function, and compare it with the columns of a row, before there is a configuration."""
    yield from _without_data(config, usable, try_functions(config, usable, columns, None))


def try_functions(
    config: RunConfig, usable: Callable[..., bool], columns: Sequence[str] | None, trial: Trial | None
) -> Mapping[int, TrialResult]:
    """Try all own functions at the same time. Returns: what was found, by the reward's place."""
    sections = {
        place: section
        for place, section in enumerate(config.reward)
        if isinstance(section, FunctionReward) and usable(entry_key(config, place))
    }

    async def try_all() -> list[TrialResult]:
        return await asyncio.gather(*(TrialResult.of(section, columns, trial) for section in sections.values()))

    return dict(zip(sections, asyncio.run(try_all()), strict=True)) if sections else {}


def _without_data(
    config: RunConfig, usable: Callable[..., bool], tried: Mapping[int, TrialResult]
) -> Iterator[ConfigProblem]:
    for place, section in enumerate(config.reward):
        key = entry_key(config, place)
        if not usable(key):
            continue
        if place in tried:
            yield from tried[place].problems(key)
        if isinstance(section, JudgeReward):
            yield from _check_key(section, key)
        if isinstance(section, MathVerifyReward) and importlib.util.find_spec("math_verify") is None:
            yield problem(
                f"{key}.kind", "math_verify", "the package math-verify is not installed", "pip install math-verify"
            )


def _check_key(section: JudgeReward, key: str) -> Iterator[ConfigProblem]:
    """Look for the variable that holds the endpoint's key; whether the endpoint takes it shows when the run starts."""
    name = section.api_key_env
    if name is not None and not os.environ.get(name, "").strip():
        yield problem(
            f"{key}.api_key_env",
            name,
            f"the environment variable {name}, which holds the key of {section.url}, is not set or empty",
            f"export {name}=..., or leave api_key_env out if the endpoint needs no key",
        )
