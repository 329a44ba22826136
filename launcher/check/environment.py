"""Tries a run's environment: loads it in a worker as the run will, or asks its server; takes a turn of an episode."""

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence

from coordinator.environments.conversations import host_of, unfit
from coordinator.environments.pool import EpisodeFailed, TurnReply, row_of
from coordinator.environments.remote import EpisodeHost
from coordinator.environments.tree import Tree
from coordinator.workers.episodes.replies import AssistantTurn
from launcher.check.data.lengths import LIMITS, check_limits
from launcher.check.data.rows import CheckedData
from launcher.check.trial import MOST_S
from servicekit.errors import PermissionDenied, Unauthenticated
from tandem_clients.flow import Completion, Prompt
from tandem_clients.formatting import EpisodeTools
from tandem_clients.probing import NotServing
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.environment import EnvironmentSection
from tandem_files.chat.renderer import TemplateRenderer
from tandem_files.chat.template import TemplateFailure
from tandem_files.rows.messages import Message
from weightsync.model.spec import ModelSpec

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


def check_environment(
    config: RunConfig, usable: Callable[..., bool], spec: ModelSpec | None, data: CheckedData
) -> Iterator[ConfigProblem]:
    """Take a turn without a text on the first row, if there is one, of an environment that can be loaded.

    What it raises there is a warning: it may refuse such a turn, or need what only the run has. What it says must fit
    into prompts and completions as the run renders them.

    Args:
        usable: whether all of the given keys have valid values.
        spec: the model, for its position limit; None: not checked.
    """
    section = config.environment
    if section is None or data.episodes is None:
        return
    try:
        yield from asyncio.run(_tried(config, section, usable, spec, data))
    except ValueError as error:
        yield problem(*_named(section), str(error))


async def _tried(
    config: RunConfig,
    section: EnvironmentSection,
    usable: Callable[..., bool],
    spec: ModelSpec | None,
    data: CheckedData,
) -> list[ConfigProblem]:
    """Return what is wrong with an episode. Raises: ValueError: the environment cannot be used."""
    named, first = _named(section), data.first
    pool = _host(section)
    await pool.start()
    try:
        if first is None:
            return []
        row, prompt = first
        where, advice = f"{row.file}:{row.number}", "no episode begins, unless it has in the run what it lacks here"
        try:
            async with asyncio.timeout(MOST_S):
                given = row_of(prompt=prompt.text, messages=prompt.messages, answer=row.answer, columns=row.columns)
                episode, opening = await pool.open(given, 0, where)
                where, advice = f"{where}, with an empty turn", "correct it, if it should take an empty turn"
                try:
                    reply = await episode.step(_EMPTY)
                finally:
                    await episode.close()
        except TimeoutError:
            why = f"tried on {where}: no reply after {MOST_S:g} s; its turn_timeout_s was not waited for"
            return [problem(*named, why, advice, severity="warning")]
        except EpisodeFailed as failed:
            if failed.kind == "bad_reply":
                return [problem(*named, f"tried on {where}: {failed.text}")]
            return [problem(*named, f"tried on {where}: {failed.text}", advice, severity="warning")]
    finally:
        await pool.close()
    if data.formats is None or not usable(*LIMITS):
        return []
    try:
        renderer = data.formats.renderer()
    except ValueError:  # check_turns says why
        return []
    try:
        lengths = _too_long(config, renderer, spec, prompt.messages or [], opening, f"{row.file}:{row.number}")
        return [*lengths, *_unfit_reply(config, renderer, [*(prompt.messages or ()), *opening], reply, where)]
    except TemplateFailure as error:
        return [problem(*named, f"tried on {where}: {error}", "such an episode fails", severity="warning")]


def _too_long(
    config: RunConfig,
    renderer: TemplateRenderer,
    spec: ModelSpec | None,
    own: Sequence[Message],
    opening: Sequence[Message],
    where: str,
) -> Iterator[ConfigProblem]:
    """Yield limits that a row keeps alone, and not with what the environment says first. Raises: TemplateFailure."""
    alone, begun = (len(renderer.render(messages)) for messages in (own, [*own, *opening]))
    if begun > config.data.max_prompt_tokens:
        why = f"with what the environment says first, the prompt of {where} has {begun} tokens"
        advice = "such an episode fails: raise it to what the longest one has"
        yield problem("data.max_prompt_tokens", config.data.max_prompt_tokens, why, advice)
    elif not [*check_limits(config, spec, alone)]:
        yield from check_limits(config, spec, begun)


def _unfit_reply(
    config: RunConfig, renderer: TemplateRenderer, messages: list[Message], reply: TurnReply, where: str
) -> Iterator[ConfigProblem]:
    """Yield what a run could not use of the reply to an empty turn. Raises: TemplateFailure: the template refuses it.

    Args:
        messages: before the turn.
    """
    assert config.environment is not None
    named, most = _named(config.environment), config.grpo.max_new_tokens
    begun, ended = array("I", renderer.render(messages)), array("I", renderer.codec.stop_token_ids[:1])
    if unknown := renderer.codec.unknown(reply.token_ids):
        yield problem(*named, f"tried on {where}: step returned the token id {unknown[0]}, which the tokenizer lacks")
    elif not reply.done:
        completion = Completion(token_ids=ended, logprobs=array("f", [0.0]), truncated=False, oldest_version=0)
        prompt = Prompt(row=1, token_ids=begun, answer="", messages=messages)
        tree = Tree(renderer, prompt, keeps=config.environment.history == "keep")
        tree.add(renderer.parse(ended), completion)
        follow = tree.follow(reply, completion)
        if follow.num_before + len(follow.token_ids) >= len(begun) + most:
            why = f"what follows a turn has {len(follow.token_ids)} tokens ({where}): no turn after it has room"
            yield problem("grpo.max_new_tokens", most, why, "it holds all turns of an episode", severity="warning")
