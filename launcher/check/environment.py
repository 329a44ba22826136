"""Tries a run's environment: loads it in a worker as the run will, and takes one turn of an episode."""

import asyncio
from collections.abc import Callable, Iterator

from coordinator.environments.pool import EnvironmentPool, EpisodeFailed, row_of
from coordinator.workers.episodes.replies import AssistantTurn
from launcher.check.data.rows import CheckedData
from launcher.check.trial import MOST_S
from tandem_clients.formatting import PromptText
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.environment import EnvironmentSection
from tandem_files.rows.reading import Row

_EMPTY = AssistantTurn(text="", message={"role": "assistant", "content": "", "tool_calls": []})


def check_environment(config: RunConfig, usable: Callable[..., bool], data: CheckedData) -> Iterator[ConfigProblem]:
    """Load the environment or the tools; take a turn without a text on the first row, if there is one.

    What it raises there is a warning: it may refuse such a turn, or need what only the run has.

    Args:
        usable: whether all of the given keys have valid values.
    """
    section = config.environment
    if section is None or not usable("environment"):
        return
    key, value = ("tools", ", ".join(section.tools)) if section.function is None else ("function", section.function)
    try:
        failed = asyncio.run(_failure(section, data.first))
    except ValueError as error:
        yield problem(f"environment.{key}", value, str(error))
        return
    if failed is not None and failed.kind == "bad_reply":
        yield problem(f"environment.{key}", value, f"tried on {failed}")
    elif failed is not None:
        advice = "correct it, if it should take an empty turn"
        yield problem(f"environment.{key}", value, f"tried on {failed}", advice, severity="warning")


async def _failure(section: EnvironmentSection, first: tuple[Row, PromptText] | None) -> EpisodeFailed | None:
    """Return why an episode fails; None: it does not, or there is no row. Raises: ValueError: it cannot be used."""
    pool = EnvironmentPool(section.model_copy(update={"workers": 1}), output=False)
    await pool.start()
    try:
        if first is None:
            return None
        row, prompt = first
        key = f"{row.file}:{row.number}, with an empty turn"
        try:
            async with asyncio.timeout(MOST_S):
                given = row_of(prompt=prompt.text, messages=prompt.messages, answer=row.answer, columns=row.columns)
                episode, _ = await pool.open(given, 0, key)
                try:
                    await episode.step(_EMPTY)
                finally:
                    await episode.close()
        except TimeoutError:
            return EpisodeFailed(key, "late", f"no reply after {MOST_S:g} s; its turn_timeout_s was not waited for")
        except EpisodeFailed as failed:
            return failed
        return None
    finally:
        await pool.close()
