"""Between the turns of a completion: reads what the policy has sampled, asks its environment, and renders the answer.

What was sampled is kept as it is. What the environment says is put behind it, as the chat template's own text, which
the policy reads and which is not trained on. Where the next turn must not read what was said so far, a branch begins
(tree.py).
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import xxhash

from coordinator.environments.pool import EnvironmentPool, EpisodeFailed, row_of
from coordinator.environments.remote import EpisodeHost, OpenEpisode, RemoteEnvironment
from coordinator.environments.slot import LIMIT
from coordinator.environments.tree import Tree
from coordinator.watch import metrics
from coordinator.workers.episodes.replies import AssistantTurn, Message
from servicekit.errors import ConfigError
from servicekit.lifecycle.tasks import first_of
from servicekit.logs import get_logger
from servicekit.security.tls import Identity
from tandem_clients.flow import Completion, Prompt
from tandem_clients.formatting import EpisodeTools, PromptFormat
from tandem_clients.sample_stream import OpenGroup
from tandem_clients.transcript import Transcript
from tandem_config.schema import RunConfig
from tandem_config.sections.environment import EnvironmentSection
from tandem_config.sections.reward import EnvironmentReward
from tandem_files.chat.renderer import TemplateRenderer
from tandem_files.chat.template import TemplateFailure

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Environments:
    """The environment of a run, or its tools.

    Attributes:
        pool: started.
        renderer: of the prompts' template.
        max_new_tokens: of a completion, answers included.
        max_prompt_tokens: of a prompt, with what the environment says first.
        seed: of the run; the completions of a group begin alike.
    """

    pool: EpisodeHost
    section: EnvironmentSection
    renderer: TemplateRenderer
    max_new_tokens: int
    max_prompt_tokens: int
    seed: int

    async def opened(self, prompts: Mapping[str, Prompt]) -> dict[str, Prompt]:
        """Put what the environment says first behind prompts, by group id; those that have it stay as they are.

        One whose environment fails stays as it is too: its episodes will fail by name.
        """
        if self.pool.tools is not None:
            return dict(prompts)
        opened = await asyncio.gather(*(self._opened(name, prompt) for name, prompt in prompts.items()))
        return dict(zip(prompts, opened, strict=True))

    def conversations(self) -> "Conversations":
        """Return the environments of a dispatch."""
        return Conversations(self)

    async def begin(self, group_id: str, prompt: Prompt, key: str) -> tuple[OpenEpisode, Sequence[Message]]:
        """Begin an episode; every one of a group begins alike. Raises: EpisodeFailed."""
        own = list(prompt.messages or ())[: len(prompt.messages or ()) - len(prompt.opening or ())]
        row = row_of(prompt=prompt.text, messages=own, answer=prompt.answer, columns=prompt.columns)
        seed = xxhash.xxh3_64_intdigest(f"{self.seed}/{group_id}".encode()) >> 33  # NumPy takes 32 bits
        return await self.pool.open(row, seed, key)

    async def _opened(self, group_id: str, prompt: Prompt) -> Prompt:
        if prompt.opening is not None:
            return prompt
        try:
            episode, opening = await self.begin(group_id, prompt, group_id)
            await episode.close()
            messages = [*map(dict, prompt.messages or ()), *opening]
            token_ids = self.renderer.render(messages) if opening else prompt.token_ids
        except (EpisodeFailed, TemplateFailure) as error:
            log.warning("environment: cannot begin", group=group_id, error=str(error))
            return prompt
        if len(token_ids) > self.max_prompt_tokens:
            log.warning("environment: what it says first is too long", group=group_id, prompt_tokens=len(token_ids))
            return prompt
        return replace(prompt, messages=messages, opening=tuple(opening), token_ids=array("I", token_ids))


def environments_of(config: RunConfig, pool: EpisodeHost | None, formats: PromptFormat) -> Environments | None:
    """Connect the environment of a configuration, which is started, with the prompts' template.

    Returns: None: there is no environment. Raises: ConfigError: the template cannot continue conversations.
    """
    if pool is None or config.environment is None:
        return None
    try:
        renderer = formats.renderer()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return Environments(
        pool=pool,
        section=config.environment,
        renderer=renderer,
        max_new_tokens=config.grpo.max_new_tokens,
        max_prompt_tokens=config.data.max_prompt_tokens,
        seed=config.run.seed,
    )


@asynccontextmanager
async def started_environment(
    config: RunConfig, run_id: str, identity: Identity | None, stop: asyncio.Event | None = None
) -> AsyncIterator[EpisodeHost | None]:
    """Run the worker processes of a configuration's environment, or connect to its server, if it has one.

    Args:
        identity: of this process, for mutual TLS with a server; None: no TLS.
        stop: once it is set, the start is not waited for: the run ends before an episode begins.
    Raises: ConfigError: it cannot work.
    """
    if config.environment is None:
        yield None
        return
    pool = host_of(config.environment, run_id=run_id, identity=identity)
    try:
        first = await first_of({"started": pool.start()} | ({} if stop is None else {"stop": stop}))
    except ValueError as error:
        raise ConfigError(f"environment: {error}") from error
    try:
        if first.name == "started" and (why := unfit(config, pool.tools)):
            raise ConfigError(f"environment: {why}")
        yield pool
    finally:
        await pool.close()


def host_of(
    section: EnvironmentSection, *, run_id: str, identity: Identity | None = None, output: bool = True
) -> EpisodeHost:
    """Make what holds the episodes of an environment; arguments as for RemoteEnvironment and EnvironmentPool."""
    if section.address is not None:
        return RemoteEnvironment(section, run_id=run_id, identity=identity)
    return EnvironmentPool(section, output=output)


def unfit(config: RunConfig, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """Return why a run cannot have these tools, which only a server may be the first to say; "": it can."""
    of_episodes = any(isinstance(reward, EnvironmentReward) for reward in config.reward)
    return "the reward environment needs a class: tools give no reward" if of_episodes and tools is not None else ""


def tools_of(pool: EpisodeHost | None) -> EpisodeTools | None:
    """Return what prompts must say of an environment; None: there is none."""
    return None if pool is None else EpisodeTools(schemas=pool.tools)


class Conversations:
    """The episodes of a dispatch, by sample."""

    def __init__(self, environments: Environments) -> None:
        self._environments = environments
        self._open: dict[str, _Conversation] = {}

    async def answer(self, group: OpenGroup, index: int) -> "array[int]":
        """As generate.turns.Answering."""
        name = group.sample_id(index)
        if name not in self._open:
            now_s = asyncio.get_running_loop().time()
            due_s = now_s + self._environments.section.episode_timeout_s
            self._open[name] = _Conversation(environments=self._environments, group=group, name=name, due_s=due_s)
        conversation, completion = self._open[name], group.found[index]
        context = await conversation.answer(completion)
        if not context:
            del self._open[name]
            await conversation.close()
        return context

    async def close(self) -> None:
        """Close the episodes that are left."""
        left, self._open = self._open, {}
        await asyncio.gather(*(conversation.close() for conversation in left.values()))


@dataclass(kw_only=True)
class _Conversation:
    """One episode.

    Attributes:
        due_s: the loop's time at which it ends.
        begin: the first token of the turn that is sampled.
        behind: what was put before it; None: it is the first.
    """

    environments: Environments
    group: OpenGroup
    name: str
    due_s: float
    begin: int = 0
    behind: "array[int] | None" = None
    episode: OpenEpisode | None = None
    transcript: Transcript = field(default_factory=Transcript)
    tree: Tree = field(init=False)

    def __post_init__(self) -> None:
        keeps = self.environments.section.history == "keep"
        self.tree = Tree(self.environments.renderer, self.group.prompt, keeps=keeps)

    async def answer(self, completion: Completion) -> "array[int]":
        """Answer the last turn. Returns: ids that follow; none: the episode has ended."""
        completion.transcript = said = self.transcript
        failure = ""
        context: array[int] = array("I")
        try:
            async with asyncio.timeout_at(self.due_s) as limit:
                LIMIT.set(limit)
                context, said.end = await self._answer(completion)
            self.due_s = limit.when() or self.due_s
        except TimeoutError:
            said.end = "timeout"
        except (EpisodeFailed, TemplateFailure) as error:
            said.end, said.error = "failed", str(error)
            failure = error.kind if isinstance(error, EpisodeFailed) else "template"
        LIMIT.set(None)
        if said.end:
            metrics.observe_episode(said, failure)
        completion.truncated = said.end in ("timeout", "max_turns", "max_tokens")
        return array("I") if said.end else context

    async def close(self) -> None:
        """Close the environment."""
        episode, self.episode = self.episode, None
        if episode is not None:
            metrics.EPISODES_OPEN.dec()
            await episode.close()

    async def _answer(self, completion: Completion) -> tuple["array[int]", str]:
        """Return what follows, and why the episode ends; "": it does not. Raises: EpisodeFailed, TemplateFailure."""
        own, said = self.environments, self.transcript
        sampled = completion.token_ids[self.begin :]
        turn = own.renderer.parse(sampled, self.behind)
        self.tree.add(turn, completion)
        message = turn.message(own.renderer.thought_key)
        said.messages.append(message)
        episode = self.episode or await self._begun()
        given: dict[str, Any] = {
            "text": own.renderer.codec.decode([sampled])[0],
            "message": {"role": "assistant", "content": "", "tool_calls": [], **message},
            "tool_calls": message.get("tool_calls", ()),
            "reasoning": turn.reasoning or "",
            "truncated": completion.truncated,
            "index": len(said.rewards),
        }
        with metrics.ENVIRONMENT_STEP_SECONDS.time():
            reply = await episode.step(AssistantTurn(**given))
        said.rewards.append(reply.reward)
        if not isfinite(said.reward or 0.0):
            raise EpisodeFailed(self.name, "bad_reply", f"the rewards of its turns add up to {said.reward}")
        if unknown := own.renderer.codec.unknown(reply.token_ids):
            text = f"step returned the token id {unknown[0]}, for which the tokenizer has no token"
            raise EpisodeFailed(self.name, "bad_reply", text)
        if reply.done:
            return array("I"), "max_tokens" if completion.truncated else "done"
        if completion.truncated or len(said.rewards) >= own.section.max_turns:
            return array("I"), "max_tokens" if completion.truncated else "max_turns"
        follow = self.tree.follow(reply, completion)
        said.messages += follow.messages
        if follow.num_before + len(follow.token_ids) >= len(self.group.prompt.token_ids) + own.max_new_tokens:
            return array("I"), "max_tokens"
        if follow.begins:
            completion.branches += (len(completion.token_ids),)
        self.begin = len(completion.token_ids) + len(follow.token_ids)
        self.behind = follow.token_ids
        return follow.token_ids, ""

    async def _begun(self) -> OpenEpisode:
        prompt = self.group.prompt
        self.episode, opening = await self.environments.begin(self.group.group_id, prompt, self.name)
        metrics.EPISODES_OPEN.inc()
        if list(opening) != list(prompt.opening or ()):
            text = "reset does not return the messages that it returned for the prompt, or these are too many tokens"
            raise EpisodeFailed(self.name, "not_repeatable", text)
        return self.episode
