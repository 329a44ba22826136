"""The tree of an episode: a node for each turn, which follows a node before it, or nothing that was said.

A completion holds it as branches, one behind the other. Each turn is trained in the one where it was sampled; what
later branches repeat of it is context. A branch begins where the chat template leaves out what was said
(environment.history), and where an environment replaces the conversation: another agent's, or a summary of its own.
"""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.environments.pool import TurnReply
from coordinator.workers.episodes.replies import Message
from tandem_clients.flow import Completion, Prompt
from tandem_files.chat.parsing import ParsedTurn
from tandem_files.chat.renderer import TemplateRenderer
from tandem_files.chat.template import TemplateFailure


@dataclass(frozen=True, kw_only=True)
class Follow:
    """What the next turn follows.

    Attributes:
        token_ids: behind the turn; of a new branch all.
        messages: those of them that nothing has said before.
        num_before: tokens before them in the branch; its prompt counts.
        begins: whether they begin a branch.
    """

    token_ids: "array[int]"
    messages: Sequence[Message]
    num_before: int = 0
    begins: bool = False


@dataclass(frozen=True, kw_only=True)
class _Node:
    """A turn.

    Attributes:
        said: its conversation, the turn included; texts of messages.
        text: of the same, as the template writes it; None: token ids of an environment are in it.
        begin, start, end: of its branch, of the turn, behind it: places in the completion.
    """

    turn: ParsedTurn
    said: Sequence[str]
    text: str | None
    begin: int
    start: int
    end: int


class Tree:
    """The turns of an episode.

    Args:
        keeps: whether nothing that was said is left out.
    """

    def __init__(self, renderer: TemplateRenderer, prompt: Prompt, *, keeps: bool) -> None:
        self._renderer, self._prompt, self._keeps = renderer, prompt, keeps
        self._nodes: list[_Node] = []
        # The conversation of the turn that is sampled, as messages, as their keys, and as the template writes it.
        self._messages: list[Message] = []
        self._said: list[str] = []
        self._text: str | None = None
        self._start = 0
        messages = [dict(message) for message in prompt.messages or ()]
        self._set(messages, [*map(_key, messages)])

    def add(self, turn: ParsedTurn, completion: Completion) -> None:
        """Note a turn, whose tokens are the last ones."""
        message = turn.message(self._renderer.thought_key)
        self._messages, self._said = [*self._messages, message], [*self._said, _key(message)]
        node = _Node(
            turn=turn,
            said=self._said,
            text=None if self._text is None else self._text + turn.raw,
            begin=completion.branches[-1] if completion.branches else 0,
            start=self._start,
            end=len(completion.token_ids),
        )
        self._nodes.append(node)

    def follow(self, reply: TurnReply, completion: Completion) -> Follow:
        """Return what the turn after the last one follows. Raises: TemplateFailure: the template refuses it."""
        node = self._nodes[-1]
        if reply.token_ids:
            found = self._given(completion, node, array("I", reply.token_ids))
        elif reply.conversation:
            found = self._replaced(completion, [*reply.conversation])
        else:
            found = self._continued(completion, node, self._messages, [*reply.messages])
        self._start = len(completion.token_ids) + len(found.token_ids)
        return found

    def _given(self, completion: Completion, node: _Node, token_ids: "array[int]") -> Follow:
        """Return ids as they are; from here on nothing is compared with what the template would write."""
        (text,) = self._renderer.codec.decode_all([token_ids])
        self._said, self._text = [*self._said, repr(token_ids)], None
        return self._behind(completion, node, token_ids, [{"role": "environment", "content": text}])

    def _replaced(self, completion: Completion, conversation: list[Message]) -> Follow:
        """Return a conversation: behind the longest one that it begins with, or else all of it."""
        said = [*map(_key, conversation)]
        last = max((place for place, one in enumerate(conversation) if one["role"] == "assistant"), default=-1)
        node = next((node for node in reversed(self._nodes) if node.said == said[: last + 1]), None)
        if node is not None:
            return self._continued(completion, node, conversation[: last + 1], conversation[last + 1 :])
        self._set(conversation, said)
        token_ids = self._encoded(self._renderer.text(conversation))
        return Follow(token_ids=token_ids, messages=_marked(conversation[last + 1 :]), begins=True)

    def _continued(self, completion: Completion, node: _Node, before: list[Message], messages: list[Message]) -> Follow:
        """Return messages behind a turn; or all anew, where the template leaves out what was said before."""
        sampled = completion.token_ids[node.start : node.end]
        text = self._renderer.bridge_text(sampled, node.turn, messages)
        self._set([*before, *messages], [*node.said, *map(_key, messages)])
        said, whole = node.text and node.text + text, self._text
        if said and whole and any(message["role"] == "user" for message in messages) and _bare(whole) != _bare(said):
            return Follow(token_ids=self._encoded(whole), messages=_marked(messages), begins=True)
        self._text = said
        return self._behind(completion, node, self._encoded(text), messages)

    def _set(self, conversation: list[Message], said: list[str]) -> None:
        """Let the next turn follow a conversation as the template writes it."""
        self._messages, self._said = conversation, said
        try:
            self._text = None if self._keeps else self._renderer.text(conversation)
        except TemplateFailure:  # some refuse what policies have sampled: several calls in a turn, for instance
            self._text = None

    def _behind(
        self, completion: Completion, node: _Node, token_ids: "array[int]", messages: Sequence[Message]
    ) -> Follow:
        """Return ids behind a turn, in a new branch if it is not the last one."""
        before = array("I") if node.begin else self._prompt.token_ids
        if node is self._nodes[-1]:
            return Follow(token_ids=token_ids, messages=messages, num_before=len(before) + node.end - node.begin)
        held = before + completion.token_ids[node.begin : node.end]
        return Follow(token_ids=held + token_ids, messages=_marked(messages), begins=True)

    def _encoded(self, text: str) -> "array[int]":
        return array("I", self._renderer.codec.encode_rendered([text])[0])


def _key(message: Message) -> str:
    return json.dumps(message, sort_keys=True)


def _bare(text: str) -> str:
    """Return a text without spaces, which templates trim."""
    return "".join(text.split())


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Say in the first message that a branch begins with it."""
    return [{**message, "branch": True} if not place else message for place, message in enumerate(messages)]
