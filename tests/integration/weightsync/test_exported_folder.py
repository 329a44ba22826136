"""An exported folder is an ordinary one: transformers loads model and tokenizer from it, renders a chat, generates."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

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
