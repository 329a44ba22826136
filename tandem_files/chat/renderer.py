"""Conversations of several turns whose ids are those that were sampled: no text of an earlier turn is tokenized again.

`render` begins a conversation, `parse` reads what the policy sampled, and `bridge` gives the ids to put behind it: the
chat template's own text after an assistant's turn of that kind. For it a dummy turn with a sentinel is rendered, and
what follows the sentinel is taken.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from typing import NamedTuple

from tandem_files.chat.parsing import ParsedTurn, parse_turn
from tandem_files.chat.template import ChatTemplate, TemplateFailure
from tandem_files.chat.tool_calls import PARSERS, ToolCall, Tools, parser_for
from tandem_files.rows.messages import Message
from tandem_files.tokenizer import TextCodec

# What stands for a turn's text, and for its thinking; no template changes such a word.
_SENTINEL, _THOUGHT = "tandemsentinel7f3a9c", "tandemthought7f3a9c"
# The dummy conversation begins with a user's message, which some templates need before the assistant's.
_QUESTION: Message = {"role": "user", "content": "u"}
_ID = "call00000"
# Keys of messages in which templates look for thinking: the first that a template names.
_THOUGHT_KEYS = ("reasoning_content", "thinking")
# Tokens in which a mark that opens thinking is, at the end of what is put behind a turn. Some templates that open it
# for a first turn do not behind tool results (DeepSeek's).
_OPENING = 16


class _Ending(NamedTuple):
    """How a template ends a turn: the rest of a call, and the special token; "": the mark of the next role ends it."""

    rest: str
    mark: str


class TemplateRenderer:
    """Turns messages into token ids, and sampled ids into a turn, with a chat template.

    Args:
        tools: JSON schemas; None: there are none.
        parser: of tool calls, one of PARSERS; None: `parser_for` finds it.
    Raises: ValueError: there is no such parser. TemplateFailure: the template does not write the assistant's turns.
    """

    def __init__(
        self, template: ChatTemplate, codec: TextCodec, tools: Tools | None = None, *, parser: str | None = None
    ) -> None:
        self.template, self.codec, self.tools = template, codec, tools
        self.parser = parser_for(template.text) if parser is None else parser
        if self.parser not in PARSERS:
            raise ValueError(f"there is no parser {self.parser!r} of tool calls; known are {', '.join(PARSERS)}")
        # The key of messages in which the template looks for thinking; None: it does not.
        self.thought_key = next((key for key in _THOUGHT_KEYS if re.search(rf"\b{key}\b", template.text)), None)
        prompt = template.render([_QUESTION], tools)
        # Whether the prompt opens the thinking block, and whether turns may have one.
        self.opened = prompt.rfind("<think>") > prompt.rfind("</think>")
        self.thinks = self.opened or (self.thought_key is not None and not prompt.rstrip().endswith("</think>"))
        self._unthought = self._end_of_thinking()
        function = tools[0].get("function", tools[0]) if tools else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        self.example = ToolCall(name=name if isinstance(name, str) else "f", arguments={"a": "Berlin"}, raw="", id=_ID)
        self._texts = codec.marks()
        self._stops = {text for id_, text in self._texts.items() if id_ in codec.stop_token_ids}
        marks = sorted(map(re.escape, self._texts.values()), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(marks) or '(?!)'})")
        # Tools in the dummy conversation: the first alone, if what follows a turn is the same with it.
        self._dummy_tools = tools
        self._as_text = False
        self._answer, self._call, self.no_calls = self._ending([]), None, ""
        for self._as_text in (False, True):  # DeepSeek's templates take arguments as text
            try:
                self._call, self.no_calls = self._ending([self.example]), ""
                break
            except TemplateFailure as error:
                self.no_calls = self.no_calls or str(error)
        kinds = [[]] if self._call is None else [[], [self.example]]
        with_all = [self._follow_ups(calls) for calls in kinds]
        self._dummy_tools = tools and tools[:1]
        if [self._follow_ups(calls) for calls in kinds] != with_all:
            self._dummy_tools = tools

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of the first turn: the ids that a row with these messages has. Raises: TemplateFailure."""
        return self.codec.encode_rendered([self.text(messages)])[0]

    def text(self, messages: Sequence[Message]) -> str:
        """Return the template's text of a conversation before the next turn."""
        return self.template.render([*map(self._taken, messages)], self.tools)

    def parse(self, sampled_ids: Sequence[int], behind: Sequence[int] | None = None) -> ParsedTurn:
        """Read a turn from the text of its ids; where they are no UTF-8, that has replacement characters.

        Args:
            sampled_ids: with the one that ends the turn, if that was sampled.
            behind: what `bridge` returned before them; None: the turn is the first.
        """
        end = self._texts.get(sampled_ids[-1], "") if sampled_ids else ""
        ended = bool(end) and end in self._stops
        sequences = [sampled_ids[:-1] if ended else sampled_ids, () if behind is None else behind[-_OPENING:]]
        text, before = self.codec.decode_all(sequences)
        opened = self.opened and (behind is None or before.rstrip().endswith("<think>"))
        turn = parse_turn(self.parser, text, tools=self.tools, opened=opened)
        return replace(turn, raw=text + end * ended, truncated=not ended)

    def bridge(self, sampled_ids: Sequence[int], turn: ParsedTurn, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the template's text behind the turn, as one text for all messages.

        Args:
            turn: the parsed `sampled_ids`.
            messages: what follows the turn: of tools, the user, the system.
        Raises: TemplateFailure: the template refuses them. ValueError: there are none, or one is the assistant's.
        """
        return self.codec.encode_rendered([self.bridge_text(sampled_ids, turn, messages)])[0]

    def bridge_text(self, sampled_ids: Sequence[int], turn: ParsedTurn, messages: Sequence[Message]) -> str:
        """Return the text whose ids `bridge` returns."""
        if not messages or any(message["role"] == "assistant" for message in messages):
            raise ValueError("a turn is followed by at least one message, and by none of the assistant, who samples it")
        ending = self._call if turn.tool_calls else self._answer
        if ending is None:
            raise TemplateFailure(self.no_calls)
        text = self._behind(turn.tool_calls, messages)
        text = text[text.index(ending.mark) if ending.mark else len(ending.rest) :]
        if turn.truncated:
            is_open = turn.reasoning is not None and "</think>" not in turn.raw
            text = self._unthought * is_open + text
        else:  # a mark of the next role that was sampled is there already, but only if the next message has that role
            text = text.removeprefix(ending.mark or self._texts[sampled_ids[-1]])
        return text

    def message(self, turn: ParsedTurn) -> Message:
        """Return a turn as the template takes it."""
        return self._taken(turn.message(self.thought_key))

    def _taken(self, message: Message) -> Message:
        """Write arguments as JSON, and no content as null, where the template takes calls so."""
        if not self._as_text or not (calls := message.get("tool_calls")):
            return message
        taken = []
        for call in calls:
            given = call["function"]["arguments"]
            arguments = given if isinstance(given, str) else json.dumps(given)
            taken.append({**call, "function": {**call["function"], "arguments": arguments}})
        return {"content": None, **message, "tool_calls": taken}

    def as_sampled(self, turn: ParsedTurn, around: str = "") -> list[int] | None:
        """Return the ids of a turn, `around` around its content, as the last; None: it does not continue the prompt."""
        prompt = self.template.render([_QUESTION], self.tools)
        message = self.message(turn)
        text = self.template.render([_QUESTION, message], self.tools, add_generation_prompt=False)
        if not text.startswith(prompt):
            return None
        known = turn.content or turn.tool_calls[-1].arguments["a"]
        before, _, behind = text[len(prompt) :].rpartition(known)
        stop = next((mark.end() for mark in self._split.finditer(behind) if mark[0] in self._stops), len(behind))
        return self.codec.encode_rendered([f"{before}{around}{known}{around}{behind[:stop]}"])[0]

    def _behind(self, calls: Sequence[ToolCall], messages: Sequence[Message]) -> str:
        """Return what the template writes behind a turn with these calls. Raises: TemplateFailure."""
        turn = ParsedTurn(content="" if calls else _SENTINEL)
        if calls:  # their names, as some templates repeat them behind the turn
            *others, last = (replace(call, arguments={"a": "b"}) for call in calls)
            turn = replace(turn, tool_calls=(*others, replace(last, arguments={"a": _SENTINEL})))
        try:
            text = self.template.render([_QUESTION, self.message(turn), *messages], self._dummy_tools)
            if _SENTINEL not in text:
                what = "tool calls" if calls else "the assistant's answers"
                raise TemplateFailure(f"the template does not write {what}")
        except TemplateFailure:
            if len(calls) < 2:
                raise
            return self._behind(calls[-1:], messages)  # Llama's take one call a turn, but a policy may sample more
        return text.partition(_SENTINEL)[2]

    def _ending(self, calls: Sequence[ToolCall]) -> _Ending:
        """Find what ends a turn whatever follows it: a token that ends completions or other turns, or any special."""
        pieces = zip(*(self._split.split(text) for text in self._follow_ups(calls)), strict=False)
        same = [column[0] for column in takewhile(lambda column: len(set(column)) == 1, pieces)]
        marks = range(1, len(same), 2)
        place = next((place for place in marks if same[place] in self._stops), marks[0] if marks else len(same))
        mark = same[place] if place < len(same) else ""
        self._stops |= {mark}
        return _Ending("".join(same[:place]), mark)

    def _follow_ups(self, calls: Sequence[ToolCall]) -> list[str]:
        """Return what is behind a turn before each kind of message that the template takes there, and before none."""
        result = {"role": "tool", "content": "r", "tool_call_id": self.example.id, "name": self.example.name}
        found, failure = [], TemplateFailure("")
        for messages in ([_QUESTION], [result], []):
            try:
                found.append(self._behind(calls, messages))
            except TemplateFailure as error:
                failure = error
        if not found:
            raise failure
        return found

    def _end_of_thinking(self) -> str:
        """Return what the template writes between thinking and content, to close a block in which a turn ends."""
        message = {"role": "assistant", "content": _SENTINEL, self.thought_key or "": _THOUGHT}
        try:
            text = self.template.render([_QUESTION, message], self.tools)
        except TemplateFailure:
            return ""
        between = text.partition(_THOUGHT)[2].partition(_SENTINEL)[0]
        return between if "</think>" in between else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowUp:
    """What a template does with a turn when the next message follows.

    Attributes:
        kind: of the turn and what follows it.
        held: the first token of the held ids and the bridge that differs in the template's own rendering, as text.
        rendered: that of the template's own rendering; "" for both: they are the same.
        refused: why the template has no such conversation; "": it has.
    """

    kind: str
    held: str = ""
    rendered: str = ""
    refused: str = ""

    @property
    def append_only(self) -> bool:
        """Whether the template's own rendering of the conversation begins with the ids of the turns before."""
        return not (self.held or self.rendered or self.refused)


# Kinds of turns and what follows: whether it calls a tool, whether it thinks, and whitespace around its answer.
_KINDS = {
    "tool results after a call": (True, False, ""),
    "a question after an answer": (False, False, ""),
    "a question after an answer between spaces": (False, False, " "),
    "tool results after thinking and a call": (True, True, ""),
    "a question after thinking and an answer": (False, True, ""),
}


def probe(renderer: TemplateRenderer) -> list[FollowUp]:
    """Compare `bridge` with the template's own rendering of whole conversations, for each kind of turn that it has."""
    found = []
    for kind, (calls, thinks, around) in _KINDS.items():
        if (thinks and not renderer.thinks) or (renderer.opened and not thinks):
            continue  # no such turn continues the prompt
        try:
            found.append(_follow_up(renderer, kind, calls=calls, thinks=thinks, around=around))
        except TemplateFailure as error:
            found.append(FollowUp(kind=kind, refused=str(error)))
    return found


def _follow_up(renderer: TemplateRenderer, kind: str, *, calls: bool, thinks: bool, around: str) -> FollowUp:
    if calls and renderer.no_calls:
        raise TemplateFailure(renderer.no_calls)
    call, thought = renderer.example, "Easy." if thinks else None
    turn = ParsedTurn(content="" if calls else "It is 5.", reasoning=thought, tool_calls=(call,) if calls else ())
    messages = [{"role": "tool", "content": "7", "name": call.name, "tool_call_id": call.id} if calls else _QUESTION]
    held, sampled = renderer.render([_QUESTION]), renderer.as_sampled(turn, around)
    if sampled is not None:
        turn = renderer.parse(sampled)
        if bool(turn.tool_calls) != calls:
            raise TemplateFailure(f"the parser {renderer.parser!r} does not read the calls that the template writes")
        held += [*sampled, *renderer.bridge(sampled, turn, messages)]
    whole = renderer.render([_QUESTION, renderer.message(turn), *messages])
    pairs = zip_longest(held, whole)
    differing = next((pair for pair in pairs if pair[0] != pair[1]), ())
    texts = [renderer.codec.decode_all([[] if id_ is None else [id_]])[0] for id_ in differing]
    return FollowUp(kind=kind, held=texts[0] if texts else "", rendered=texts[1] if texts else "")
