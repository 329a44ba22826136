"""Chat templates in the manner of known ones, tokenizers with their special tokens, and odd ids for the same text."""

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tandem_files.chat.renderer import TemplateRenderer
from tandem_files.chat.template import ChatTemplate
from tandem_files.tokenizer import TextCodec

# Special tokens that end a turn, by the manner of the template; the first is the tokenizer's end of sequence.
STOPS = {
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "qwen_xml": ("<|im_end|>", "<|endoftext|>"),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "llama": ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    "glm": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "harmony": ("<|return|>", "<|call|>"),
    "mistral": ("</s>",),
}
# Tokens that begin a text, where it is not <|begin_of_text|>.
BOS = {"mistral": "<s>", "deepseek": "<｜begin▁of▁sentence｜>"}
_SPECIAL = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>"),
    *(f"<｜tool▁{what}▁{side}｜>" for what in ("calls", "call", "outputs", "output") for side in ("begin", "end")),
]
_NAMES = ("think", "tool_call", "tool_response", "arg_key", "arg_value")
_PLAIN = [f"<{slash}{name}>" for name in _NAMES for slash in ("", "/")]
# How Qwen's and Llama 3's tokenizers divide text: they differ in how many digits are together.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {name: _PATTERN.replace("DIGITS", digits) for name, digits in (("qwen", r"\p{N}"), ("llama", r"\p{N}{1,3}"))}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name}.",
            "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in arguments.items()}},
        },
    }
    for name, arguments in {"add": {"a": "integer", "b": "integer"}, "weather": {"city": "string"}}.items()
]

# In the manner of Qwen3: thinking of turns before the last question is dropped, results of tools are one user's turn;
# `block` is what a prompt begins the turn with.
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '\\nCall as <tool_call>\\n{"name": .., "arguments": ..}\\n</tool_call><|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if m.reasoning_content is string and loop.index0 > ns.last %}
{{- '<think>\\n' + m.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{{- content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n' if content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' }}
{{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
{{- '<|im_end|>\\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' }}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' + (block or '') }}
{%- endif %}"""
# In the manner of Qwen3-Coder: calls in XML, whose values have no quotes.
QWEN_XML = QWEN.replace(
    QWEN[QWEN.index("{{- '<tool_call>") : QWEN.index("{%- endfor %}\n{{- '<|im_end|>")],
    """{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for key, value in call.function.arguments.items() %}{{- '<parameter=' + key + '>\\n' }}
{{- value if value is string else value | tojson }}{{- '\\n</parameter>\\n' }}{%- endfor %}
{{- '</function>\\n</tool_call>' }}
""",
)
# In the manner of DeepSeek V3.1: arguments are JSON as text, and nothing follows the results of tools.
DEEPSEEK = """{{- bos_token }}{%- if tools %}{{- 'Tools: ' + tools | tojson }}
{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>arguments<｜tool▁call▁end｜>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<｜Assistant｜></think>' }}{%- endif %}
{%- if m.content is not none %}{{- m.content + '' }}{%- endif %}
{%- if m.tool_calls %}{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls %}{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
{{- call.function.arguments + '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' }}{%- endif %}
{{- '<｜end▁of▁sentence｜>' }}
{%- elif m.role == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
{%- else %}{{- '<｜User｜>' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}
{{- '<｜Assistant｜>' + ('</think>' if block is not defined else block) }}
{%- endif %}"""
# In the manner of Llama 3: one call a turn, contents are trimmed, the first question must be there.
LLAMA = """{{- bos_token }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\nRespond in the format ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}. ' + tools | tojson }}
{{- '<|eot_id|>' }}{%- endif %}
{%- if messages[0].role == 'assistant' %}{{- raise_exception('There is no question') }}{%- endif %}
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{- raise_exception('only one call at a time') }}{%- endif %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name }}
{{- '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
{{- m.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
# In the manner of GLM-4.5: no token ends a turn but the mark of the next role; arguments are iterated over.
GLM = """[gMASK]<sop>{% if tools %}<|system|>
<arg_key>{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}<|assistant|>
{{- '\\n<think>' + (m.reasoning_content or '') + '</think>' }}
{%- if m.content %}{{- '\\n' + m.content.strip() }}{%- endif %}
{%- for call in m.tool_calls or [] %}{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments.items() %}{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}{%- endfor %}
{{- '</tool_call>' }}{%- endfor %}
{%- elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
# In the manner of gpt-oss: channels, three tokens that end messages, and results with the name of the last call.
HARMONY = """{{- '<|start|>system<|message|>' + (tools | tojson if tools else '') + '<|end|>' }}
{%- set ns = namespace(name=none) %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- set ns.name = m.tool_calls[0].function.name %}
{{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
{{- m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}
{%- set last = loop.last and not add_generation_prompt %}
{%- if m.thinking and last %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if last else '<|end|>') }}
{%- elif m.role == 'tool' %}
{%- if ns.name is none %}{{- raise_exception('no call has this result') }}{%- endif %}
{{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
# In the manner of Mistral: tools are written before the last question, ids of calls have nine characters.
MISTRAL = """{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- set later = messages[loop.index0 + 1:] | selectattr('role', 'equalto', 'user') | list %}
{%- if tools and not later %}
{{- '[AVAILABLE_TOOLS]' + tools | tojson }}{%- endif %}
{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS][' }}
{%- for call in m.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids of calls have 9 characters') }}{%- endif %}
{{- ', ' if not loop.first else '' }}{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{%- endfor %}{{- ']</s>' }}
{%- else %}{{- m.content + '</s>' }}
{%- endif %}
{%- endfor %}"""
TEMPLATES = {
    "qwen": QWEN,
    "qwen_xml": QWEN_XML,
    "llama": LLAMA,
    "glm": GLM,
    "harmony": HARMONY,
    "mistral": MISTRAL,
    "deepseek": DEEPSEEK,
}


def train_tokenizer(texts: Iterable[str], *, pattern: str = PATTERNS["qwen"], vocabulary: int = 1500) -> Tokenizer:
    """Train a byte-level BPE tokenizer that divides text as real ones do, with the special tokens of all templates."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)  # type: ignore[no-untyped-call]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _PLAIN])
    return tokenizer


def renderer_of(
    tokenizer: Tokenizer,
    manner: str,
    text: str | None = None,
    *,
    tools: Sequence[Mapping[str, Any]] | None = TOOLS,
    **arguments: Any,
) -> TemplateRenderer:
    """Make a renderer in the manner of a known template; `text`: another template's."""
    stops = tuple(id_ for id_ in map(tokenizer.token_to_id, STOPS[manner]) if id_ is not None)
    special = {"bos_token": BOS.get(manner, "<|begin_of_text|>"), "eos_token": STOPS[manner][0]}
    template = _compiled(TEMPLATES[manner] if text is None else text, tuple(special.items()), tuple(arguments.items()))
    return TemplateRenderer(template, TextCodec(tokenizer, stops), tools)


@cache
def _compiled(text: str, special: tuple[tuple[str, str], ...], arguments: tuple[tuple[str, Any], ...]) -> ChatTemplate:
    return ChatTemplate(text, dict(special), dict(arguments))


def odd_ids(tokenizer: Tokenizer, text: str, draw: random.Random) -> list[int]:
    """Return ids that decode to the text and are not those that the tokenizer gives it, as policies sample them."""
    odd: list[int] = []
    added = tokenizer.get_added_tokens_decoder()
    for id_ in tokenizer.encode(text, add_special_tokens=False).ids:
        piece = tokenizer.id_to_token(id_) or ""
        pieces = [tokenizer.token_to_id(character) for character in piece]
        is_cut = id_ not in added and len(piece) > 1 and draw.random() < 0.7 and None not in pieces
        odd += [piece for piece in pieces if piece is not None] if is_cut else [id_]
    return odd
