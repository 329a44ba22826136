"""How large messages are where the run does not say: by the length of the chain, alike at all ranks."""

import pytest

from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import preset
from weightsync.plans.cost import MessageSizes, Speeds, predict
from weightsync.plans.limits import default_bucket_bytes
from weightsync.plans.messages import cut_messages
from weightsync.plans.participants import Participants
from weightsync.plans.plan import make_plan
from weightsync.simulate.phases import SimulatedFleet
from weightsync.simulate.round import RoundScenario, simulate

MIB = 2**20


@pytest.mark.parametrize(
    ("device", "replicas", "mib"),
    [
        ("cuda", 0, 256),
        ("cuda", 1, 256),
        ("cuda", 2, 128),
        ("cuda", 16, 16),
        ("cuda", 64, 4),
        ("cuda", 512, 4),
        ("cpu", 1, 32),
        ("cpu", 2, 16),
        ("cpu", 32, 1),
        ("cpu", 100, 1),
    ],
)
def test_a_chain_costs_no_more_than_one_message_to_a_single_replica(device: str, replicas: int, mib: float) -> None:
    size = default_bucket_bytes(device, replicas)
    assert size == mib * MIB
    assert size * replicas <= default_bucket_bytes(device, 1) or size == default_bucket_bytes(device, 10**6)


def test_the_longest_chain_of_a_round_counts() -> None:
    replicas = {"a": Parallel(), "b": Parallel(tensor=2), "c": Parallel(tensor=2)}
    participants = Participants(trainer=Parallel(), replicas=replicas, slots=(), first_rank={})
    assert participants.longest_chain == 2
    assert Participants(trainer=Parallel(), replicas={}, slots=(), first_rank={}).longest_chain == 0


@pytest.mark.parametrize("replicas", [1, 4, 16, 64, 512])
def test_the_size_is_near_the_best_one_for_every_chain(replicas: int) -> None:
    spec = preset("qwen2.5-1.5b")
    plan = make_plan(megatron_layout(spec, Parallel(tensor=2)), sglang_layout(spec, Parallel()))

    def seconds(size: int) -> float:
        return predict(plan, MessageSizes.of(plan, cut_messages(plan, size // 2), 2), replicas, Speeds()).seconds

    best = min(seconds(mib * MIB) for mib in (2, 4, 8, 16, 32, 64, 128, 256))
    assert seconds(default_bucket_bytes("cuda", replicas)) <= 1.2 * best


def test_the_simulation_agrees_that_a_chain_wants_smaller_messages() -> None:
    spec = preset("qwen2.5-1.5b")
    plan = make_plan(megatron_layout(spec, Parallel(tensor=2)), sglang_layout(spec, Parallel()))

    def seconds(size: int) -> float:
        stage = SimulatedFleet(
            plan=plan, messages=cut_messages(plan, size // 2), dtype_bytes=2, replicas=16, speeds=Speeds()
        )
        return sum(simulate(RoundScenario(fleet=stage, death=None)).seconds.values())

    assert seconds(default_bucket_bytes("cuda", 16)) < 0.7 * seconds(default_bucket_bytes("cuda", 1))
