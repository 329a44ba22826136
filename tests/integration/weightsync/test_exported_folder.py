"""An exported folder is an ordinary one: transformers loads model and tokenizer from it, renders a chat, generates."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tandem_clients.formatting import prompt_format
from tandem_config.schema import DataSection
from tandem_files.exports import note_template, noted_template
from tandem_files.rows.reading import Row
from tandem_files.tokenizer import TextCodec
from tests.kit.folders import WORDS, write_tokenizer
from tests.kit.models import make_model
from weightsync.transfer.hf_files import write_folder

pytestmark = pytest.mark.integration
CHAT = "{% for message in messages %}{{ message['content'] }}={% endfor %}"
TOOLS = "tools:" + CHAT


def save_tokenizer(folder: Path) -> Path:
    """A tokenizer as transformers saves it, with two chat templates."""
    folder.mkdir()
    write_tokenizer(folder, WORDS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    tokenizer.chat_template = {"default": CHAT, "tool_use": TOOLS}
    tokenizer.save_pretrained(folder)
    return folder


def test_transformers_generates_from_an_export_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    model, tokens, out = make_model(tmp_path / "model"), save_tokenizer(tmp_path / "tokens"), tmp_path / "hf"
    write_folder(load_file(model / "model.safetensors"), model, out, tokenizer=tokens)
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == TOOLS
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "1+2"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "1+2="
    assert tokenizer.apply_chat_template(chat, tokenize=False, chat_template="tool_use") == "tools:1+2="
    prompt = torch.tensor([tokenizer("1+2=")["input_ids"]])
    assert prompt.tolist() == [[WORDS.index(character) for character in "1+2="]]
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).generate(prompt, max_new_tokens=5, do_sample=False)
        for folder in (model, out)
    )
    assert torch.equal(before, after)
    assert after.shape == (1, 9)


def test_transformers_renders_with_the_template_that_the_run_was_trained_with(tmp_path: Path) -> None:
    """The tokenizer has others, of which transformers would prefer that for tools."""
    model, tokens, out = make_model(tmp_path / "model"), save_tokenizer(tmp_path / "tokens"), tmp_path / "hf"
    settings = json.loads((tokens / "tokenizer_config.json").read_text())
    (tokens / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": CHAT}))
    own = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{{ tools }}\n"
    section = DataSection.model_validate({"train": "rows.jsonl", "chat_template": own, "tools_key": "tools"})
    formats = prompt_format(section, TextCodec.from_folders(model, tokens))
    note_template(tmp_path, formats.own_template)
    template = noted_template(tmp_path)
    write_folder(load_file(model / "model.safetensors"), model, out, tokenizer=tokens, template=template)
    chat, tools = [{"role": "user", "content": "1+2"}], [{"type": "function", "function": {"name": "f"}}]
    tokenizer = AutoTokenizer.from_pretrained(out)
    for with_tools in (None, tools):
        row = Row(file=out, number=1, prompt=chat, answer="", tools=with_tools, columns={})
        rendered = tokenizer.apply_chat_template(chat, tools=with_tools, tokenize=False, add_generation_prompt=True)
        assert rendered == formats.text(row).text
        assert rendered.startswith("<user>1+2")
