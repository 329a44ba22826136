"""The trainer's egress is one model, whatever the number of replicas: counted by the kernel, for each whole process.

tests/integration/weightsync/test_fan_out.py counts the same inside the communicator, exactly; here nothing that a
process writes can be missed, so what it writes beside the payload (headers, Redis) is allowed for.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.integration.sync.member_process import MemberProcess, run_phase
from tests.kit.stores import tiny_spec
from weightsync.group.rendezvous import Rendezvous
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

GROUP = "tandem:fan-out"
TRAINER = Parallel(tensor=2)
SLOTS_S = 60.0
# Headers of 64 B for each message of at most 64 KiB, gloo's own, lease renewals: under 2 %.
BESIDE = 1.02


def wide_spec() -> ModelSpec:
    """3 MB: much more than what is written beside the weights."""
    return tiny_spec(hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=999)


@contextmanager
def fleet(redis_url: str, spec: ModelSpec, replicas: int) -> Iterator[list[MemberProcess]]:
    common = {"spec": spec, "redis_url": redis_url, "group": GROUP}
    members: list[MemberProcess] = []
    try:
        slots = {f"trainer/{rank}": TRAINER for rank in range(TRAINER.world_size)}
        slots |= {f"rollout-{index}/0": Parallel() for index in range(replicas)}
        for slot, parallel in slots.items():  # one by one: those that have started are ended if the next one does not
            members.append(MemberProcess(slot, parallel=parallel, **common))
        for member in members:
            member.wait_up()
        yield members
    finally:
        for member in members:
            member.close()


def round_of(redis_url: str, members: list[MemberProcess]) -> pb.Round:
    replicas = [member.slot.removesuffix("/0") for member in members if member.slot.startswith("rollout")]
    membership = Rendezvous(redis_url, GROUP).wait_for([member.slot for member in members], SLOTS_S)
    return pb.Round(
        round_id=uuid.uuid4().hex,
        policy_version=1,
        group=GROUP,
        epoch=membership.epoch,
        trainer=TRAINER.to_proto(),
        replicas=[pb.ReplicaSpec(name=name, parallel=Parallel().to_proto()) for name in replicas],
        install_mode=pb.INSTALL_MODE_IN_PLACE,
        transport=pb.SYNC_TRANSPORT_COLLECTIVE,
        bucket_bytes=64 * 1024,
        formation_timeout_s=30.0,
        transfer_timeout_s=30.0,
    )


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_process_writes_what_it_must_and_no_more(replicas: int, redis_server: str) -> None:
    with fleet(redis_server, wide_spec(), replicas) as members:
        round_ = round_of(redis_server, members)
        shard_bytes = run_phase(members, pb.ROUND_PHASE_PREPARE, round_)["rollout-0/0"].shard_bytes
        before = {member.slot: member.written_bytes() for member in members}
        run_phase(members, pb.ROUND_PHASE_TRANSFER, round_)
        written = {member.slot: member.written_bytes() - before[member.slot] for member in members}
        run_phase(members, pb.ROUND_PHASE_VERIFY, round_)
    egress = sum(written[f"trainer/{rank}"] for rank in range(TRAINER.world_size))
    assert shard_bytes <= egress <= shard_bytes * BESIDE
    for index in range(replicas - 1):
        assert shard_bytes <= written[f"rollout-{index}/0"] <= shard_bytes * BESIDE
    assert written[f"rollout-{replicas - 1}/0"] <= shard_bytes * (BESIDE - 1)
