"""Layouts against the facts that comparable systems got wrong."""

from typing import Any

import pytest
import torch

from servicekit.errors import ConfigError
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.stores import canonical_tensors, cut, tiny_spec
from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.registry import layout_of
from weightsync.layouts.sglang import padded_vocabulary, sglang_layout
from weightsync.model.spec import ModelSpec
from weightsync.plans.participants import Participants

QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"


def test_megatron_fuses_qkv_by_query_group() -> None:
    spec = tiny_spec()
    full = canonical_tensors(spec)
    got = cut(megatron_layout(spec, Parallel(tensor=2)), 1, full)[QKV.format(0)]
    q, k, v = (full[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    # Rank 1 of 2 has the second of two groups: q heads 2 and 3, k head 1, v head 1; head_dim 8.
    assert torch.equal(got, torch.cat([q[16:32], k[8:16], v[8:16]]))


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 2), (1, 4), (2, 4), (2, 8)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_megatron_cuts_query_groups_that_ranks_share_evenly(family: str, kv_heads: int, tp: int) -> None:
    spec = tiny_spec(family, num_attention_heads=8, num_key_value_heads=kv_heads)
    full = canonical_tensors(spec)
    rows = []
    for group in range(kv_heads):
        q, k, v = (full[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv")
        each = 8 // kv_heads * 8
        rows += [q[group * each : (group + 1) * each], k[group * 8 : group * 8 + 8], v[group * 8 : group * 8 + 8]]
    layout = megatron_layout(spec, Parallel(tensor=tp))
    shares = [cut(layout, rank, full)[QKV.format(1)] for rank in range(tp)]
    assert len({share.shape for share in shares}) == 1
    assert torch.equal(torch.cat(shares), torch.cat(rows))
    if family == "qwen2":
        bias = QKV.format(1).replace("weight", "bias")
        assert layout.parameters_of(tp - 1)[bias] == (shares[0].shape[0],)


def test_sglang_replicates_neighbouring_kv_heads() -> None:
    spec = tiny_spec()
    full = canonical_tensors(spec)
    layout = sglang_layout(spec, Parallel(tensor=4))
    k = full["model.layers.2.self_attn.k_proj.weight"]
    for rank, head in enumerate([0, 0, 1, 1]):  # rank // sharers, not rank % heads
        qkv = cut(layout, rank, full)["model.layers.2.self_attn.qkv_proj.weight"]
        assert torch.equal(qkv[8:16], k[head * 8 : head * 8 + 8])


def test_gate_and_up_are_cut_apart_on_each_side() -> None:
    spec = tiny_spec()
    full = canonical_tensors(spec)
    got = cut(sglang_layout(spec, Parallel(tensor=2)), 1, full)["model.layers.3.mlp.gate_up_proj.weight"]
    gate, up = (full[f"model.layers.3.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(got, torch.cat([gate[12:], up[12:]]))


def test_pipeline_stages_number_their_layers_locally() -> None:
    spec = tiny_spec()
    full = canonical_tensors(spec)
    stage_one = cut(megatron_layout(spec, Parallel(pipeline=2)), 1, full)
    norm = "input_layernorm.weight"
    assert torch.equal(stage_one[f"decoder.layers.0.{norm}"], full[f"model.layers.2.{norm}"])
    assert "embedding.word_embeddings.weight" not in stage_one


def test_tied_output_layer_on_the_last_stage_is_an_alias_and_no_source() -> None:
    spec = tiny_spec(tie_word_embeddings=True)
    layout = megatron_layout(spec, Parallel(pipeline=2))
    aliases = layout.shards[layout.shards["alias"]]
    assert {layout.params[p] for p in aliases["param"]} == {"output_layer.weight"}
    assert set(aliases["rank"]) == {1}
    assert "lm_head.weight" not in layout.tensors


@pytest.mark.parametrize(
    ("vocab", "tp", "expected"), [(33, 1, 64), (64, 2, 64), (65, 2, 128), (32, 3, 192), (151936, 8, 151936)]
)
def test_sglang_pads_the_vocabulary(vocab: int, tp: int, expected: int) -> None:
    assert padded_vocabulary(tiny_spec(vocab_size=vocab), tp) == expected


def test_a_rank_with_padding_only_still_has_the_parameter() -> None:
    spec = tiny_spec(vocab_size=32)
    layout = sglang_layout(spec, Parallel(tensor=2))  # 64 rows, rank 1 has none of the 32 true ones
    assert layout.parameters_of(1)["model.embed_tokens.weight"] == (32, 16)
    assert torch.equal(cut(layout, 1, canonical_tensors(spec))["lm_head.weight"], torch.zeros(32, 16))


@pytest.mark.parametrize(
    ("changes", "parallel", "named"),
    [
        ({}, Parallel(tensor=3), "KV heads"),
        ({"num_key_value_heads": 4, "num_attention_heads": 12}, Parallel(tensor=6), "KV heads = 4 and .* 6"),
        ({}, Parallel(tensor=8), "attention heads = 4"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 2},
            Parallel(tensor=8),
            "query, key and value rows = 20",
        ),
        ({"intermediate_size": 25}, Parallel(tensor=2), "FFN"),
        ({}, Parallel(pipeline=3), "4 layers"),
        ({}, Parallel(expert=2), "no experts"),
    ],
)
def test_sizes_that_do_not_divide_are_named(changes: dict[str, Any], parallel: Parallel, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        megatron_layout(tiny_spec(**changes), parallel)


def test_the_unused_dense_size_of_a_mixture_need_not_divide() -> None:
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 14, "intermediate_size": 45}
    spec = tiny_spec("qwen3_moe", **sizes)
    for layout in (sglang_layout(spec, Parallel(tensor=2, expert=2)), megatron_layout(spec, Parallel(tensor=2))):
        assert not [name for name in layout.tensors if name.endswith("mlp.up_proj.weight")]
    mixed = tiny_spec("qwen3_moe", **sizes, mlp_only_layers=[1])
    with pytest.raises(ConfigError, match="FFN"):
        sglang_layout(mixed, Parallel(tensor=2))


def test_sglang_refuses_tp_that_kv_heads_do_not_divide() -> None:
    spec = tiny_spec(num_attention_heads=12, num_key_value_heads=4, intermediate_size=24)
    with pytest.raises(ConfigError, match="KV heads = 4"):
        sglang_layout(spec, Parallel(tensor=6))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": "qwen3", "num_attention_heads": 4}, "max_position_embeddings"),
    ],
)
def test_unsupported_models_are_named(config: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelSpec.from_config(config)


def test_qwen2_has_qkv_biases_and_no_qk_norm() -> None:
    names = hf_layout(tiny_spec("qwen2")).tensors
    assert "model.layers.0.self_attn.k_proj.bias" in names
    assert "model.layers.0.self_attn.q_norm.weight" not in names


def moe_spec(**changes: object) -> ModelSpec:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "mlp_only_layers": [1]}
    return tiny_spec("qwen3_moe", **{**experts, **changes})


def test_experts_are_numbered_locally_by_megatron_and_stacked_by_sglang() -> None:
    spec = moe_spec()
    full = canonical_tensors(spec)
    # Ranks 0..3 of one stage: expert tensor 1, expert 2 -> ranks 1 and 3 hold experts 2 and 3.
    layout = megatron_layout(spec, Parallel(tensor=2, data=2, expert=2))
    for rank in (1, 3):
        got = cut(layout, rank, full)["decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"]
        gate, up = (full[f"model.layers.2.mlp.experts.3.{name}_proj.weight"] for name in ("gate", "up"))
        assert torch.equal(got, torch.cat([gate, up]))
    stacked = cut(sglang_layout(spec, Parallel(tensor=2)), 1, full)["model.layers.2.mlp.experts.w2_weight"]
    assert stacked.shape == (4, 16, 3)
    assert torch.equal(stacked[3], full["model.layers.2.mlp.experts.3.down_proj.weight"][:, 3:])


def test_expert_tensor_parallelism_cuts_the_experts_own_ffn() -> None:
    spec = moe_spec()
    full = canonical_tensors(spec)
    layout = megatron_layout(spec, Parallel(tensor=2, data=2, expert=2, expert_tensor=2))
    # Rank 3: expert tensor rank 1 of expert rank 1.
    got = cut(layout, 3, full)["decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight"]
    assert torch.equal(got, full["model.layers.0.mlp.experts.2.down_proj.weight"][:, 3:])


def test_sglang_expert_parallelism_gives_each_rank_whole_experts() -> None:
    spec = moe_spec()
    full = canonical_tensors(spec)
    stacked = cut(sglang_layout(spec, Parallel(tensor=2, expert=2)), 1, full)["model.layers.3.mlp.experts.w13_weight"]
    gate, up = (full[f"model.layers.3.mlp.experts.2.{name}_proj.weight"] for name in ("gate", "up"))
    assert stacked.shape == (2, 12, 16)
    assert torch.equal(stacked[0], torch.cat([gate, up]))


def test_dense_layers_of_a_mixture_have_an_ordinary_mlp() -> None:
    names = hf_layout(moe_spec()).tensors
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert "model.layers.1.mlp.gate.weight" not in names
    assert "model.layers.0.mlp.gate.weight" in names


def test_the_engine_that_sizes_name_has_the_layout_and_else_that_of_the_side() -> None:
    spec = tiny_spec()
    sglang, megatron = sglang_layout(spec, Parallel(tensor=2)), megatron_layout(spec, Parallel(tensor=2))
    assert layout_of("megatron", spec, Parallel(tensor=2, engine="sglang")).params == sglang.params
    assert layout_of("megatron", spec, Parallel(tensor=2)).params == megatron.params
    assert sglang.params != megatron.params
    with pytest.raises(ConfigError, match="no layout of engine 'vllm' in this release, which has megatron, sglang"):
        layout_of("sglang", spec, Parallel(engine="vllm"))


def test_sizes_keep_their_engine_on_the_wire_and_a_checkpoint_has_sizes_only() -> None:
    named = Parallel(tensor=2, loss_counts=True, engine="sglang")
    assert Parallel.from_proto(named.to_proto()) == named
    assert Parallel(**named.sizes()) == Parallel(tensor=2, loss_counts=True)  # type: ignore[arg-type]
    trainer, (one, other) = Parallel().to_proto(), (Parallel(), Parallel(engine="sglang"))
    replicas = [pb.ReplicaSpec(name=f"r{i}", parallel=sizes.to_proto()) for i, sizes in enumerate((one, other, one))]
    chains = Participants.of_round(pb.Round(trainer=trainer, replicas=replicas)).chains()
    assert chains == {one: ["r0", "r2"], other: ["r1"]}
