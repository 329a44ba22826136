"""Reads an assistant's turn from the text that was sampled: thinking, content, tool calls, and what is malformed."""

from dataclasses import dataclass
from typing import Any

from tandem_files.chat.tool_calls import PARSERS, FoundCalls, ToolCall, Tools

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """What a policy wrote in one turn.

    Attributes:
        content: the text without thinking, calls and the end of the turn; malformed calls are in it.
        reasoning: the text of the thinking block; None: there is none.
        raw: the text of all sampled ids, with special tokens.
        truncated: whether no token that ends a turn was sampled.
        errors: a line for each malformed call.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    raw: str = ""
    truncated: bool = False
    errors: tuple[str, ...] = ()

    def message(self, thought_key: str | None = "reasoning_content") -> dict[str, Any]:
        """Return the message that a chat template takes; arguments are objects, as some templates iterate over them."""
        message: dict[str, Any] = {"role": "assistant"}
        if self.content or not self.tool_calls:  # some templates write calls only where there is no content
            message["content"] = self.content
        if self.reasoning is not None and thought_key is not None:
            message[thought_key] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


def parse_turn(parser: str, text: str, *, tools: Tools | None = None, opened: bool = False) -> ParsedTurn:
    """Parse the text of a turn, without the token that ends it.

    Args:
        parser: one of PARSERS.
        tools: JSON schemas, which say whether a value without quotes is a string.
        opened: whether the prompt has opened the thinking block.
    """
    found = FoundCalls()
    rest = text if parser == "harmony" else _thinking(text, found, opened=opened)
    PARSERS[parser](rest, found, tools or ())
    # Beside calls, templates write content without the whitespace around it.
    pieces = [piece.strip() for piece in found.content] if found.calls else found.content
    return ParsedTurn(
        content=("\n" if found.calls else "").join(piece for piece in pieces if piece),
        reasoning="\n".join(found.thoughts) if found.thoughts else None,
        tool_calls=tuple(found.calls),
        errors=tuple(found.errors),
    )


def _thinking(text: str, found: FoundCalls, *, opened: bool) -> str:
    """Take the thinking block off a text. One that is not closed holds all of it. Returns: the rest."""
    begun = text.lstrip()
    if begun.startswith(_OPEN):
        text = begun.removeprefix(_OPEN)
    elif not opened:
        return text
    thought, _, rest = text.partition(_CLOSE)
    found.thoughts.append(thought.strip("\n"))
    return rest.lstrip("\n")
