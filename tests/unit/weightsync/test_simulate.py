"""The simulation of a round: the real order of messages, links that are shared, what a slow or dead replica costs."""

import dataclasses

import pytest

from tests.kit.stores import tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import preset
from weightsync.plans.cost import MessageSizes, Speeds, predict
from weightsync.plans.messages import cut_messages, route
from weightsync.plans.plan import make_plan
from weightsync.simulate.clock import Clock, Machine, SimulatedLink
from weightsync.simulate.phases import SimulatedFleet, SlowReplica
from weightsync.simulate.ranks import hops_by_rank
from weightsync.simulate.round import ReplicaDeath, RoundScenario, simulate
from weightsync.transfer.transports import packing

# Links only: what remains is bytes / bandwidth, which a reader can work out.
FREE = Speeds(
    trainer_link=1e9, rollout_link=1e9, latency_s=0, rpc_s=0, copy=1e18, digest=1e18, op_s=0, segment_s=0, cores=None
)


def scene(
    replicas: int = 1, speeds: Speeds = FREE, *, tp: int = 1, max_elements: int = 2**20, **changes: object
) -> RoundScenario:
    spec = dataclasses.replace(preset("qwen2.5-1.5b"), num_layers=4)
    plan = make_plan(megatron_layout(spec, Parallel(tensor=2)), sglang_layout(spec, Parallel(tensor=tp)))
    messages = cut_messages(plan, max_elements)
    faults = {name: changes.pop(name) for name in ("death", "lease_s", "formation_s") if name in changes}
    stage = SimulatedFleet(plan=plan, messages=messages, dtype_bytes=2, replicas=replicas, speeds=speeds, **changes)  # type: ignore[arg-type]
    return RoundScenario(fleet=stage, **faults)  # type: ignore[arg-type]


def shard_bytes(one: RoundScenario) -> int:
    return one.fleet.plan.target.elements_of(0) * 2


def test_a_receiver_s_link_bounds_a_transfer_to_one_rank() -> None:
    one = scene()
    assert simulate(one).seconds["transfer"] == pytest.approx(shard_bytes(one) / 1e9, rel=0.01)


def test_senders_share_the_work_where_their_links_are_slower() -> None:
    slow_trainer = dataclasses.replace(FREE, trainer_link=0.25e9)
    one = scene(speeds=slow_trainer)
    assert simulate(one).seconds["transfer"] == pytest.approx(shard_bytes(one) / 2 / 0.25e9, rel=0.05)


def test_the_chain_costs_one_message_per_replica_and_no_further_egress() -> None:
    one, many = simulate(scene(3)), simulate(scene(9))
    largest_s = max(message.elements for message in scene().fleet.messages) * 2 / 1e9
    assert many.trainer_egress_bytes == one.trainer_egress_bytes
    extra = many.seconds["transfer"] - one.seconds["transfer"]
    assert extra == pytest.approx(6 * largest_s, rel=0.1)
    assert set(many.received_bytes.values()) == {shard_bytes(scene())}


def test_each_rank_has_the_hops_of_the_executor() -> None:
    one = scene(3, tp=2)
    for rank, hops in enumerate(hops_by_rank(one.fleet.messages, 2, 2, 3)):
        expected = route(one.fleet.messages, 2, [2, 4, 6], rank)
        assert [(h.message.sequence, h.hop, h.sender, h.receiver) for h in hops] == [
            (h.message.sequence, h.hop, h.sender, h.receiver) for h in expected
        ]


def test_messages_are_cut_into_segments_as_the_packer_does() -> None:
    import torch

    spec = tiny_spec(hidden_size=512, intermediate_size=1024, vocab_size=300)
    source, target = megatron_layout(spec, Parallel(tensor=2)), sglang_layout(spec, Parallel(tensor=2))
    plan = make_plan(source, target)
    messages = cut_messages(plan, 400_000)
    sizes = MessageSizes.of(plan, messages, 4, "cpu")
    for side, layout in (("src", source), ("dst", target)):
        packers = [
            packing.Packer(layout, {n: torch.zeros(s) for n, s in layout.parameters_of(rank).items()}, side)  # type: ignore[arg-type]
            for rank in range(2)
        ]
        for index, message in enumerate(messages):
            packer = packers[getattr(message, side)]
            segments = packer.segments(message)
            staged = [segment for segment in segments if segment.lent is None]
            assert sizes.segments[index] == len(segments)
            assert getattr(sizes, f"staged_{side}")[index] == packer.staged_bytes(message)
            assert getattr(sizes, f"staged_{side}_ops")[index] == sum(len(segment.blocks) for segment in staged)


def test_a_slow_replica_slows_itself_and_those_behind_it() -> None:
    even, slow = simulate(scene(4)), simulate(scene(4, slow=(SlowReplica(replica=2, factor=4),)))
    assert slow.transfers_s[2] > 3 * even.transfers_s[2]
    assert slow.transfers_s[3] >= slow.transfers_s[2]
    assert slow.slowest_replica in (2, 3)
    # It stalls those before it only by what they hold for it.
    assert slow.transfers_s[0] < slow.transfers_s[2]


@pytest.mark.parametrize("at", ["prepare", "pause", "transfer", "verify", 0.05])
def test_a_death_before_commit_costs_the_others_a_second_round(at: str | float) -> None:
    result = simulate(scene(3, death=ReplicaDeath(replica=1, at=at), lease_s=5.0, formation_s=0.25))
    assert result.attempts == 2
    assert result.commits_s[1] is None
    others = [seconds for seconds in result.commits_s if seconds is not None]
    assert len(others) == 2
    assert min(others) > 5.25
    clean = simulate(scene(2)).seconds["total"]
    first_try = {0.05: 0.05, "verify": simulate(scene(3)).seconds["transfer"]}.get(at, 0.0)
    assert max(others) == pytest.approx(clean + 5.25 + first_try, rel=0.01)


def test_a_death_in_commit_costs_only_the_dead() -> None:
    result = simulate(scene(3, death=ReplicaDeath(replica=1, at="commit")))
    assert result.attempts == 1
    assert result.commits_s[1] is None
    assert result.commits_s[0] is not None
    assert result.seconds["total"] == pytest.approx(simulate(scene(3)).seconds["total"], rel=0.01)


def test_a_death_after_the_round_changes_nothing() -> None:
    late = simulate(scene(2, death=ReplicaDeath(replica=1, at=1e6)))
    assert late.commits_s == simulate(scene(2)).commits_s


def test_the_last_replica_s_death_leaves_nobody_and_ends() -> None:
    assert simulate(scene(1, death=ReplicaDeath(replica=0, at="transfer"))).commits_s == [None]


@pytest.mark.parametrize("replicas", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("speeds", [FREE, Speeds(), dataclasses.replace(Speeds(), digest=10e9)])
def test_the_closed_form_agrees_with_the_simulation(replicas: int, speeds: Speeds) -> None:
    one = scene(replicas, speeds, tp=2)
    closed = predict(one.fleet.plan, one.fleet.sizes, replicas, speeds)
    assert closed.seconds == pytest.approx(simulate(one).seconds["total"], rel=0.1)


def test_cores_that_are_shared_make_a_round_longer() -> None:
    working = dataclasses.replace(FREE, copy=1e9, digest=1e9, link_cores=1.0)
    alone, shared = (simulate(scene(4, dataclasses.replace(working, cores=c))).seconds["total"] for c in (None, 1.0))
    assert shared > 2 * alone


def test_the_simulation_is_deterministic() -> None:
    speeds = dataclasses.replace(Speeds(), cores=2.0, link_cores=1.5)
    assert simulate(scene(3, speeds)) == simulate(scene(3, speeds))


def test_links_and_cores_are_shared_equally() -> None:
    clock = Clock()
    ends: dict[str, float] = {}
    machine = Machine(clock, cores=None)
    link, other = SimulatedLink(100.0), SimulatedLink(1000.0)
    machine.send(100, link, SimulatedLink(1000.0), 0.0, lambda: ends.setdefault("short", clock.now))
    machine.send(300, link, other, 0.0, lambda: ends.setdefault("long", clock.now))
    clock.run()
    # Half of the link each until 100 bytes are through at 2 s; the rest of 200 bytes alone.
    assert ends == pytest.approx({"short": 2.0, "long": 4.0})
    clock, ends = Clock(), {}
    machine = Machine(clock, cores=1.0)
    machine.compute(1.0, lambda: ends.setdefault("a", clock.now))
    machine.compute(2.0, lambda: ends.setdefault("b", clock.now))
    clock.run()
    assert ends == pytest.approx({"a": 2.0, "b": 3.0})
