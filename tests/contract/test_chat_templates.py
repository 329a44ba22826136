"""Prompts have the tokens that transformers' apply_chat_template gives them, in every way of keeping a template."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer

from coordinator.data.prompts import load_prompts
from tandem_config.schema import DataSection
from tandem_files.tokenizer import TextCodec

MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|eot|>", "[INST]", "[/INST]"]

# In the manner of Qwen: no BOS, tools as JSON, an argument that changes the beginning of the answer.
CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant\\n' }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' ~ (call.function.arguments | tojson(indent=2)) ~ '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# In the manner of Llama 3: BOS from the template, and the date.
HEADERS = """{{- bos_token }}
{%- if not date is defined %}
    {%- set date = strftime_now("%d %b %Y") %}
{%- endif %}
{%- for message in messages %}
    {% generation %}
    {{- '<|head|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot|>' }}
    {% endgeneration %}
{%- endfor %}
{{- 'Today: ' + date }}
{%- if add_generation_prompt %}
<|head|>assistant

{% endif %}
"""
# In the manner of Mistral: it refuses what it was not made for.
INSTRUCT = """{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate!') }}{% endif %}{% if m['role'] == 'user' %}\
{{ '[INST] ' + m['content'] + ' [/INST]' }}\
{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"""

USER = {"role": "user", "content": "  What is <b>2+2</b>? “é” <|im_end|>\n"}
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [USER, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3+3?"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <é>", "parameters": {"type": "object"}}}]
CALLED = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "4"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder, whose tokenizer puts BOS before texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = [CHATML, HEADERS, "What is the answer? assistant user system"]
    trainer = BpeTrainer(vocab_size=400, special_tokens=MARKS, initial_alphabet=alphabet)  # type: ignore[no-untyped-call]
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": 512, "eos_token_id": 1}))
    configure(tmp_path)
    return tmp_path


def configure(folder: Path, **settings: object) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        **settings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def ours(folder: Path, messages: object, tools: object = None, **settings: object) -> tuple[list[int], str]:
    """Load a file of one row. Returns: its prompt's tokens and text."""
    (folder / "rows.jsonl").write_text(json.dumps({"m": messages, "tools": tools}), encoding="utf-8")
    keys = {"prompt_key": "m", "answer_key": None, "tools_key": "tools"}
    data = DataSection.model_validate({"train": folder / "rows.jsonl", **keys, **settings})
    (prompt,) = load_prompts(data, "train", TextCodec.from_folders(folder))
    return list(prompt.token_ids), prompt.text


def theirs(folder: Path, messages: object, tools: object = None, **arguments: Any) -> tuple[list[int], str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    options = {"tools": tools, "add_generation_prompt": True, **arguments}
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    return ids, tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("template", [CHATML, HEADERS, INSTRUCT], ids=["chatml", "headers", "instruct"])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], TURNS], ids=["user", "system", "turns"])
def test_tokens_are_those_of_transformers(folder: Path, template: str, messages: list[dict[str, str]]) -> None:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if template == INSTRUCT and messages[0] is SYSTEM:
        with pytest.raises(
            ValueError, match=r"rows\.jsonl:1: the chat template fails on its messages: Roles must altern"
        ):
            ours(folder, messages)
        return
    found = ours(folder, messages)
    assert found == theirs(folder, messages)
    assert found[0].count(0) == template.count("bos_token")


@pytest.mark.parametrize("messages", [[USER], CALLED], ids=["asked", "called"])
def test_tools_and_arguments_reach_the_template(folder: Path, messages: list[dict[str, Any]]) -> None:
    configure(folder, chat_template=CHATML)
    arguments = {"enable_thinking": False}
    found = ours(folder, messages, TOOLS, chat_template_kwargs=arguments)
    assert found == theirs(folder, messages, TOOLS, **arguments)
    assert '"description": "Adds <é>"' in found[1]
    assert found[1].endswith("<think>\n\n</think>\n\n")
    assert ours(folder, messages, json.dumps(TOOLS), chat_template_kwargs=arguments) == found


def test_an_argument_goes_before_a_special_token(folder: Path) -> None:
    configure(folder, chat_template=HEADERS)
    arguments = {"bos_token": "<|im_start|>", "date": "1 May"}
    assert ours(folder, [USER], chat_template_kwargs=arguments) == theirs(folder, [USER], **arguments)


WAYS = ["text", "list", "file", "file beside text", "files"]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["without tools", "with tools"])
@pytest.mark.parametrize("way", WAYS)
def test_templates_are_found_wherever_they_may_be(folder: Path, way: str, tools: object) -> None:
    named = [{"name": "default", "template": INSTRUCT}, {"name": "tool_use", "template": CHATML}]
    if way in ("text", "list"):
        configure(folder, chat_template=CHATML if way == "text" else named)
    if way == "file beside text":
        configure(folder, chat_template=INSTRUCT)
    if way.startswith("file"):
        (folder / "chat_template.jinja").write_text(INSTRUCT if way == "files" else CHATML)
    if way == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(CHATML)
    assert ours(folder, [USER], tools) == theirs(folder, [USER], tools)


@pytest.mark.parametrize("legacy", [False, True])
def test_special_tokens_are_found_as_older_releases_kept_them(folder: Path, legacy: bool) -> None:
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "[INST]"}}))
    decoder = {} if legacy else {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}}
    configure(folder, chat_template=INSTRUCT, **decoder)
    found = ours(folder, [USER])
    assert found == theirs(folder, [USER])
    assert found[1].startswith("[INST][INST]" if legacy else "<s>[INST]")


def test_a_text_may_become_a_message_under_a_system_prompt(folder: Path) -> None:
    configure(folder, chat_template=CHATML)
    settings = {"prompt_as": "user_message", "system_prompt": SYSTEM["content"]}
    assert ours(folder, USER["content"], **settings) == theirs(folder, [SYSTEM, USER])
    own = {"role": "system", "content": "Mine."}
    assert ours(folder, [own, USER], **settings) == theirs(folder, [own, USER])
    assert ours(folder, USER["content"])[0][0] == 0  # as text: the tokenizer's BOS, no template


def test_templates_of_the_users(folder: Path, tmp_path: Path) -> None:
    configure(folder, chat_template=[{"name": "default", "template": CHATML}, {"name": "own", "template": HEADERS}])
    path = tmp_path / "mine.jinja"
    path.write_text(HEADERS, encoding="utf-8")
    expected = theirs(folder, [USER], chat_template=HEADERS)
    for choice in (str(path), HEADERS, "own"):
        assert ours(folder, [USER], chat_template=choice) == expected


BAD_CHOICES: list[tuple[dict[str, object], object, str]] = [
    ({}, [USER], r"rows\.jsonl:1: holds messages, which need a chat template: .* has none; set data\.chat_template"),
    ({"chat_template": "none"}, [USER], r"rows\.jsonl:1: holds messages, .*: set data\.chat_template: auto"),
    ({"chat_template": "chatml"}, [USER], r"data\.chat_template = chatml: is neither a path .* nor one of auto, none"),
    ({"chat_template": "gone.jinja"}, [USER], r"data\.chat_template = gone\.jinja: cannot be read: No such file"),
    ({"chat_template": "{% if %}"}, [USER], r"data\.chat_template: the template is not a valid template: line 1"),
    ({"chat_template": "{{ 1 / 0 }}"}, [USER], r"rows\.jsonl:1: the chat template fails on its messages: division by"),
    (
        {"chat_template": "{{ messages.append(1) }}"},
        [USER],
        r"rows\.jsonl:1: the chat template fails on its .* 'append' of 'list' object is uns",
    ),
    ({"system_prompt": "s"}, "2+2", r"rows\.jsonl:1: is a text, which data\.system_prompt cannot be put before"),
]


@pytest.mark.parametrize(("settings", "prompt", "message"), BAD_CHOICES, ids=[row[2][:40] for row in BAD_CHOICES])
def test_what_cannot_be_rendered_is_named(
    folder: Path, settings: dict[str, object], prompt: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ours(folder, prompt, **settings)


def test_tools_that_a_template_would_drop_are_refused(folder: Path) -> None:
    configure(folder, chat_template=INSTRUCT)
    with pytest.raises(ValueError, match="has tools, and the chat template does not write them"):
        ours(folder, [USER], TOOLS)
