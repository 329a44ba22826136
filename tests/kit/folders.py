"""Model folders, data and configurations without an engine's weights (numpy only, no torch); the task is addition.

And small file systems, to fill them; stored samples of made-up runs.
"""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import SCHEMA, TRAINED, StoredSample, storable, table_of
from weightsync.layouts.hf import hf_layout
from weightsync.model.spec import ModelSpec

# 4 heads, 2 KV heads, FFN 12, 3 layers: every parallel size fails to divide one of them.
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 3,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 16,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32,
    "eos_token_id": 1,
}
WORDS = ["<pad>", "<eos>", "<unk>", *"0123456789+="]
EOS = 1
# Elements of the fakes' model; in a fake weight sync a rollout rank "receives" 4 bytes of each.
NUM_PARAMETERS = 32 * 8
Arrays = dict[str, "np.ndarray[Any, Any]"]


def zeros(shapes: Mapping[str, Sequence[int]]) -> Arrays:
    """Make float32 zeros of these shapes."""
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def tensors(config: dict[str, Any]) -> Arrays:
    """Make every tensor that the configuration implies, as zeros."""
    layout = hf_layout(ModelSpec.from_config(config))
    return zeros(dict(zip(layout.params, layout.param_shapes, strict=True)))


def write_model(folder: Path, **changes: Any) -> Path:
    """Write a model folder with one weight file; `changes` go into config.json only, None removes a key."""
    return _write(folder, {**CONFIG, **changes}, tensors(CONFIG))


def write_small_model(folder: Path, hidden: int = 8) -> Path:
    """Write a folder with one tensor, for the fakes' tests."""
    config = {"model_type": "qwen3", "hidden_size": hidden, "vocab_size": 32, "eos_token_id": EOS}
    _write(folder, config, zeros({"model.embed_tokens.weight": [32, hidden]}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


def _write(folder: Path, config: dict[str, Any], arrays: Arrays) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept), encoding="utf-8")
    write_safetensors(folder / "model.safetensors", arrays)
    write_tokenizer(folder, WORDS)
    return folder


def write_safetensors(path: Path, arrays: Arrays) -> None:
    """Write a safetensors file as transformers marks it."""
    save_file(arrays, path, metadata={"format": "pt"})


def write_sharded(folder: Path, **changes: Any) -> Path:
    """Write what write_model writes, in two shards with an index."""
    write_model(folder, **changes)
    (folder / "model.safetensors").unlink()
    everything = tensors(CONFIG)
    names = sorted(everything)
    halves = {"model-1.safetensors": names[: len(names) // 2], "model-2.safetensors": names[len(names) // 2 :]}
    for file, part in halves.items():
        write_safetensors(folder / file, {name: everything[name] for name in part})
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def write_tokenizer(folder: Path, words: list[str]) -> None:
    """Write a tokenizer with one token per character."""
    unknown = "<unk>" if "<unk>" in words else words[0]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([word for word in words if word.startswith("<")])
    tokenizer.save(str(folder / "tokenizer.json"))


def encode(text: str) -> list[int]:
    """Tokenize a text of WORDS."""
    return [WORDS.index(character) for character in text]


def answer_of(prompt_ids: list[int]) -> str:
    """Return the right answer to a tokenized prompt."""
    left, _, right = "".join(WORDS[index] for index in prompt_ids).rstrip("=").partition("+")
    return str(int(left) + int(right))


def write_data(path: Path, problems: Sequence[tuple[int, int]]) -> Path:
    """Write a JSONL file of these additions."""
    return _write_rows(path, [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in problems])


def write_rows(path: Path, count: int = 8, prompt: str | None = None) -> Path:
    """Write a JSONL file of rows with this prompt, or, up to a hundred, with different ones of equal length."""
    sums = [f"{number // 10 % 10}+{number % 10}=" for number in range(12, 12 + count)]
    return _write_rows(path, [{"prompt": text if prompt is None else prompt, "answer": "3"} for text in sums])


def different(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with other sums of the same length for "1+2=" where rows are equal; up to 80."""
    sums = [f"{left}+{right}=" for left in range(9, 1, -1) for right in range(10)]
    texts = [json.dumps(row) for row in rows]
    seen: set[str] = set()
    for place, text in enumerate(texts):
        texts[place] = text.replace("1+2=", sums[place % len(sums)]) if text in seen else text
        seen.add(text)
    return [json.loads(text) for text in texts]


def _write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """Write a configuration that passes every check, with a model and data beside it; `sections` are merged in."""
    if not (folder / "model").exists():
        write_model(folder / "model")
    if not (folder / "train.jsonl").exists():
        write_rows(folder / "train.jsonl")
    data: dict[str, Any] = {
        "run": {"output_dir": str(folder / "runs"), "name": "tiny", "iterations": 2},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "grpo": {"max_new_tokens": 4, "prompts_per_iteration": 4, "group_size": 4},
    }
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump(data), encoding="utf-8")
    return file


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Make a folder a file system of a size that mount knows ("4m"); skip the test where that is not allowed."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily: a test that failed may have left processes in it for a moment.
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def held(*paths: Path) -> Iterator[None]:
    """Mount files or folders onto themselves, so that they cannot be removed; where what they are in may be renamed to.

    Skip the test where that is not allowed.
    """
    places = {path.name for path in paths}
    try:
        for path in paths:
            done = subprocess.run(["mount", "--bind", path, path], capture_output=True, text=True)
            if done.returncode != 0:
                pytest.skip(f"nothing can be mounted: {done.stderr.strip()}")
        yield
    finally:
        mounted = [line.split(" ")[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        for place in mounted:
            if Path(place).name in places and str(paths[0].parents[-2]) in place:
                subprocess.run(["umount", "--lazy", place], check=True)


def fill(folder: Path) -> None:
    """Take every byte that is left."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(bytes(size))


def stored(group: int = 0, sample: int = 0, **changes: Any) -> StoredSample:
    """Make a stored sample of iteration 1."""
    values: dict[str, Any] = {
        "kind": "train",
        "iteration": 1,
        "group_id": f"i1.g{group}.row{group + 1}",
        "sample": sample,
        "source": "train.jsonl",
        "row": group + 1,
        "prompt": "1+2=",
        "completion": "3<eos>",
        "answer": "3",
        "reward": 1.0,
        "advantage": 0.5,
        "prompt_tokens": 4,
        "num_tokens": 2,
        "finish_reason": "stop",
        "use": TRAINED,
        "policy_version": 0,
    }
    return StoredSample(**values | changes)


def write_samples(folder: SampleFolder, iteration: int, kind: str, samples: Sequence[StoredSample]) -> int:
    """Store samples. Returns: the file's bytes."""
    columns = {name: [getattr(sample, name) for sample in samples] for name in SCHEMA.names}
    columns["prompt"] = [storable(text) for text in columns["prompt"]]
    for name in ("reward_parts", "errors"):
        columns[name] = [list(values.items()) for values in columns[name]]
    for name in ("version_spans", "masked_spans"):
        columns[name] = [[asdict(span) for span in spans] for spans in columns[name]]
    return folder.write(iteration, kind, table_of(len(samples), **columns))
