"""Conversations of several turns keep the sampled ids, and what is put behind them is the template's own text."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from tandem_clients.formatting import PromptFormat
from tandem_config.schema import DataSection
from tandem_files.chat.parsing import ParsedTurn
from tandem_files.chat.renderer import FollowUp, TemplateRenderer, probe
from tandem_files.chat.template import ChatTemplate, TemplateFailure
from tandem_files.rows.reading import Row
from tandem_files.tokenizer import TextCodec
from tests.chats import BOS, STOPS, TEMPLATES, TOOLS, odd_ids, renderer_of, train_tokenizer

CORPUS = [*TEMPLATES.values(), "What is the answer? It is five. Add the numbers: 12, 345.\n\nThen call the tool again."]
QUESTION = {"role": "user", "content": "  What is 2+3?\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
RESULTS = [{"role": "tool", "content": "5", "tool_call_id": "x"}, {"role": "tool", "content": "\n6 é"}]
QWEN_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 2,"b":3}}\n</tool_call>'
LLAMA_ADD = '{"name": "add", "parameters": {"a": 2,"b":3}}'
GLM_ADD = "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
HARMONY_ADD = (
    "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant to=functions"
    '.add<|channel|>commentary json<|message|>{"a":2}'
)
QWEN_RESULTS = (
    "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n\n6 é\n</tool_response><|im_end|>\n"
    "<|im_start|>assistant\n"
)
QWEN_QUESTION = "\n<|im_start|>user\n  What is 2+3?\n<|im_end|>\n<|im_start|>assistant\n"
XML_ADD = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>"
DEEPSEEK_CALL = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 2,"b":3}<｜tool▁call▁end｜>'
DEEPSEEK_ADD = f"<｜tool▁calls▁begin｜>{DEEPSEEK_CALL}<｜tool▁calls▁end｜>"
DEEPSEEK_RESULTS = "".join(f"<｜tool▁output▁begin｜>{text}<｜tool▁output▁end｜>" for text in ("5", "\n6 é"))
DEEPSEEK_QUESTION = "<｜User｜>  What is 2+3?\n<｜Assistant｜></think>"
LLAMA_HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"
IPYTHON, ASSISTANT = LLAMA_HEAD.format("ipython"), LLAMA_HEAD.format("assistant")
LLAMA_RESULTS = f"{IPYTHON}5<|eot_id|>{IPYTHON}6 é<|eot_id|>{ASSISTANT}"
LLAMA_QUESTION = f"{LLAMA_HEAD.format('user')}What is 2+3?<|eot_id|>{ASSISTANT}"
GLM_RESULTS = "\n<tool_response>\n5\n</tool_response>\n<tool_response>\n\n6 é\n</tool_response><|assistant|>"
GLM_QUESTION = "\n  What is 2+3?\n<|assistant|>"
HARMONY_RESULTS = "".join(
    f"<|start|>functions.add to=assistant<|channel|>commentary<|message|>{text}<|end|>" for text in ("5", "\n6 é")
)
HARMONY_QUESTION = "<|start|>user<|message|>  What is 2+3?\n<|end|><|start|>assistant"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(CORPUS)


def ids(renderer: TemplateRenderer, text: str) -> list[int]:
    return renderer.codec.encode_rendered([text])[0]


def text_of(renderer: TemplateRenderer, sampled: Sequence[int]) -> str:
    return renderer.codec.decode_all([sampled])[0]


def bridged(renderer: TemplateRenderer, sampled: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of what is put behind sampled ids, which must be the ids of that text."""
    behind = renderer.bridge(sampled, renderer.parse(sampled), [dict(message) for message in messages])
    assert behind == ids(renderer, text_of(renderer, behind))
    return text_of(renderer, behind)


BRIDGES = [
    # Qwen: the newline behind <|im_end|>, results in one user's turn, the end of a turn that was cut off.
    ("qwen", f"{QWEN_ADD}<|im_end|>", RESULTS, QWEN_RESULTS),
    ("qwen", f"I add.\n{QWEN_ADD}\n{QWEN_ADD}<|im_end|>", RESULTS, QWEN_RESULTS),
    ("qwen", QWEN_ADD, RESULTS, f"<|im_end|>{QWEN_RESULTS}"),
    ("qwen", "It is 5. \n<|im_end|>", [QUESTION], QWEN_QUESTION),
    ("qwen", "It is 5.<|endoftext|>", [QUESTION], QWEN_QUESTION),
    ("qwen", "It is", [QUESTION], f"<|im_end|>{QWEN_QUESTION}"),
    ("qwen", "", [QUESTION], f"<|im_end|>{QWEN_QUESTION}"),
    ("qwen", "It is<|im_end|>5", [QUESTION], f"<|im_end|>{QWEN_QUESTION}"),
    ("qwen", "<think>\nEasy", [QUESTION], f"\n</think>\n\n<|im_end|>{QWEN_QUESTION}"),
    ("qwen", "<think>\nEasy.\n</think>\n\nIt", [QUESTION], f"<|im_end|>{QWEN_QUESTION}"),
    ("qwen", "It is 5.<|im_end|>", [SYSTEM, QUESTION], f"\n<|im_start|>system\nBe brief.<|im_end|>{QWEN_QUESTION}"),
    # A malformed call is answered as the environment likes.
    ("qwen", "<tool_call>\n{<|im_end|>", RESULTS, QWEN_RESULTS),
    # Llama: tokens that end a message or a turn; more calls than the template takes.
    ("llama", f"{LLAMA_ADD}<|eom_id|>", RESULTS, LLAMA_RESULTS),
    ("llama", f"{LLAMA_ADD}; {LLAMA_ADD}<|eot_id|>", RESULTS, LLAMA_RESULTS),
    ("llama", f"<|python_tag|>{LLAMA_ADD}", RESULTS, f"<|eot_id|>{LLAMA_RESULTS}"),
    ("llama", " It is 5. <|eot_id|>", [QUESTION], LLAMA_QUESTION),
    # GLM: the token that ends a turn is the mark of the next role, if that role is next.
    ("glm", f"{GLM_ADD}<|observation|>", RESULTS, GLM_RESULTS),
    ("glm", GLM_ADD, RESULTS, f"<|observation|>{GLM_RESULTS}"),
    ("glm", f"{GLM_ADD}<|user|>", RESULTS, f"<|observation|>{GLM_RESULTS}"),
    ("glm", "\n<think></think>\nIt is 5.<|user|>", [QUESTION], GLM_QUESTION),
    ("glm", "\n<think></think>\nIt is 5.<|observation|>", [QUESTION], f"<|user|>{GLM_QUESTION}"),
    ("glm", "\n<think></think>\nIt is 5.<|endoftext|>", [QUESTION], f"<|user|>{GLM_QUESTION}"),
    ("glm", "\n<think>Ea", [QUESTION], f"</think>\n<|user|>{GLM_QUESTION}"),
    # harmony: three tokens that end messages, and the name of the call in its result.
    ("harmony", f"{HARMONY_ADD}<|call|>", RESULTS, f"{HARMONY_RESULTS}<|start|>assistant"),
    ("harmony", HARMONY_ADD, RESULTS, f"<|call|>{HARMONY_RESULTS}<|start|>assistant"),
    ("harmony", "<|channel|>final<|message|>5<|return|>", [QUESTION], HARMONY_QUESTION),
    ("harmony", "<|channel|>final<|message|>5<|end|>", [QUESTION], HARMONY_QUESTION),
    ("harmony", "<|channel|>final<|message|>5", [QUESTION], f"<|end|>{HARMONY_QUESTION}"),
    # Calls in XML: the same marks around turns as Qwen3's.
    ("qwen_xml", f"{XML_ADD}\n{XML_ADD}<|im_end|>", RESULTS, QWEN_RESULTS),
    ("qwen_xml", XML_ADD, RESULTS, f"<|im_end|>{QWEN_RESULTS}"),
    # DeepSeek: the template takes arguments as text; behind results the turn continues without a mark.
    ("deepseek", f"{DEEPSEEK_ADD}<｜end▁of▁sentence｜>", RESULTS, DEEPSEEK_RESULTS),
    ("deepseek", DEEPSEEK_ADD, RESULTS, f"<｜end▁of▁sentence｜>{DEEPSEEK_RESULTS}"),
    (
        "deepseek",
        f"I add.{DEEPSEEK_ADD}<｜end▁of▁sentence｜>",
        [*RESULTS, QUESTION],
        DEEPSEEK_RESULTS + DEEPSEEK_QUESTION,
    ),
    ("deepseek", "It is 5.<｜end▁of▁sentence｜>", [QUESTION], DEEPSEEK_QUESTION),
    # Mistral: tools stand before the last question, so they are part of what follows.
    ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {}}]</s>', RESULTS[:1], "[TOOL_RESULTS]5"),
]


@pytest.mark.parametrize(("manner", "sampled", "messages", "expected"), BRIDGES)
def test_what_follows_a_turn_is_the_templates_text(
    tokenizer: Tokenizer, manner: str, sampled: str, messages: list[dict[str, Any]], expected: str
) -> None:
    renderer = renderer_of(tokenizer, manner)
    assert bridged(renderer, ids(renderer, sampled), messages) == expected


def test_tools_that_a_template_writes_behind_turns_are_all_written(tokenizer: Tokenizer) -> None:
    renderer = renderer_of(tokenizer, "mistral")
    behind = bridged(renderer, ids(renderer, "It is 5.</s>"), [QUESTION])
    assert behind.startswith("[AVAILABLE_TOOLS]")
    assert '"weather"' in behind


class CountedTemplate(ChatTemplate):
    """Counts what is rendered, and with how many tools."""

    num_tools: list[int]

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any, **options: Any) -> str:
        self.num_tools = [*getattr(self, "num_tools", ()), len(tools or ())]
        return super().render(messages, tools, **options)


def test_a_bridge_renders_one_dummy_turn_with_one_tool(tokenizer: Tokenizer) -> None:
    """Not the conversation, and not a hundred tools, if what follows a turn does not depend on them."""
    made = renderer_of(tokenizer, "qwen")
    template = CountedTemplate(TEMPLATES["qwen"], {}, {})
    renderer = TemplateRenderer(template, made.codec, [*TOOLS] * 50)
    template.num_tools = []
    bridged(renderer, ids(renderer, f"{QWEN_ADD}<|im_end|>"), RESULTS)
    assert template.num_tools == [1]
    assert renderer.render([QUESTION]) != made.render([QUESTION])


@pytest.mark.parametrize("manner", TEMPLATES)
def test_the_first_prompt_is_that_of_a_row(tokenizer: Tokenizer, manner: str) -> None:
    renderer = renderer_of(tokenizer, manner)
    section = DataSection.model_validate({"train": "rows.jsonl", "tools_key": "tools"})
    special = {"bos_token": BOS.get(manner, "<|begin_of_text|>"), "eos_token": STOPS[manner][0]}
    formats = PromptFormat(section, renderer.codec, {"default": TEMPLATES[manner]}, special, "")
    row = Row(prompt=[QUESTION], answer="", file=Path("rows.jsonl"), number=1, tools=TOOLS, columns={})
    (expected,) = formats.encode([formats.text(row)])
    assert renderer.render([QUESTION]) == expected


def test_a_turn_is_read_from_its_ids(tokenizer: Tokenizer) -> None:
    renderer = renderer_of(tokenizer, "qwen")
    text = f"<think>\nEasy.\n</think>\n\nI add.\n{QWEN_ADD}"
    for sampled in (ids(renderer, text), odd_ids(tokenizer, text, random.Random(0))):
        turn = renderer.parse([*sampled, *ids(renderer, "<|im_end|>")])
        assert (turn.content, turn.reasoning, turn.truncated) == ("I add.", "Easy.", False)
        assert [(call.name, call.arguments, call.raw) for call in turn.tool_calls] == [
            ("add", {"a": 2, "b": 3}, '{"a": 2,"b":3}')
        ]
        assert turn.raw == f"{text}<|im_end|>"
    assert renderer.parse(ids(renderer, text)).truncated
    assert renderer.parse([]) == ParsedTurn(content="", truncated=True)


def test_marks_that_the_model_does_not_stop_at_end_a_turn_too(tokenizer: Tokenizer) -> None:
    """A base model's folder knows the end of a text only."""
    codec = TextCodec(tokenizer, renderer_of(tokenizer, "harmony").codec.stop_token_ids[:1])
    renderer = TemplateRenderer(ChatTemplate(TEMPLATES["harmony"], {}, {}), codec, TOOLS)
    sampled = ids(renderer, f"{HARMONY_ADD}<|call|>")
    assert not renderer.parse(sampled).truncated
    assert bridged(renderer, sampled, RESULTS) == f"{HARMONY_RESULTS}<|start|>assistant"


def test_a_prompt_may_open_the_thinking_block(tokenizer: Tokenizer) -> None:
    renderer = renderer_of(tokenizer, "qwen", block="<think>\n")
    turn = renderer.parse(ids(renderer, "Easy.\n</think>\n\nIt is 5.<|im_end|>"))
    assert (turn.reasoning, turn.content) == ("Easy.", "It is 5.")
    cut = bridged(renderer, ids(renderer, "Eas"), [QUESTION])
    assert cut == f"\n</think>\n\n<|im_end|>{QWEN_QUESTION}<think>\n"


def test_thinking_that_is_not_opened_behind_results_is_not_expected_there(tokenizer: Tokenizer) -> None:
    """DeepSeek-R1's prompts open it, and what follows results of tools does not."""
    renderer = renderer_of(tokenizer, "deepseek", block="<think>\n")
    turn = renderer.parse(sampled := ids(renderer, f"Easy.\n</think>\n{DEEPSEEK_ADD}<｜end▁of▁sentence｜>"))
    assert (turn.reasoning, [call.name for call in turn.tool_calls]) == ("Easy.", ["add"])
    behind = renderer.bridge(sampled, turn, [{"role": "tool", "content": "<think>"}])
    turn = renderer.parse(sampled := ids(renderer, "It is 5.<｜end▁of▁sentence｜>"), behind)
    assert (turn.reasoning, turn.content) == (None, "It is 5.")
    behind = renderer.bridge(sampled, turn, [QUESTION])
    assert renderer.parse(ids(renderer, "Easy.\n</think>\nNo.<｜end▁of▁sentence｜>"), behind).reasoning == "Easy."


def test_bytes_that_are_no_text_stay_what_they_are(tokenizer: Tokenizer) -> None:
    renderer = renderer_of(tokenizer, "qwen")
    sampled = [*ids(renderer, "It is \N{GRINNING FACE}")[:-2], *ids(renderer, f"{QWEN_ADD}<|im_end|>")]
    turn = renderer.parse(sampled)
    assert "\N{REPLACEMENT CHARACTER}" in turn.content
    assert [call.name for call in turn.tool_calls] == ["add"]
    assert ids(renderer, turn.raw) != sampled
    assert bridged(renderer, sampled, RESULTS) == QWEN_RESULTS


def test_a_tokenizer_that_does_not_round_trip(tokenizer: Tokenizer) -> None:
    lower = Tokenizer.from_str(tokenizer.to_str())
    lower.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.NFKD()])
    renderer = renderer_of(lower, "qwen")
    assert text_of(renderer, ids(renderer, "É")) != "É"
    sampled = ids(renderer, f"{QWEN_ADD}<|im_end|>")
    behind = renderer.bridge(sampled, renderer.parse(sampled), [QUESTION])
    assert text_of(renderer, behind) == QWEN_QUESTION.lower()


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([], "at least one message"),
        ([{"role": "assistant", "content": "5"}], "none of the assistant"),
    ],
)
def test_what_cannot_follow_a_turn_is_refused(tokenizer: Tokenizer, messages: list[dict[str, Any]], why: str) -> None:
    renderer = renderer_of(tokenizer, "qwen")
    with pytest.raises(ValueError, match=why):
        renderer.bridge([], renderer.parse([]), messages)


def test_what_a_template_does_not_write_is_named(tokenizer: Tokenizer) -> None:
    renderer = renderer_of(tokenizer, "harmony")
    sampled = ids(renderer, "<|channel|>final<|message|>5<|return|>")
    with pytest.raises(TemplateFailure, match="no call has this result"):
        renderer.bridge(sampled, renderer.parse(sampled), RESULTS)
    without_calls = "{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    renderer = renderer_of(tokenizer, "qwen", without_calls)
    renderer.parser = "hermes"
    sampled = ids(renderer, QWEN_ADD)
    with pytest.raises(TemplateFailure, match="does not write tool calls"):
        renderer.bridge(sampled, renderer.parse(sampled), RESULTS)
    with pytest.raises(TemplateFailure, match="does not write the assistant's answers"):
        renderer_of(tokenizer, "qwen", "{{ messages[0].content }}")
    with pytest.raises(ValueError, match="no parser 'xml' of tool calls; known are hermes, llama3_json, json"):
        TemplateRenderer(renderer.template, renderer.codec, TOOLS, parser="xml")


def test_arguments_that_are_text_are_objects_for_the_template(tokenizer: Tokenizer) -> None:
    """GLM's templates iterate over them; they fail on JSON text."""
    renderer = renderer_of(tokenizer, "glm")
    turn = renderer.parse(ids(renderer, f"{GLM_ADD}<|observation|>"))
    whole = renderer.render([QUESTION, turn.message(), *RESULTS])
    assert text_of(renderer, whole).endswith(f"{GLM_ADD}<|observation|>{GLM_RESULTS}")


APPEND_ONLY = ["tool results after a call", "a question after an answer"]
SPACES = "a question after an answer between spaces"
THOUGHT = ["tool results after thinking and a call", "a question after thinking and an answer"]


@pytest.mark.parametrize(
    ("manner", "differs"),
    [
        # Thinking before the last question is dropped; a turn without thinking has no block.
        ("qwen", [FollowUp(kind=THOUGHT[1], held="<think>", rendered="It")]),
        ("llama", [FollowUp(kind=SPACES, held=" It", rendered="It")]),
        ("glm", [FollowUp(kind=SPACES, held=" It", rendered="It")]),
        ("qwen_xml", [FollowUp(kind=THOUGHT[1], held="<think>", rendered="It")]),
        ("deepseek", []),
        (
            "harmony",
            [
                FollowUp(kind=APPEND_ONLY[1], held="<|return|>", rendered="<|end|>"),
                FollowUp(kind=SPACES, held="<|return|>", rendered="<|end|>"),
                FollowUp(kind=THOUGHT[1], held="analysis", rendered="final"),
            ],
        ),
    ],
)
def test_a_probe_names_what_is_not_append_only(tokenizer: Tokenizer, manner: str, differs: list[FollowUp]) -> None:
    found = probe(renderer_of(tokenizer, manner))
    kinds = [*APPEND_ONLY, SPACES, *(THOUGHT if manner not in ("llama", "deepseek") else [])]
    assert [follow.kind for follow in found] == kinds
    assert [follow for follow in found if not follow.append_only] == differs


ODD_TOOLS = [
    {"type": "function", "function": "add"},
    {"name": None},
    {},
    {"name": "add", "parameters": []},
    {"name": "add", "parameters": {"properties": {"a": "string", "b": {"type": "string"}}}},
]


@pytest.mark.parametrize("tool", ODD_TOOLS, ids=str)
def test_tools_may_say_little(tokenizer: Tokenizer, tool: dict[str, Any]) -> None:
    """Rows may have schemas of any form; what they do not say is not needed."""
    renderer = renderer_of(tokenizer, "glm", tools=[tool])
    assert probe(renderer)[0].append_only
    turn = renderer.parse(ids(renderer, GLM_ADD.replace("<arg_key>a", "<arg_key>b")))
    is_text = tool == ODD_TOOLS[-1]
    assert turn.tool_calls[0].arguments == {"b": "2" if is_text else 2}


def test_a_probe_names_tools_that_move_and_prompts_that_are_not_continued(tokenizer: Tokenizer) -> None:
    moved = [follow for follow in probe(renderer_of(tokenizer, "mistral")) if not follow.append_only]
    assert [(follow.kind, follow.refused) for follow in moved] == [(APPEND_ONLY[1], ""), (SPACES, "")]
    opened = probe(renderer_of(tokenizer, "qwen", block="<think>\n"))
    assert [follow.kind for follow in opened] == THOUGHT
    assert opened[0].append_only
    closed = probe(renderer_of(tokenizer, "qwen", block="<think>\n\n</think>\n\n"))
    assert [follow.kind for follow in closed] == [*APPEND_ONLY, SPACES]
    assert {(follow.held, follow.append_only) for follow in closed} == {("<think>", False)}


def test_a_probe_says_why_a_template_is_refused(tokenizer: Tokenizer) -> None:
    without_calls = (
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        "{{ 'assistant\n' if add_generation_prompt else '' }}"
    )
    (first, *others) = probe(renderer_of(tokenizer, "qwen", without_calls))
    assert "tool calls" in first.refused
    assert not first.append_only
    assert all(follow.append_only for follow in others)
    unread = renderer_of(tokenizer, "qwen", TEMPLATES["qwen"] + "{# <tool_call>\\n<function= #}")
    assert "the parser 'qwen3_coder' does not read the calls" in probe(unread)[0].refused


# What follows a turn with calls and one without, and what may close the turn before it.
RESULT = {
    "deepseek": "<｜tool▁output▁begin｜>7<｜tool▁output▁end｜>",
    "qwen": "\n<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "llama": f"{IPYTHON}7<|eot_id|>{ASSISTANT}",
    "glm": "\n<tool_response>\n7\n</tool_response><|assistant|>",
    "harmony": "<|start|>functions.{} to=assistant<|channel|>commentary<|message|>7<|end|><|start|>assistant",
}
RESULT["qwen_xml"] = RESULT["qwen"]
ASKED = {
    "qwen": QWEN_QUESTION,
    "qwen_xml": QWEN_QUESTION,
    "llama": LLAMA_QUESTION,
    "glm": GLM_QUESTION,
    "harmony": HARMONY_QUESTION,
    "deepseek": DEEPSEEK_QUESTION,
}
ADD = {
    "qwen": QWEN_ADD,
    "qwen_xml": XML_ADD,
    "llama": LLAMA_ADD,
    "glm": GLM_ADD,
    "harmony": HARMONY_ADD,
    "deepseek": DEEPSEEK_ADD,
}
CLOSES = {
    "qwen": {"", "<|im_end|>", "\n</think>\n\n<|im_end|>"},
    "llama": {"", "<|eot_id|>"},
    "glm": {"", "<|user|>", "<|observation|>", "</think>\n<|user|>"},
    "harmony": {"", "<|end|>", "<|call|>"},
    "deepseek": {"", "<｜end▁of▁sentence｜>"},
}
CLOSES["qwen_xml"] = CLOSES["qwen"]


def sampled_turn(renderer: TemplateRenderer, manner: str, draw: random.Random) -> list[int]:
    """Ids as an adversary may sample them: odd merges, half characters, half calls, special tokens, no end."""
    tokenizer = renderer.codec._tokenizer
    call = ADD[manner]
    pieces = [call, call[: draw.randrange(len(call))], "It is 5.", "  \n", "<think>\nEasy.\n</think>\n\n", "<think>",
              "\N{GRINNING FACE}", "<|im_start|>user\n", "<|start|>assistant", "</tool_call>", '{"name":',
              "é<|message|>"]  # fmt: skip
    sampled = odd_ids(tokenizer, "".join(draw.choices(pieces, k=draw.randrange(1, 5))), draw)
    for _ in range(draw.randrange(3)):
        sampled.insert(draw.randrange(len(sampled) + 1), draw.randrange(tokenizer.get_vocab_size()))
    ends = list(renderer.codec.stop_token_ids)
    return [*sampled, *draw.choice([[], ends[:1], draw.choices(ends)])]


@pytest.mark.parametrize("manner", ADD)
def test_no_token_of_a_held_prefix_changes(tokenizer: Tokenizer, manner: str) -> None:
    """15,000 turns in all; rendering the messages anew would change most of them."""
    renderer, draw, broken = renderer_of(tokenizer, manner), random.Random(manner), 0
    ends = {*renderer.codec.stop_token_ids, tokenizer.token_to_id("<|end|>") if manner == "harmony" else None}
    for episode in range(500):
        held, messages = renderer.render([QUESTION]), [QUESTION]
        for _ in range(5):
            sampled = sampled_turn(renderer, manner, draw)
            before, prompt = tuple(sampled), tuple(held)
            turn = renderer.parse(sampled)
            assert turn.raw == text_of(renderer, sampled)
            assert turn.truncated == (not sampled or sampled[-1] not in ends)
            follow = [{"role": "tool", "content": "7"}] if turn.tool_calls else [QUESTION]
            behind = renderer.bridge(sampled, turn, follow)
            held = [*held, *sampled, *behind]
            assert tuple(held[: len(prompt) + len(before)]) == prompt + before
            messages = [*messages, renderer.message(turn), *follow]
            if episode % 10 == 0:
                broken += is_rendered_otherwise(renderer, messages, [*prompt, *before])
            expected = (
                RESULT[manner].format(*(call.name for call in turn.tool_calls[-1:]))
                if turn.tool_calls
                else ASKED[manner]
            )
            assert text_of(renderer, behind).removesuffix(expected) in CLOSES[manner]
    assert broken > 125  # half of those that are rendered anew


def is_rendered_otherwise(renderer: TemplateRenderer, messages: Sequence[Any], held: Sequence[int]) -> bool:
    try:
        return renderer.render(messages)[: len(held)] != held
    except TemplateFailure:
        return True
