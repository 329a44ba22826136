"""Tries a run's environment: loads it in a worker as the run will, or asks its server; takes a turn of an episode."""

import asyncio
from collections.abc import Callable, Iterator

from coordinator.environments.conversations import host_of, unfit
from coordinator.environments.pool import EpisodeFailed, row_of
from coordinator.environments.remote import EpisodeHost
from coordinator.workers.episodes.replies import AssistantTurn
from launcher.check.data.rows import CheckedData
from launcher.check.trial import MOST_S
from servicekit.errors import PermissionDenied, Unauthenticated
from tandem_clients.formatting import EpisodeTools, PromptText
from tandem_clients.probing import NotServing
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.environment import EnvironmentSection
from tandem_files.rows.reading import Row

_EMPTY = AssistantTurn(text="", message={"role": "assistant", "content": "", "tool_calls": []})

# A server that is started with the run may not serve yet: its start is not waited for.
_REACH_S = 3.0


def load_environment(config: RunConfig, usable: Callable[..., bool]) -> tuple[EpisodeTools | None, list[ConfigProblem]]:
    """Load the environment or the tools. Returns: what prompts must say of them, None: there are none; problems.

    Args:
        usable: whether all of the given keys have valid values.
    """
    section = config.environment
    if section is None or not usable("environment"):
        return None, []
    try:
        found = asyncio.run(_loaded(section))
    except NotServing as error:
        advice = f"start it by then: the run waits for start_timeout_s = {section.start_timeout_s:g} s"
        return None, [problem(*_named(section), f"cannot be tried now: {error.why}", advice, severity="warning")]
    except ValueError as error:
        # Only the run has its token and its certificate.
        refused = isinstance(error.__cause__, Unauthenticated | PermissionDenied)
        return None, [problem(*_named(section), str(error), severity="warning" if refused else "error")]
    why = unfit(config, found.schemas)
    return found, [problem(*_named(section), why)] if why and section.address else []


def _host(section: EnvironmentSection) -> EpisodeHost:
    if section.address is not None:
        section = section.model_copy(update={"start_timeout_s": min(section.start_timeout_s, _REACH_S)})
    return host_of(section.model_copy(update={"workers": 1}), run_id="tandem check", output=False)


async def _loaded(section: EnvironmentSection) -> EpisodeTools:
    pool = _host(section)
    await pool.start()
    try:
        return EpisodeTools(schemas=pool.tools)
    finally:
        await pool.close()


def _named(section: EnvironmentSection) -> tuple[str, str]:
    """Return key and value of what is loaded."""
    if section.address is not None:
        return "environment.address", section.address
    if section.function is None:
        return "environment.tools", ", ".join(section.tools)
    return "environment.function", section.function


def check_environment(config: RunConfig, data: CheckedData) -> Iterator[ConfigProblem]:
    """Take a turn without a text on the first row, if there is one, of an environment that can be loaded.

    What it raises there is a warning: it may refuse such a turn, or need what only the run has.
    """
    section = config.environment
    if section is None or data.episodes is None:
        return
    key, value = _named(section)
    try:
        failed = asyncio.run(_failure(section, data.first))
    except ValueError as error:
        yield problem(key, value, str(error))
        return
    if failed is not None and failed.kind == "bad_reply":
        yield problem(key, value, f"tried on {failed}")
    elif failed is not None:
        advice = "correct it, if it should take an empty turn"
        yield problem(key, value, f"tried on {failed}", advice, severity="warning")


async def _failure(section: EnvironmentSection, first: tuple[Row, PromptText] | None) -> EpisodeFailed | None:
    """Return why an episode fails; None: it does not, or there is no row. Raises: ValueError: it cannot be used."""
    pool = _host(section)
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
