"""What an environment gets and returns: a turn of the policy in, messages, a reward and an end out, all checked."""

import inspect
import json
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.workers.own_code import BadScore, kind_of, number, plain

Message = dict[str, Any]

ROLES = ("tool", "user", "system")
_KEYS = ("role", "content", "name", "tool_call_id")
# Characters of a part of a message. With more, tokenizing it blocks the coordinator for seconds.
MOST_CHARS = 2**20
_STEP = ("messages", "reward", "done")
# What `step` may return in a dict in place of messages.
FOLLOWS = ("conversation", "token_ids")


class BadReply(ValueError):
    """An environment returned what it must not; the message says what, and what is needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantTurn:
    """What the policy has answered: the argument of `step`.

    Attributes:
        text: as it was sampled, without the tokens that end it.
        message: role, content and tool_calls as OpenAI has them, with `arguments` as objects; "" and [] for none.
        reasoning: what the chat template sets apart as thinking.
        truncated: cut off by the length limit.
        index: number of the turn, from 0.
    """

    text: str
    message: Message
    tool_calls: Sequence[Mapping[str, Any]] = ()
    reasoning: str = ""
    truncated: bool = False
    index: int = 0


def messages_of(value: Any, method: str) -> list[Message]:
    """Take what a method returned as messages to append. Raises: BadReply."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        example = "[{'role': 'user', 'content': '...'}]"
        raise BadReply(f"{method} returned {_kind(value)}, not a list of messages such as {example}")
    return [_message(message, f"{method} returned a message ({place})") for place, message in enumerate(value)]


def step_of(value: Any) -> tuple[list[Message] | dict[str, Any], float | None, bool]:
    """Take what `step` returned: (messages, reward, done), or a dict with these keys or one of FOLLOWS.

    Returns: in place of messages, `{"conversation": messages}` or `{"token_ids": ids}` if it returned that.
    Raises: BadReply.
    """
    if isinstance(value, Mapping):
        unknown = [str(name) for name in value if name not in (*_STEP, *FOLLOWS)]
        if unknown or "done" not in value:
            why = f"with {unknown[0]!r}" if unknown else "without 'done'"
            names = "messages (or conversation, or token_ids), reward and done"
            raise BadReply(f"step returned a dict {why}; its keys are {names}")
        value = {name: part.tolist() if hasattr(part, "tolist") else part for name, part in value.items()}
        if given := [name for name in ("messages", *FOLLOWS) if value.get(name)][1:]:
            raise BadReply(f"step returned a dict with {given[0]!r} beside another thing to follow the turn; one can")
        other = next((name for name in FOLLOWS if value.get(name)), None)
        if other is not None:
            _, reward, done = step_of(([], value.get("reward"), True))
            if value["done"] is not False:
                raise BadReply(f"step returned {other} and not done=False: the next turn answers it")
            return {other: _FOLLOWS[other](value[other])}, reward, False
        value = (value.get("messages", []), value.get("reward"), value["done"])
    if not isinstance(value, tuple | list) or len(value) != len(_STEP):
        size = f" of {len(value)}" if isinstance(value, tuple | list) else ""
        raise BadReply(f"step returned {_kind(value)}{size}, not (messages, reward, done)")
    given, reward, done = value
    done = plain(done)
    if not isinstance(done, bool):
        raise BadReply(f"step returned {kind_of(done)} as done, which must be True or False")
    messages = messages_of(given, "step")
    if bool(messages) is done:
        why = "messages after done, which no turn would answer" if done else "neither messages nor done"
        raise BadReply(f"step returned {why}: the next turn answers messages, and an episode that is done has none")
    return messages, _reward(reward), done


def _reward(value: Any) -> float | None:
    if inspect.isawaitable(value):
        raise BadReply(f"step returned as its reward {_kind(value)}, not a number")
    try:
        return None if value is None else number(value)
    except BadScore as error:
        raise BadReply(str(error).replace("it returned", "step returned as its reward")) from error


def _kind(value: Any) -> str:
    """Name a value's type, and what was forgotten if it is a coroutine."""
    return f"{kind_of(value)}{' (without `await`?)' if inspect.isawaitable(value) else ''}"


def _conversation(value: Any) -> list[Message]:
    """Take a whole conversation, in which the assistant may have spoken. Raises: BadReply."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Sequence):
        raise BadReply(f"step returned {_kind(value)} as conversation, not a list of messages")
    messages = []
    for place, message in enumerate(value):
        where = f"step returned a conversation with a message ({place})"
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            messages.append(_message(message, where))
        elif isinstance(message.get("content", ""), str | None) and (message.get("content") or len(message) > 1):
            messages.append(_bare(message))
            _check_json(messages[-1], where)
        else:
            raise BadReply(f"{where} of the assistant whose content is no text; turn.message has what it said")
    if messages[-1]["role"] == "assistant":
        raise BadReply("step returned a conversation that ends with the assistant, whose turn it is")
    return messages


def _bare(message: Mapping[str, Any]) -> Message:
    """Return a message of the assistant as templates take it: without what only AssistantTurn.message has empty."""
    empty = "content" if message.get("tool_calls") else "tool_calls"
    return {name: part for name, part in message.items() if part or name != empty}


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadReply(f"step returned {_kind(value)} as token_ids, which must be a list of ids")
    for place, id_ in enumerate(value):
        if not isinstance(id_, numbers.Integral) or isinstance(id_, bool) or not 0 <= int(id_) < 2**31:
            raise BadReply(f"step returned token_ids with {id_!r:.40} ({place}), {kind_of(id_)}: no id of a token")
    return [*map(int, value)]


_FOLLOWS: Mapping[str, Callable[[Any], Any]] = {"conversation": _conversation, "token_ids": _token_ids}


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadReply(f"{where} that is {kind_of(value)}, not a dict with role and content")
    message = dict(value)
    parts = message["content"] if isinstance(message.get("content"), list) else []
    kinds = [str(part.get("type", "")) for part in parts if isinstance(part, Mapping)]
    if any("image" in str(name) for name in (*message, *kinds)):
        raise BadReply(f"{where} with an image; only texts are supported")
    for name in ("role", "content"):
        if name not in message:
            raise BadReply(f"{where} without {name!r}")
    if message["role"] not in ROLES:
        raise BadReply(f"{where} of the role {message['role']!r:.40}; those of an environment are {', '.join(ROLES)}")
    for name, part in message.items():
        if name not in _KEYS:
            raise BadReply(f"{where} with {name!r:.40}; its keys are {', '.join(_KEYS)}")
        if not isinstance(part, str):
            raise BadReply(f"{where} whose {name} is {_kind(part)}, not a text")
        if len(part) > MOST_CHARS:
            raise BadReply(f"{where} whose {name} has {len(part)} characters; a message has at most {MOST_CHARS}")
    _check_json(message, where)
    return message


def _check_json(message: Message, where: str) -> None:
    """Refuse what is not JSON, and half a surrogate pair, which no tokenizer takes. Raises: BadReply."""
    try:
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}, half of a surrogate pair"
        raise BadReply(f"{where} that is not Unicode: it holds {half}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise BadReply(f"{where} that is not JSON: {error}") from None
