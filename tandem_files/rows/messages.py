"""A row's prompt: a text, or messages in one of the forms that data have, as the messages that templates take."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from tandem_files.rows.values import BadRow, column, shown, without_nulls

Message = dict[str, Any]
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_IMAGE_PARTS = ("image", "image_url", "input_image", "video", "video_url")
_SYSTEM_KEY = "data.system_key (or system_key: '' of a file whose rows have none)"
# ShareGPT's authors, `from`, and what templates call them.
_CALL = "function_call"
_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "model", "bot", _CALL), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response"), "tool"),
    "system": "system",
}
# Messages as Python writes them, which many a conversion to text does.
_PYTHON = re.compile(r"\[\s*\{\s*'(?:role|from|content|value)'\s*:.*\}\s*\]", re.DOTALL)


def prompt_of(record: Mapping[str, Any], key: str) -> str | list[Message]:
    """Return the prompt: a text, or messages with role and content. Raises: BadRow."""
    value = column(record, key, "data.prompt_key")
    if isinstance(value, str):
        value = _messages_in(value, key)
    if isinstance(value, list):
        messages = _messages(value, key)
        _refuse_images(record, "".join(str(message.get("content", "")) for message in messages))
        return messages
    if not isinstance(value, str):
        raise BadRow(f"{key!r} is {shown(value)}; it must be a string or a list of messages")
    if not value:
        raise BadRow(f"{key!r} is empty")
    _refuse_images(record, value)
    return value


def system_of(record: Mapping[str, Any], key: str | None) -> str | None:
    """Return the row's system prompt; None: it has none. Raises: BadRow."""
    value = None if key is None else column(record, key, _SYSTEM_KEY)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if not isinstance(value, str):
        raise BadRow(f"{key!r} is {shown(value)}; a system prompt is a string, or null where a row has none")
    return value


def _messages_in(text: str, key: str) -> str | list[Any]:
    """Return the messages that a text holds as JSON; the text itself: it is none of these."""
    begun = text.lstrip()
    if not begun.startswith("["):
        return text
    if _PYTHON.fullmatch(begun.rstrip()):
        raise BadRow(f"{key!r} holds messages as Python writes them; write them as JSON (json.dumps), or as a list")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_messages = isinstance(value, list) and value and all(map(_is_message, value))
    return [without_nulls(message) for message in value] if is_messages else text


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("role", value.get("from")), str):
        return False
    return not value.keys().isdisjoint(("content", "value", "tool_calls"))


def _messages(values: list[Any], key: str) -> list[Message]:
    if not values:
        raise BadRow(f"{key!r} is an empty list; it must hold at least one message")
    messages = [_message(value, f"{key!r}[{place}]") for place, value in enumerate(values)]
    if messages[-1]["role"] == "assistant":
        raise BadRow(
            f"{key!r} ends with the assistant's message; a prompt ends with the user's (or a tool's), and the policy "
            "writes the answer"
        )
    return messages


def _message(value: Any, name: str) -> Message:
    """Return a message with role and content, which ShareGPT calls from and value; parts that are texts are joined."""
    if not isinstance(value, dict):
        raise BadRow(f"{name} is {shown(value)}; a message is an object with role and content")
    message = dict(value)
    if "role" not in message and isinstance(message.get("from"), str):
        author = message.pop("from")
        message["role"] = _ROLES.get(author.lower())
        if message["role"] is None:
            raise BadRow(f"{name} is from {author!r}; known are {', '.join(_ROLES)}")
        if author.lower() == _CALL:
            message["tool_calls"] = list(_calls(message.pop("value", None), name))
    if "content" not in message and "value" in message:
        message["content"] = message.pop("value")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        have = ", ".join(map(repr, value)) or "nothing"
        raise BadRow(f"{name} has no role ({have}); a message is an object with role and content, or from and value")
    if isinstance(content, (list, dict)):
        message["content"] = content = _joined(content if isinstance(content, list) else [content], name)
    if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        raise BadRow(f"{name} has {shown(content)} as content; it must be a string")
    return message


def _joined(parts: list[Any], name: str) -> str:
    """Join the texts of a content's parts, without anything between them, as templates that take parts write them."""
    kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
    image = next((kind for kind in kinds if kind in _IMAGE_PARTS), None)
    if image is not None:
        raise BadRow(f"{name} holds a part of type {image!r}: images are not supported, only text")
    texts: list[str] = []
    for kind, part in zip(kinds, parts, strict=True):
        text = part.get("text") if isinstance(part, dict) else part
        if kind not in _TEXT_PARTS or not isinstance(text, str):
            what = shown(part) if kind in _TEXT_PARTS else f"of type {kind!r}"
            raise BadRow(f"{name} holds a part {what}; a part of a content is {{type: text, text: ...}}")
        texts.append(text)
    if not texts:
        raise BadRow(f"{name} has an empty list of parts as content")
    return "".join(texts)


def _calls(value: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the calls of ShareGPT's function_call: JSON of a name and arguments, or a list of such."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    for call in found if isinstance(found, list) and found else [found]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow(f"{name} is a {_CALL} of {shown(value)}; it must be JSON of a name and arguments")
        yield {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}


def _refuse_images(record: Mapping[str, Any], text: str) -> None:
    """Refuse rows whose images lie in a column of their own, with a mark in the text."""
    for name in ("images", "image"):
        if record.get(name) and "<image>" in text:
            raise BadRow(f"has images in the column {name!r}: images are not supported, only text")
