"""Checks that the rewards can work: what they need is installed or set, and a user's own function can be called."""

import asyncio
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence

from coordinator.learn.rewards.function import check_form, task_of
from coordinator.learn.rewards.workers.pool import RewardWorkers
from tandem_config.checks.reward import entry_key
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from tandem_config.sections.reward import FunctionReward, MathVerifyReward
from tandem_config.sections.rewards.servers import JudgeReward


def check_rewards(
    config: RunConfig, usable: Callable[..., bool], columns: Sequence[str] | None
) -> Iterator[ConfigProblem]:
    """Import every own function in a worker process, as the run will, and compare its parameters with the data.

    Args:
        usable: whether all of the given keys have valid values.
        columns: the columns of the data's rows; None: not known, so not compared.
    """
    for place, section in enumerate(config.reward):
        key = entry_key(config, place)
        if not usable(key):
            continue
        if isinstance(section, FunctionReward):
            yield from _check_function(section, columns, key)
        if isinstance(section, JudgeReward):
            yield from _check_key(section, key)
        if isinstance(section, MathVerifyReward) and importlib.util.find_spec("math_verify") is None:
            yield ConfigProblem(
                key=f"{key}.kind",
                value="math_verify",
                message="the package math-verify is not installed",
                suggestion="pip install math-verify",
            )


def _check_function(section: FunctionReward, columns: Sequence[str] | None, key: str) -> Iterator[ConfigProblem]:
    try:
        asyncio.run(_try(section, columns))
    except ValueError as error:
        yield ConfigProblem(key=f"{key}.function", value=section.function, message=str(error))


def _check_key(section: JudgeReward, key: str) -> Iterator[ConfigProblem]:
    """Look for the variable that holds the endpoint's key; whether the endpoint takes it shows when the run starts."""
    name = section.api_key_env
    if name is not None and not os.environ.get(name, "").strip():
        yield ConfigProblem(
            key=f"{key}.api_key_env",
            value=name,
            message=f"the environment variable {name}, which holds the key of {section.url}, is not set or empty",
            suggestion=f"export {name}=..., or leave api_key_env out if the endpoint needs no key",
        )


async def _try(section: FunctionReward, columns: Sequence[str] | None) -> None:
    workers = RewardWorkers(task_of(section, output=False), count=1)
    try:
        check_form(section, await workers.start(), columns)
    finally:
        await workers.close()
