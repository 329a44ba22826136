"""A replica that joins is seeded by one that serves, without the trainer: it is its copy, and the source untouched."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from servicekit.errors import ConfigError, DigestMismatch, NotReady, PeerLost, PhaseOrder
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import Fleet
from tests.kit.stores import same
from weightsync.layouts.layout import Parallel
from weightsync.plans.participants import Participants
from weightsync.round.phases import ABORT, COMMIT, PREPARE, TRANSFER, VERIFY, rules_of
from weightsync.transfer.transports.links import check_source

pytestmark = pytest.mark.integration
IN_PLACE, STAGED = pb.INSTALL_MODE_IN_PLACE, pb.INSTALL_MODE_STAGED


def seeding(them: Fleet, source: str, joiners: Iterable[str], version: int, **changes: Any) -> pb.Round:
    """A round in which a replica sends."""
    fields: dict[str, Any] = {"round_id": f"seed-{version}", "transport": pb.SYNC_TRANSPORT_COLLECTIVE}
    fields |= {"source": source, "trainer": them.replicas[source]}
    fields |= {"replicas": {name: them.replicas[name] for name in joiners}}
    return them.round(version, **fields | changes)


def publish(them: Fleet, names: Iterable[str], version: int, **changes: Any) -> None:
    """A round of the trainer over these replicas."""
    replicas = {name: them.replicas[name] for name in names}
    whole(them, them.round(version, replicas=replicas, transport=pb.SYNC_TRANSPORT_COLLECTIVE, **changes))


def whole(them: Fleet, round_: pb.Round) -> dict[str, pb.PhaseReport]:
    """Run all phases on all participants. Returns: the reports of TRANSFER."""
    reports: dict[str, pb.PhaseReport] = {}
    for rule in rules_of(staged=round_.install_mode == STAGED):
        answers = them.run(rule.phase, round_)
        failed = [answer for answer in answers.values() if isinstance(answer, BaseException)]
        assert failed == [], (rule.name, answers)
        if rule.phase == TRANSFER:
            reports = answers
    return reports


def slots_of(them: Fleet, name: str) -> list[str]:
    return [f"{name}/{rank}" for rank in range(them.replicas[name].world_size)]


def poison(them: Fleet, name: str) -> None:
    for slot in slots_of(them, name):
        them.members[slot].poison()


def contents(them: Fleet, name: str) -> dict[str, tuple[int, bytes]]:
    """Where each tensor of a replica lies, and its bytes."""
    return {
        f"{slot} {tensor}": (held.data_ptr(), held.numpy().tobytes())
        for slot in slots_of(them, name)
        for tensor, held in them.stores[slot].items()
    }


def assert_copy(them: Fleet, name: str, of: str) -> None:
    for mine, theirs in zip(slots_of(them, name), slots_of(them, of), strict=True):
        assert them.members[mine].checksums() == them.members[theirs].checksums()
        assert same(them.stores[mine], them.expected(mine)) == []


@pytest.mark.parametrize("install", [IN_PLACE, STAGED], ids=pb.InstallMode.Name)
@pytest.mark.parametrize(
    ("size", "spec"),
    [
        (Parallel(), {}),
        (Parallel(tensor=2), {}),
        (Parallel(tensor=2), {"tie_word_embeddings": True}),
        (Parallel(tensor=4), {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ],
    ids=["tp1", "tp2", "tied", "kv-heads-on-two-ranks"],
)
def test_the_joiner_has_what_the_source_has_bit_by_bit(
    fleet: Callable[..., Fleet], install: pb.InstallMode.ValueType, size: Parallel, spec: dict[str, Any]
) -> None:
    them = fleet(Parallel(tensor=2), {"rollout-0": size, "rollout-1": size}, **spec)
    publish(them, ["rollout-0"], 3, install_mode=install)
    poison(them, "rollout-1")
    before = contents(them, "rollout-0")
    for rank in range(2):
        them.members[f"trainer/{rank}"].close()
    reports = whole(them, seeding(them, "rollout-0", ["rollout-1"], 3, install_mode=install))
    assert_copy(them, "rollout-1", of="rollout-0")
    assert contents(them, "rollout-0") == before
    assert [reports[slot].bytes_received for slot in slots_of(them, "rollout-0")] == [0] * size.world_size
    received = [reports[slot].bytes_received for slot in slots_of(them, "rollout-1")]
    assert received == [reports[slot].shard_bytes for slot in slots_of(them, "rollout-1")]


def test_several_joiners_are_a_chain_and_cost_the_source_one_model(fleet: Callable[..., Fleet]) -> None:
    names = [f"rollout-{index}" for index in range(4)]
    them = fleet(Parallel(), dict.fromkeys(names, Parallel(tensor=2)))
    publish(them, names[:1], 1)
    reports = whole(them, seeding(them, names[0], names[1:], 1))
    sent = sum(reports[slot].bytes_sent for slot in slots_of(them, names[0]))
    assert sent == sum(reports[slot].shard_bytes for slot in slots_of(them, names[1]))
    for name in names[1:]:
        assert_copy(them, name, of=names[0])


def test_one_that_was_seeded_by_a_replica_may_seed_others_and_gets_the_next_version(
    fleet: Callable[..., Fleet],
) -> None:
    them = fleet(Parallel(), dict.fromkeys(("rollout-0", "rollout-1", "rollout-2"), Parallel()))
    publish(them, ["rollout-0"], 1)
    whole(them, seeding(them, "rollout-0", ["rollout-1"], 1))
    whole(them, seeding(them, "rollout-1", ["rollout-2"], 1, round_id="second"))
    assert_copy(them, "rollout-2", of="rollout-0")
    for tensor in (*them.stores["trainer/0"].values(), *them.full.values()):
        tensor.mul_(2.0)
    publish(them, them.replicas, 2, failed_rounds=1)
    for name in them.replicas:
        assert_copy(them, name, of="rollout-0")


def refused(them: Fleet, round_: pb.Round) -> str:
    """What the source says in PREPARE; the joiner does not wait for it until its deadline."""
    answers = them.run(PREPARE, round_)
    assert all(isinstance(answer, Exception) for answer in answers.values()), answers
    error = answers[f"{round_.source}/0"]
    assert isinstance(error, NotReady), answers
    return str(error)


def test_what_was_never_verified_is_no_source(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel(), "rollout-1": Parallel()})
    round_ = seeding(them, "rollout-0", ["rollout-1"], 1, formation_timeout_s=0.5)
    assert "rollout-0/0 is no source of version 1: it has no verified weights" in refused(them, round_)


def test_another_version_than_the_rounds_is_not_sent(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel(), "rollout-1": Parallel()})
    publish(them, ["rollout-0"], 1)
    round_ = seeding(them, "rollout-0", ["rollout-1"], 2, formation_timeout_s=0.5)
    assert "rollout-0/0 is no source of version 2: it has version 1" in refused(them, round_)


def test_one_whose_weights_were_partly_written_is_no_source(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel(), "rollout-1": Parallel()})
    publish(them, ["rollout-0"], 1)
    broken = them.round(2, replicas={"rollout-0": Parallel()}, transport=pb.SYNC_TRANSPORT_COLLECTIVE)
    for phase in (PREPARE, TRANSFER):
        them.run(phase, broken)
    them.run(ABORT, broken)
    for version in (1, 2):
        round_ = seeding(them, "rollout-0", ["rollout-1"], version, formation_timeout_s=0.5)
        assert "it has no verified weights" in refused(them, round_)


def test_a_byte_that_has_changed_on_the_source_since_it_was_verified_does_not_travel(
    fleet: Callable[..., Fleet],
) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel(tensor=2), "rollout-1": Parallel(tensor=2)})
    publish(them, ["rollout-0"], 1)
    name, tensor = next(iter(them.stores["rollout-0/1"].items()))
    tensor.view(torch.uint8).view(-1)[5] ^= 4
    round_ = seeding(them, "rollout-0", ["rollout-1"], 1)
    assert not any(isinstance(answer, Exception) for answer in them.run(PREPARE, round_).values())
    answers = them.run(TRANSFER, round_)
    assert isinstance(answers["rollout-0/1"], DigestMismatch)
    assert "differ from what this source has verified itself" in str(answers["rollout-0/1"])
    assert name in str(answers["rollout-0/1"])
    for slot in slots_of(them, "rollout-1"):
        assert isinstance(answers[slot], PeerLost)
        with pytest.raises(PhaseOrder):
            them.members[slot].run_phase(COMMIT, round_)


def test_what_a_source_does_not_send_is_not_compared(fleet: Callable[..., Fleet]) -> None:
    """Padding does not travel: each side fills its own, so that a flipped byte there stays where it is."""
    them = fleet(Parallel(), {"rollout-0": Parallel(), "rollout-1": Parallel()}, vocab_size=100)
    publish(them, ["rollout-0"], 1)
    store = them.stores["rollout-0/0"]
    (padded,) = [name for name in store if "embed" in name]
    store[padded][-1, 0] = 7.0
    whole(them, seeding(them, "rollout-0", ["rollout-1"], 1))
    assert them.stores["rollout-1/0"][padded][-1].eq(0).all()


@pytest.mark.parametrize("phase", [PREPARE, TRANSFER, VERIFY], ids=pb.RoundPhase.Name)
@pytest.mark.parametrize("victim", ["rollout-0", "rollout-1"])
def test_the_next_publication_ends_a_seeding_and_mixes_nothing(
    fleet: Callable[..., Fleet], phase: pb.RoundPhase.ValueType, victim: str
) -> None:
    """Whichever phase it is in: PREPARE of the new round gives the old one up, on source and joiner."""
    them = fleet(Parallel(), {"rollout-0": Parallel(), "rollout-1": Parallel()})
    publish(them, ["rollout-0"], 1)
    round_ = seeding(them, "rollout-0", ["rollout-1"], 1)
    for rule in rules_of(staged=False):
        if rule.phase <= phase:
            them.run(rule.phase, round_)
    for tensor in (*them.stores["trainer/0"].values(), *them.full.values()):
        tensor.mul_(2.0)
    publish(them, [victim], 2, failed_rounds=1)
    with pytest.raises(PhaseOrder):
        them.members[f"{victim}/0"].run_phase(COMMIT, round_)
    assert same(them.stores[f"{victim}/0"], them.expected(f"{victim}/0")) == []


@pytest.mark.parametrize("transport", [pb.SYNC_TRANSPORT_AUTO, pb.SYNC_TRANSPORT_COLOCATED, pb.SYNC_TRANSPORT_DISK])
def test_a_source_keeps_its_memory_for_itself(
    fleet: Callable[..., Fleet], transport: pb.SyncTransport.ValueType
) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel(), "rollout-1": Parallel()})
    publish(them, ["rollout-0"], 1)
    answers = them.run(PREPARE, seeding(them, "rollout-0", ["rollout-1"], 1, transport=transport))
    assert {type(answer) for answer in answers.values()} == {ConfigError}
    assert "its transport must be COLLECTIVE" in str(answers["rollout-0/0"])


@pytest.mark.parametrize(("tensor", "allowed", "may"), [(1, False, True), (2, False, False), (2, True, True)])
def test_over_nccl_an_engine_with_collectives_of_its_own_does_not_send(tensor: int, allowed: bool, may: bool) -> None:
    size = Parallel(tensor=tensor, engine="sglang").to_proto()
    round_ = pb.Round(source="rollout-0", trainer=size, replicas=[pb.ReplicaSpec(name="rollout-1", parallel=size)])
    round_.transport, round_.allow_staged_nccl = pb.SYNC_TRANSPORT_COLLECTIVE, allowed
    participants = Participants.of_round(round_)
    check_source(round_, participants, torch.device("cpu"))
    if may:
        check_source(round_, participants, torch.device("cuda"))
        return
    with pytest.raises(ConfigError, match="the source rollout-0 moves weights over NCCL beside"):
        check_source(round_, participants, torch.device("cuda"))
