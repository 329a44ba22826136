"""The models, the lengths and the layouts that are measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from trainer_service.measure.flops import BACKWARD, FlopCosts
from trainer_service.micro_batches.samples import IntArray, Samples
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

CONTEXT = 2048
UPDATES = 4
GROUP = 4  # completions of a prompt; TRL needs to know
LAYOUTS = {
    "tp1": Parallel(),
    "tp2": Parallel(tensor=2),
    "dp2": Parallel(data=2),
    "pp2": Parallel(pipeline=2),
}
LENGTHS = ("equal", "uniform", "long_tail")
# Deviation of the logarithm of long-tailed lengths, of which the longest is cut off at this many times the mean.
_SIGMA, _LONGEST = 1.2, 8


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the samples of its step."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    num_samples: int
    prompt: int  # tokens
    completion: int  # tokens, on average
    equal_completion: int | None = None  # where completions are equally long; None: as many
    apart: tuple[str, ...] = ()  # ways that are measured after the others, with what they are compared with

    def passes(self, ways: Sequence[str]) -> list[list[str]]:
        """Divide the ways into those whose processes are open at the same time.

        >>> SHAPES["100m"].passes(["ours_tp1", "ours_dp2", "padded", "trl", "floor"])
        [['ours_tp1', 'padded', 'trl', 'floor'], ['ours_dp2', 'padded', 'trl', 'floor']]
        """
        together = [way for way in ways if way not in self.apart]
        second = [way for way in ways if way in self.apart or not way.startswith("ours")]
        return [together, second] if any(way in self.apart for way in ways) else [together]

    def config(self) -> dict[str, Any]:
        """Make the config.json: Qwen3, tied, float32."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": True,
            "max_position_embeddings": CONTEXT,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "dtype": "float32",
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }

    def parameters(self) -> int:
        """Count the weights of all matrices; norms are not counted."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim
        return self.hidden * (self.layers * (attention + 3 * self.ffn) + self.vocabulary)


# "tiny" is for the benchmark's own test, the next is the demo's model and work. Equal completions of the largest are
# longer than others, which take minutes when padded: the floor has no optimizer, whose work is the same for any. All
# ways to train it together would take more than 24 GiB.
SHAPES = {
    "tiny": Shape(
        layers=2, hidden=32, ffn=48, heads=2, kv_heads=2, head_dim=16, vocabulary=64,
        num_samples=16, prompt=3, completion=4,
    ),
    "0.45m": Shape(
        layers=3, hidden=128, ffn=256, heads=4, kv_heads=2, head_dim=32, vocabulary=32,
        num_samples=1024, prompt=6, completion=4,
    ),
    "10m": Shape(
        layers=6, hidden=320, ffn=960, heads=4, kv_heads=2, head_dim=64, vocabulary=8192,
        num_samples=32, prompt=32, completion=64,
    ),
    "100m": Shape(
        layers=12, hidden=768, ffn=2048, heads=12, kv_heads=4, head_dim=64, vocabulary=32000,
        num_samples=16, prompt=16, completion=48, equal_completion=112, apart=("ours_dp2", "ours_pp2"),
    ),
}  # fmt: skip
DEFAULT_SHAPES = ("0.45m", "10m", "100m")


def completion_lengths(shape: Shape, lengths: str) -> IntArray:
    """Choose the completions' lengths: all equal, spread evenly up to twice the mean, or with a long tail.

    They are evenly spaced quantiles, so that a few samples have the distribution's spread, in a random order.
    """
    places = (np.arange(shape.num_samples) + 0.5) / shape.num_samples
    if lengths == "equal":
        return np.full(
            shape.num_samples, shape.completion if shape.equal_completion is None else shape.equal_completion
        )
    if lengths == "uniform":
        times = 2 * places
    else:
        times = np.exp(_SIGMA * np.array([NormalDist().inv_cdf(place) for place in places]))
        times = np.minimum(times / times.mean(), _LONGEST)
    order = np.random.default_rng(0).permutation(shape.num_samples)
    return np.maximum(1, np.rint(shape.completion * times)).astype(np.int64)[order]


def make_samples(shape: Shape, lengths: str) -> Samples:
    """Make the samples of a step: random tokens, groups of equal prompts, advantages that are 0 on average."""
    random = np.random.default_rng(1)
    num, completions = shape.num_samples, completion_lengths(shape, lengths)
    prompts = random.integers(2, shape.vocabulary, (num // GROUP, shape.prompt)).repeat(GROUP, 0)
    tokens = [
        np.concatenate([prompt, random.integers(2, shape.vocabulary, completion)])
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    rewards = random.normal(size=(num // GROUP, GROUP))
    advantages = (rewards - rewards.mean(1, keepdims=True)).ravel()
    return Samples(
        sample_ids=tuple(map(str, range(num))),
        update_index=np.arange(num) * UPDATES // num,
        prompt_lengths=np.full(num, shape.prompt),
        completion_lengths=completions,
        token_ids=np.concatenate(tokens),
        rollout_logprobs=np.full(int(completions.sum()), -np.log(shape.vocabulary), np.float32),
        advantages=advantages.astype(np.float32),
        trainable=np.ones(num, np.bool_),
    )


def step_flops(spec: ModelSpec, samples: Samples) -> float:
    """Count the floating-point operations of a step's matrix products, without a token of padding.

    A forward pass of the samples of all updates but the first (old log-probs), then forward and backward of all.
    """
    costs, late = FlopCosts.of(spec), samples.update_index > 0
    whole = costs.forward(samples.prompt_lengths, samples.completion_lengths)
    return (1 + BACKWARD) * whole + costs.forward(samples.prompt_lengths[late], samples.completion_lengths[late])


def write_model(shape: Shape, folder: Path) -> None:
    """Write a model folder with random weights and a tokenizer that knows every token."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**shape.config()), dtype=torch.float32).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(shape.vocabulary)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="t0", eos_token="t1").save_pretrained(folder)
