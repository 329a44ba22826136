"""The trainer's egress is one model, whatever the number of replicas: counted by the kernel, for each whole process.

tests/integration/weightsync/test_fan_out.py counts the same inside the communicator, exactly; here nothing that a
process writes can be missed, so what it writes beside the payload (headers, Redis) is allowed for.
"""

import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import ProcessFleet
from tests.kit.round import run_phase
from tests.kit.stores import tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TRAINER = Parallel(tensor=2)
SLOTS_S = 60.0
# Headers of 64 B for each message of at most 64 KiB, gloo's own, lease renewals: under 2 %.
BESIDE = 1.02


def wide_spec() -> ModelSpec:
    """3 MB: much more than what is written beside the weights."""
    return tiny_spec(hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=999)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_process_writes_what_it_must_and_no_more(replicas: int, redis_server: str) -> None:
    layouts = {f"rollout-{index}": Parallel() for index in range(replicas)}
    with ProcessFleet(redis_server, wide_spec(), TRAINER, layouts) as fleet:
        round_ = fleet.round(
            1,
            wait_s=SLOTS_S,
            transport=pb.SYNC_TRANSPORT_COLLECTIVE,
            bucket_bytes=64 * 1024,
            formation_timeout_s=30.0,
            transfer_timeout_s=30.0,
        )
        shard_bytes = run_phase(fleet.participants, pb.ROUND_PHASE_PREPARE, round_)["rollout-0/0"].shard_bytes
        before = {slot: member.written_bytes() for slot, member in fleet.members.items()}
        run_phase(fleet.participants, pb.ROUND_PHASE_TRANSFER, round_)
        written = {slot: member.written_bytes() - before[slot] for slot, member in fleet.members.items()}
        run_phase(fleet.participants, pb.ROUND_PHASE_VERIFY, round_)
    egress = sum(written[f"trainer/{rank}"] for rank in range(TRAINER.world_size))
    assert shard_bytes <= egress <= shard_bytes * BESIDE
    for index in range(replicas - 1):
        assert shard_bytes <= written[f"rollout-{index}/0"] <= shard_bytes * BESIDE
    assert written[f"rollout-{replicas - 1}/0"] <= shard_bytes * (BESIDE - 1)
