"""config.json as transformers reads it: either our engines compute the same, or the entry is refused by name."""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from servicekit.errors import ConfigError
from tests.kit.stores import tiny_spec
from weightsync.model.config import UnsupportedModel

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PLAIN = {"rope_type": "default"}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
FULL = ["full_attention"] * 4

# family, entries: what transformers and we make of them is compared
COMPUTED: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2", {"rope_theta": 1e6}),
    ("qwen2", {"rope_theta": 1000000}),
    ("qwen3", {"rope_parameters": PLAIN | {"rope_theta": 1e6}}),
    ("qwen3", {"rope_parameters": PLAIN, "rope_theta": 1e6}),
    ("llama", {"rope_theta": 1e6, "rope_parameters": PLAIN | {"rope_theta": 1e6}}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": None}),
    ("llama", {"rope_scaling": PLAIN | {"rope_theta": 1e6}}),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"factor": 32.0}}),
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **{k: LLAMA3[k] for k in list(LLAMA3)[1:]}}}),
    ("llama", {"rope_parameters": PLAIN, "rope_scaling": LLAMA3, "rope_theta": 5e5}),
    ("llama", {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rope_scaling": PLAIN | {"rope_theta": 5e5}}),
    (
        "llama",
        {
            "rope_scaling": {k: LLAMA3[k] for k in list(LLAMA3)[:-1]},
            "max_position_embeddings": 8192,  # is what the entry leaves out
            "rope_theta": 5e5,
        },
    ),
    # both spellings, also where the folder has both
    ("qwen2", {"rope_theta": 1e6, "rope_scaling": YARN | {"type": "yarn"}}),
    (
        "qwen2",
        {"rope_parameters": PLAIN | {"rope_theta": 1e6}, "rope_scaling": YARN | {"type": "yarn"}, "rope_theta": 1e6},
    ),
    ("qwen3", {"rope_parameters": YARN | {"rope_type": "yarn", "rope_theta": 1e6, "beta_fast": 16, "truncate": False}}),
    ("qwen3", {"rope_parameters": {"rope_type": "yarn", "factor": 4, "mscale": 0.8, "mscale_all_dim": 0.5}}),
    ("qwen3_moe", {**EXPERTS, "rope_parameters": YARN | {"rope_type": "yarn", "mscale": None, "beta_slow": 2.0}}),
    *(("llama", {"rope_scaling": {"type": kind, "factor": 4.0}, "rope_theta": 5e5}) for kind in ("linear", "dynamic")),
    ("qwen2", {"rope_parameters": {"rope_type": "dynamic", "factor": 4}}),
    ("qwen2", {"hidden_act": "silu"}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 28}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "layer_types": FULL, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    ("qwen3", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 0}),
    ("qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": None}),
    ("qwen3_moe", {**EXPERTS, "num_experts_per_tok": 1, "norm_topk_prob": False}),
    ("llama", {"sliding_window": 4}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # rotary scalings: unknown ones, and what SGLang does not compute as transformers does
    (
        "qwen2",
        {"rope_parameters": PLAIN | {"rope_theta": 1e6}, "rope_scaling": YARN | {"type": "longrope"}},
        "'longrope'",
    ),
    ("qwen3", {"rope_parameters": {"type": "proportional"}}, "rope_parameters asks for .* 'proportional'"),
    ("qwen3", {"rope_parameters": {"type": ["yarn"]}}, "rope_parameters asks for "),
    *(
        ("qwen2", {"rope_scaling": YARN | {"type": "yarn", key: value}}, named)
        for key, value, named in (
            ("attention_factor", 1.2, "yarn has attention_factor, .* 0.1 ln"),
            ("attn_factor", 2, "has attn_factor"),
            ("mscale_all_dim", 0, "mscale_all_dim is 0"),
            ("beta_fast", None, "beta_fast is None"),
            ("truncate", 1, "truncate is 1, not true or false"),
            ("factor", 0.5, "factor 0.5; it must be from 1"),
            ("factor", 1e300, "it must be from 1 to 1024"),
            ("factor", None, "factor is None"),
            ("original_max_position_embeddings", 0, "original_max_position_embeddings is 0"),
        )
    ),
    ("qwen2", {"rope_scaling": {"type": "yarn"}}, "rope_scaling of type yarn has no factor"),
    ("qwen2", {"rope_scaling": {"type": "linear", "factor": 4}}, "whole number 4 as factor, .* write 4.0"),
    ("qwen2", {"rope_scaling": {"type": "dynamic", "factor": 4.0, "alpha": 8.0}}, "has alpha"),
    (
        "qwen2",
        {"rope_scaling": {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 64}},
        "linear has orig",
    ),
    (
        "llama",
        {"original_max_position_embeddings": 32, "rope_scaling": YARN | {"type": "yarn"}},
        r"_embeddings 32 and rope_scaling\.original_max_position_embeddings 64 differ",
    ),
    # sequences that the scaling makes longer than the window
    (
        "qwen2",
        {
            "rope_scaling": YARN | {"type": "yarn"},
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 0,
        },
        "sliding_window 64, from layer 0",
    ),
    ("qwen3", {"rope_parameters": {"full_attention": PLAIN | {"rope_theta": 1e6}}}, "own for 'full_attention'"),
    ("qwen3", {"rope_parameters": "default"}, "rope_parameters is 'default'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("llama", {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
    # two bases
    (
        "llama",
        {"rope_theta": 1e6, "rope_parameters": PLAIN | {"rope_theta": 1e4}},
        r"rope_parameters\.rope_theta 10000, rope_theta 1000000 differ",
    ),
    (
        "llama",
        {"rope_theta": 1e4, "rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        r"rope_parameters\.rope_theta 500000, rope_theta 10000 differ",
    ),
    (
        "llama",
        {"rope_scaling": LLAMA3, "rope_parameters": PLAIN | {"rope_theta": 5e5}},
        r"rope_parameters\.rope_theta 500000 is ignored: rope_scaling replaces it",
    ),
    (
        "llama",
        {"original_max_position_embeddings": 64, "rope_scaling": LLAMA3},
        r"_embeddings 64 and rope_scaling\.original_max_position_embeddings 8192 differ",
    ),
    ("llama", {"rope_theta": 0}, "rope_theta is 0"),
    ("llama", {"rope_scaling": LLAMA3 | {"factor": -8.0}}, "factor is -8.0"),
    # activations
    *(("llama", {"hidden_act": name}, f"hidden_act '{name}'") for name in ("gelu", "relu", "gelu_pytorch_tanh")),
    ("qwen3_moe", {**EXPERTS, "hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ("qwen3", {"hidden_act": "swish"}, "write 'silu', which is the same"),  # SGLang refuses the other name
    # windows
    ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}, "from layer 2 on"),
    ("qwen3_moe", {**EXPERTS, "use_sliding_window": True, "sliding_window": 4}, "from layer 0 on"),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": [*FULL[:3], "sliding_attention"]},
        "from layer 3 on",
    ),
    ("qwen3", {"layer_types": [*FULL[:3], "sliding_attention"]}, "layer 3 has sliding_attention, but"),
    ("qwen3", {"layer_types": [*FULL[:3], "linear_attention"]}, "'linear_attention'"),
    # experts
    (
        "qwen3_moe",
        {**EXPERTS, "num_experts_per_tok": 1, "norm_topk_prob": True},
        "num_experts_per_tok 1 with norm_topk_prob: true",
    ),
    ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    ("qwen3_moe", {**EXPERTS, "num_experts": 0}, "num_experts is 0"),
    ("qwen3_moe", {**EXPERTS, "num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4"),
    ("qwen3_moe", {**EXPERTS, "mlp_only_layers": 1}, "mlp_only_layers is 1"),
    # quantized weights
    ("qwen2", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantized \(gptq\)"),
    ("qwen2", {"quantization_config": {"quant_method": "awq"}}, r"quantized \(awq\)"),
    ("qwen3", {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}}, r"quantized \(fp8\)"),
    # sizes
    ("qwen3", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("qwen3", {"num_attention_heads": 4, "num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of .* 3"),
    ("qwen3", {"hidden_size": -64}, "hidden_size is -64"),
    ("qwen3", {"hidden_size": 64.7}, "hidden_size is 64.7"),
    ("qwen3", {"hidden_size": float("inf")}, "hidden_size is inf"),
    ("qwen3", {"hidden_size": 10**400}, "hidden_size is a number of more than 40 digits"),
    ("qwen3", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("qwen3", {"num_hidden_layers": -3}, "num_hidden_layers is -3"),
    ("qwen3", {"vocab_size": 0}, "vocab_size is 0"),
    ("qwen3", {"vocab_size": True}, "vocab_size is True"),
    ("qwen3", {"head_dim": 7}, "head_dim is 7"),
    ("qwen3", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
]


@pytest.mark.parametrize(("family", "entries"), COMPUTED)
def test_what_is_accepted_is_what_transformers_reads(family: str, entries: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"model_type": family, "num_hidden_layers": 4, "hidden_size": 16, "intermediate_size": 24}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 33, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes | entries))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), tiny_spec(family, **entries)
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert ours.rope_factor == (rope["factor"] if rope["rope_type"] == "llama3" else 1.0)
    if ours.rope_scaling is None:
        assert rope["rope_type"] in ("default", "llama3")
    else:
        read = asdict(ours.rope_scaling)
        assert read.pop("kind") == rope["rope_type"]
        assert read.pop("original") == rope.get("original_max_position_embeddings", theirs.max_position_embeddings)
        defaults = {"beta_fast": 32, "beta_slow": 1, "mscale": None, "mscale_all_dim": None, "truncate": True}
        assert read == {name: rope.get(name, defaults.get(name)) for name in read}
    if ours.rope_factor != 1.0:
        assert all(rope[name] == value for name, value in LLAMA3.items() if name != "factor")
    assert theirs.hidden_act == "silu"
    if family == "qwen3_moe":
        assert theirs.sliding_window is None
        assert ours.norm_topk_prob == theirs.norm_topk_prob
    assert "sliding_attention" not in (getattr(theirs, "layer_types", None) or [])


@pytest.mark.parametrize(("family", "entries", "named"), REFUSED)
def test_what_would_be_computed_otherwise_is_refused_by_name(family: str, entries: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        tiny_spec(family, **entries)


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        tiny_spec("qwen2", rope_scaling=YARN | {"type": "longrope"})
    assert "remove the entry if the model was not trained with it" in caught.value.advice
    assert caught.value.advice in str(caught.value)


KEYS = sorted({key for _, entries, _ in REFUSED for key in entries} | {"max_window_layers", "sliding_window"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_type", "type", "factor", "rope_theta", "truncate", "x"]), inner, max_size=3
        )
    ),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(
    family=st.sampled_from(["qwen2", "qwen3", "qwen3_moe", "llama"]),
    entries=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3),
)
def test_any_json_is_read_or_refused(family: str, entries: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        assert tiny_spec(family, **(EXPERTS | entries if family == "qwen3_moe" else entries)).hidden_size > 0
