"""What ModelSpec reads of a config.json beyond sizes: rotary scaling, and experts in both spellings."""

import math
from typing import Any

import pytest

from servicekit.errors import ConfigError
from tests.kit.stores import tiny_spec
from weightsync.layouts.hf import hf_layout

ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 6}


@pytest.mark.parametrize(
    ("config", "factor"),
    [
        ({}, 1.0),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1.0),
        ({"rope_scaling": None}, 1.0),
        ({"rope_parameters": {**ROPE, "rope_theta": 500000.0}}, 8.0),
        ({"rope_scaling": {**ROPE, "factor": 32.0}, "rope_theta": 500000.0}, 32.0),
    ],
)
def test_llama_3_scaling_is_read_in_both_spellings(config: dict[str, Any], factor: float) -> None:
    assert tiny_spec("llama", **config).rope_factor == factor


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"type": "longrope", "factor": 2.0}, "'longrope'"),
        ({**ROPE, "low_freq_factor": 2.0}, "low_freq_factor 2.0"),
        ({**ROPE, "original_max_position_embeddings": 4096}, "original_max_position_embeddings 4096"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    ],
)
def test_another_scaling_is_refused_by_name(rope: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny_spec("llama", rope_scaling=rope)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 64),  # the config's own is longer
        ({"type": "linear", "factor": 2.5}, 160),
        ({"type": "dynamic", "factor": 4}, 256),
    ],
)
def test_a_scaling_makes_the_longest_sequence_longer(scaling: dict[str, Any], longest: int) -> None:
    assert tiny_spec("llama", rope_scaling=scaling).max_positions == longest


def test_models_with_other_scalings_are_not_the_same_and_without_one_keep_their_fingerprint() -> None:
    """A checkpoint from before there were scalings is resumed."""
    scalings = [None, *({"type": "yarn", "factor": 4.0, "beta_fast": beta} for beta in (16, 32))]
    first, *scaled = [tiny_spec("llama", rope_scaling=scaling).fingerprint() for scaling in scalings]
    assert len({first, *scaled}) == 3
    assert "rope_scaling" not in first


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
@pytest.mark.parametrize("normalised", [False, True])
def test_experts_are_read_in_both_spellings(name: str, normalised: bool) -> None:
    spec = tiny_spec("qwen3_moe", **EXPERTS, **{name: 4}, norm_topk_prob=normalised)
    assert (spec.num_experts, spec.norm_topk_prob) == (4, normalised)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_elements_are_those_of_all_matrices(family: str, tied: bool) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]}
    spec = tiny_spec(family, tie_word_embeddings=tied, **experts if family == "qwen3_moe" else {})
    shapes = hf_layout(spec).param_shapes
    assert spec.num_elements == sum(math.prod(shape) for shape in shapes if len(shape) == 2)
