"""Two-digit addition as files: a model folder (headers only), its tokenizer, and data. For tests without engines."""

import json
import struct
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, EOS = 0, 1
CHARACTERS = "0123456789+="
VOCABULARY = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
# Elements of the fake model: what a rollout rank "receives" in a fake weight sync is 4 bytes of each.
NUM_PARAMETERS = 32 * 8


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<pad>", "<eos>", "<unk>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_safetensors(path: Path, shapes: dict[str, list[int]]) -> None:
    """A valid file of float32 zeros."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(offset))


def write_model(folder: Path, *, hidden: int = 8) -> Path:
    folder.mkdir(parents=True)
    config = {"model_type": "qwen3", "hidden_size": hidden, "vocab_size": 32, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    write_safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": [32, hidden]})
    write_tokenizer(folder)
    return folder


def write_data(path: Path, problems: list[tuple[int, int]]) -> Path:
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_of(prompt_ids: list[int]) -> str:
    """The right answer to a tokenized prompt."""
    letters = {index: token for token, index in VOCABULARY.items()}
    left, _, right = "".join(letters[index] for index in prompt_ids).rstrip("=").partition("+")
    return str(int(left) + int(right))


def encode(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]
