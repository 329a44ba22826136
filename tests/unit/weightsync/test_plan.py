"""The planner: exactly once, nothing twice, the same everywhere; shown by moving tensors in memory."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from servicekit.errors import ConfigError, Internal
from tests.kit.stores import canonical_tensors, cut, empty_like_rank, same, tiny_spec
from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec
from weightsync.plans.messages import cut_messages, route
from weightsync.plans.plan import TransferPlan, make_plan
from weightsync.transfer.coverage import Coverage
from weightsync.transfer.transports.packing import Packer

# A property moves every element of up to 48 ranks, for many layouts.
PROPERTY = pytest.mark.timeout(60)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": [1]}
trainers = st.builds(
    Parallel,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2]),
    virtual_pipeline=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2, 3]),
    context=st.sampled_from([1, 2]),
)
FAMILIES = ["qwen2", "qwen3", "llama", "qwen3_moe"]


def specs_of(families: list[str]) -> st.SearchStrategy[ModelSpec]:
    return st.builds(
        lambda family, tied, vocab, kv: tiny_spec(
            family, tie_word_embeddings=tied, vocab_size=vocab, num_key_value_heads=kv, **EXPERTS
        ),
        st.sampled_from(families),
        st.booleans(),
        st.integers(5, 130),
        st.sampled_from([1, 2, 4]),  # ranks of either side may share a KV head
    )


specs = specs_of(FAMILIES)


def elements_received(plan: TransferPlan, rank: int) -> int:
    mine = plan.ops[plan.ops["dst"] == rank]
    return int((mine["rows"] * mine["cols"]).sum())


def move(
    source: Layout, target: Layout, full: dict[str, torch.Tensor], max_elements: int
) -> list[dict[str, torch.Tensor]]:
    """Carries a plan out in memory."""
    senders = [Packer(source, cut(source, rank, full), "src") for rank in range(source.num_ranks)]
    stores = [empty_like_rank(target, rank) for rank in range(target.num_ranks)]
    for message in cut_messages(make_plan(source, target), max_elements):
        payload = torch.empty(senders[message.src].payload_bytes(message), dtype=torch.uint8)
        senders[message.src].pack(message, payload)
        Packer(target, stores[message.dst], "dst").unpack(message, payload)
    for rank, store in enumerate(stores):
        Coverage(target, rank, f"rank {rank}").zero_padding(store)
    return stores


@PROPERTY
@pytest.mark.parametrize("tp", [1, 2, 4])
@given(spec=specs, trainer=trainers, max_elements=st.sampled_from([1, 7, 100, 10**9]))
@settings(max_examples=15, deadline=None)
def test_what_arrives_is_what_the_target_layout_says(
    tp: int, spec: ModelSpec, trainer: Parallel, max_elements: int
) -> None:
    full = canonical_tensors(spec)
    source, target = megatron_layout(spec, trainer), sglang_layout(spec, Parallel(tensor=tp))
    for rank, store in enumerate(move(source, target, full, max_elements)):
        assert same(store, cut(target, rank, full)) == []


@PROPERTY
@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), trainer=trainers)
@settings(max_examples=5, deadline=None)
def test_there_and_back_is_the_identity(family: str, data: st.DataObject, trainer: Parallel) -> None:
    spec = data.draw(specs_of([family]))
    full = canonical_tensors(spec)
    layout = megatron_layout(spec, trainer)
    shards = move(hf_layout(spec), layout, full, 50)
    for rank, shard in enumerate(shards):
        assert same(shard, cut(layout, rank, full)) == []
    assert same(move(layout, hf_layout(spec), full, 50)[0], full) == []


@given(spec=specs, trainer=trainers, tp=st.sampled_from([1, 2, 4]))
@settings(max_examples=20, deadline=None)
def test_nothing_is_moved_twice(spec: ModelSpec, trainer: Parallel, tp: int) -> None:
    target = sglang_layout(spec, Parallel(tensor=tp))
    plan = make_plan(megatron_layout(spec, trainer), target)
    assert plan.redundancy() == 1.0
    assert all(elements_received(plan, rank) == target.elements_of(rank) for rank in range(tp))


def test_copies_of_the_source_share_the_load() -> None:
    spec = tiny_spec(num_hidden_layers=8)
    plan = make_plan(megatron_layout(spec, Parallel(data=4)), sglang_layout(spec, Parallel(tensor=1)))
    sent = np.zeros(4)
    np.add.at(sent, plan.ops["src"], plan.ops["rows"] * plan.ops["cols"])
    assert sent.max() / sent.mean() <= 1.10


def test_the_digest_depends_on_layouts_only_and_on_all_of_them() -> None:
    spec = tiny_spec()

    def digest(spec: ModelSpec, trainer: Parallel, tp: int) -> str:
        return make_plan(megatron_layout(spec, trainer), sglang_layout(spec, Parallel(tensor=tp))).digest

    base = digest(spec, Parallel(tensor=2), 2)
    assert digest(spec, Parallel(tensor=2), 2) == base
    others = [
        digest(spec, Parallel(), 2),
        digest(spec, Parallel(tensor=2), 1),
        digest(tiny_spec(vocab_size=34), Parallel(tensor=2), 2),
    ]
    assert base not in others


@PROPERTY
@given(
    expert=st.sampled_from([1, 2, 4]),
    expert_tensor=st.sampled_from([1, 2]),
    rollout_expert=st.sampled_from([1, 2]),
    max_elements=st.sampled_from([5, 10**9]),
)
@settings(max_examples=20, deadline=None)
def test_experts_arrive_whatever_the_expert_parallel_sizes(
    expert: int, expert_tensor: int, rollout_expert: int, max_elements: int
) -> None:
    spec = tiny_spec("qwen3_moe", **EXPERTS)
    full = canonical_tensors(spec)
    source = megatron_layout(spec, Parallel(tensor=2, pipeline=2, data=4, expert=expert, expert_tensor=expert_tensor))
    target = sglang_layout(spec, Parallel(tensor=2, expert=rollout_expert))
    for rank, store in enumerate(move(source, target, full, max_elements)):
        assert same(store, cut(target, rank, full)) == []


def test_models_that_differ_are_refused_by_name() -> None:
    wide = tiny_spec(intermediate_size=32)
    with pytest.raises(ConfigError, match=r"gate_proj.*24.*32"):
        make_plan(megatron_layout(tiny_spec(), Parallel()), sglang_layout(wide, Parallel()))
    tied = tiny_spec(tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        make_plan(megatron_layout(tied, Parallel()), sglang_layout(tiny_spec(), Parallel()))


def test_a_source_that_lacks_a_slice_is_caught() -> None:
    layout = megatron_layout(tiny_spec(), Parallel(tensor=2))
    holes = dataclasses.replace(layout, shards=layout.shards[1:])
    with pytest.raises(Internal, match="covers"):
        make_plan(holes, sglang_layout(tiny_spec(), Parallel()))


def test_messages_are_bounded_and_complete() -> None:
    plan = make_plan(megatron_layout(tiny_spec(), Parallel(tensor=2)), sglang_layout(tiny_spec(), Parallel()))
    messages = cut_messages(plan, 64)
    assert max(message.elements for message in messages) <= 64
    assert [message.sequence for message in messages] == list(range(len(messages)))
    assert sum(message.elements for message in messages) == int((plan.ops["rows"] * plan.ops["cols"]).sum())


def test_both_ends_of_every_hop_walk_the_same_order() -> None:
    plan = make_plan(megatron_layout(tiny_spec(), Parallel(tensor=2)), sglang_layout(tiny_spec(), Parallel(tensor=2)))
    messages = cut_messages(plan, 100)
    firsts = [2, 4, 6]  # three replicas of two ranks behind two trainer ranks
    orders = [[(hop.message.sequence, hop.hop) for hop in route(messages, 2, firsts, rank)] for rank in range(8)]
    assert all(order == sorted(order) for order in orders)
    sent = sum(hop.message.elements for hop in route(messages, 2, firsts, 0) + route(messages, 2, firsts, 1))
    assert sent == sum(message.elements for message in messages)  # the trainer feeds one replica, not three


def test_coverage_names_what_has_no_rule_and_what_has_no_parameter() -> None:
    layout = sglang_layout(tiny_spec(), Parallel())
    tensors = empty_like_rank(layout, 0)
    Coverage(layout, 0, "rollout-0/0").check(tensors)
    moved = {("surprise.buffer" if name == "model.norm.weight" else name): t for name, t in tensors.items()}
    with pytest.raises(ConfigError, match=r"surprise\.buffer.*model\.norm\.weight"):
        Coverage(layout, 0, "rollout-0/0").check(moved)
    reshaped = {**tensors, "model.norm.weight": torch.zeros(17)}
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has shape \(17,\)"):
        Coverage(layout, 0, "rollout-0/0").check(reshaped)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("qwen3", Parallel()),
        ("qwen3", Parallel(tensor=2)),
        ("qwen3", Parallel(tensor=4)),  # two ranks share a KV head
        ("qwen3_moe", Parallel(tensor=2, expert=2)),
        ("qwen3_moe", Parallel(tensor=4, expert=2)),
    ],
)
def test_from_a_replica_to_its_like_each_block_goes_to_its_own_place(family: str, size: Parallel) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8} if "moe" in family else {}
    layout = sglang_layout(tiny_spec(family, **experts), size)
    plan = make_plan(layout, layout)
    for field in ("param", "row", "col"):
        assert (plan.ops[f"src_{field}"] == plan.ops[f"dst_{field}"]).all(), field
    assert plan.redundancy() == 1.0
    sent = plan.elements_sent()
    assert sent.max() <= 1.1 * sent.mean()
