"""Whole rounds over real Redis and gloo, with plain tensor stores in the place of the engines."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from servicekit.errors import Aborted, ConfigError, DeadlineExceeded, DigestMismatch, PeerLost, PhaseOrder, Unavailable
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import GROUP, Fleet
from tests.kit.redis import RedisProcess
from tests.kit.stores import same
from tests.unit.weightsync.test_megatron_names import respelled
from weightsync.layouts.layout import Parallel
from weightsync.membership.rendezvous import Rendezvous, SlotLease
from weightsync.plans import limits
from weightsync.transfer import spare
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.transports import links

pytestmark = pytest.mark.integration
TWO_REPLICAS = {"rollout-0": Parallel(), "rollout-1": Parallel()}


@pytest.mark.parametrize("install", [pb.INSTALL_MODE_IN_PLACE, pb.INSTALL_MODE_STAGED])
@pytest.mark.parametrize(
    ("trainer", "replicas"),
    [
        (Parallel(), {"rollout-0": Parallel()}),
        (Parallel(tensor=2), TWO_REPLICAS),
        (Parallel(tensor=2, pipeline=2), {"rollout-0": Parallel(tensor=2)}),
        (Parallel(pipeline=2, data=2), {"rollout-0": Parallel(tensor=2), "rollout-1": Parallel()}),
    ],
)
def test_every_rank_holds_its_exact_shard(
    fleet: Callable[..., Fleet], install: int, trainer: Parallel, replicas: dict[str, Parallel]
) -> None:
    them = fleet(trainer, replicas)
    reports = them.sync(them.round(1, install_mode=install))
    for slot in (s for s in them.members if not s.startswith("trainer")):
        assert same(them.stores[slot], them.expected(slot)) == []
        assert reports[slot].bytes_received == reports[slot].shard_bytes  # redundancy 1.00
        assert 0 < reports[slot].staging_bytes <= 2 * 4096


def test_a_trainer_with_fused_layer_norms_is_synced_alike(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), {"rollout-0": Parallel()})
    for slot in ("trainer/0", "trainer/1"):
        them.replace(slot, respelled(them.stores[slot]))
    assert any("linear_fc1.layer_norm_weight" in name for name in them.stores["trainer/1"])
    them.sync(them.round(1))
    assert same(them.stores["rollout-0/0"], them.expected("rollout-0/0")) == []


def test_the_trainer_sends_one_model_whatever_the_number_of_replicas(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), {f"rollout-{i}": Parallel() for i in range(3)})
    reports = them.sync(them.round(1))
    sent = sum(reports[f"trainer/{rank}"].bytes_sent for rank in range(2))
    assert sent == reports["rollout-0/0"].shard_bytes
    assert reports["rollout-2/0"].bytes_sent == 0


def test_the_communicator_is_kept_while_the_epoch_lasts(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    them.sync(them.round(1))
    first = them.members["trainer/0"]._transfer._communicators._current
    for tensor in them.full.values():
        tensor.add_(1.0)
    for tensor in them.stores["trainer/0"].values():
        tensor.add_(1.0)
    for tensor in them.stores["trainer/1"].values():
        tensor.add_(1.0)
    them.sync(them.round(2))
    assert them.members["trainer/0"]._transfer._communicators._current is first
    assert same(them.stores["rollout-1/0"], them.expected("rollout-1/0")) == []


def test_a_round_without_replicas_is_refused_and_the_next_goes_through(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), {"rollout-0": Parallel()})
    nobody = them.round(1)
    nobody.ClearField("replicas")
    for slot, answer in them.run(pb.ROUND_PHASE_PREPARE, nobody).items():
        assert isinstance(answer, ConfigError), (slot, answer)
        assert "has no replicas" in str(answer)
    them.run(pb.ROUND_PHASE_ABORT, nobody)
    them.sync(them.round(2))


def test_a_slot_that_nobody_holds_is_refused_at_once_and_the_next_round_works(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), {"rollout-0": Parallel()})
    stranger = them.round(1)
    stranger.replicas.add(name="rollout-9", parallel=Parallel().to_proto())
    for slot, answer in them.run(pb.ROUND_PHASE_PREPARE, stranger).items():
        assert isinstance(answer, ConfigError), (slot, answer)  # no error that another try would heal
        assert "rollout-9/0: no process has this slot" in str(answer)
    them.run(pb.ROUND_PHASE_ABORT, stranger)
    them.sync(them.round(2))


@pytest.mark.parametrize("other", [{"tensor": 2}, {"engine": "megatron"}])
def test_sizes_or_an_engine_that_a_process_has_not_are_refused_by_name(
    fleet: Callable[..., Fleet], other: dict[str, Any]
) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    wrong = them.round(1)
    wrong.replicas[0].parallel.MergeFrom(pb.ParallelSizes(**other))
    wrong.formation_timeout_s = 2
    answer = them.run(pb.ROUND_PHASE_PREPARE, wrong)["rollout-0/0"]
    assert isinstance(answer, ConfigError)
    assert "rollout-0/0: the round says Parallel(" in str(answer)
    them.run(pb.ROUND_PHASE_ABORT, wrong)
    usual = them.round(2)
    usual.trainer.engine, usual.replicas[0].parallel.engine = "megatron", "sglang"
    them.sync(usual)


def test_a_repeated_phase_gets_the_same_answer(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    round_ = them.round(1)
    reports = them.sync(round_)
    assert them.members["rollout-0/0"].run_phase(pb.ROUND_PHASE_TRANSFER, round_) == reports["rollout-0/0"]
    them.members["rollout-0/0"].run_phase(pb.ROUND_PHASE_COMMIT, round_)


def test_a_changed_byte_is_caught_before_commit(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), {"rollout-0": Parallel()})
    round_ = them.round(1)
    them.run(pb.ROUND_PHASE_PREPARE, round_)
    them.run(pb.ROUND_PHASE_TRANSFER, round_)
    them.stores["rollout-0/0"]["model.layers.1.mlp.down_proj.weight"].view(torch.uint8)[3, 5] ^= 1
    outcome = them.run(pb.ROUND_PHASE_VERIFY, round_)["rollout-0/0"]
    assert isinstance(outcome, DigestMismatch)
    assert "down_proj" in str(outcome)
    with pytest.raises(PhaseOrder, match=r"has failed \(VERIFY failed: .*; abort it"):
        them.members["rollout-0/0"].run_phase(pb.ROUND_PHASE_COMMIT, round_)


def test_a_missing_rank_is_named_and_the_next_round_works(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    absent = them.members.pop("rollout-1/0")
    round_ = them.round(1, formation_timeout_s=0.5)
    outcome = them.run(pb.ROUND_PHASE_PREPARE, round_)
    assert {type(result) for result in outcome.values()} == {DeadlineExceeded}
    assert "rollout-1/0" in str(outcome["trainer/0"])
    them.run(pb.ROUND_PHASE_ABORT, round_)
    them.members["rollout-1/0"] = absent
    them.sync(them.round(2))
    assert same(them.stores["rollout-1/0"], them.expected("rollout-1/0")) == []


def test_prepare_connects_who_will_exchange_messages_and_nobody_else(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), {"rollout-0": Parallel(tensor=2), "rollout-1": Parallel(tensor=2)})
    them.run(pb.ROUND_PHASE_PREPARE, them.round(1))
    for member in them.members.values():
        prepared = member._transfer._prepared
        assert prepared is not None
        communicator = prepared.communicator
        hops = prepared.plan.hops_of(communicator.rank, prepared.participants)
        assert communicator._connected == {(hop.sender, hop.receiver) for hop in hops} != set()


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_a_pair_that_does_not_connect_is_named_in_prepare_and_the_next_round_works(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, delay_s: float
) -> None:
    """`delay_s`: of a busy machine, between gloo's time-out, which closes all connections, and its error here."""
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    connect, stays_away = Communicator.connect, ["rollout-1/0"]
    waiting = Communicator._waiting

    @contextmanager
    def slowly(self: Communicator) -> Iterator[None]:
        with waiting(self):
            try:
                yield
            except RuntimeError:
                threading.Event().wait(delay_s)
                raise

    def or_not(self: Communicator, *args: Any) -> None:
        if self.slots[self.rank] not in stays_away:
            connect(self, *args)

    monkeypatch.setattr(Communicator, "connect", or_not)
    monkeypatch.setattr(Communicator, "_waiting", slowly)
    outcome = them.run(pb.ROUND_PHASE_PREPARE, them.round(1, formation_timeout_s=5))
    # Who gives up first says which pair it was; the others may find that one lost.
    told = [str(error) for error in outcome.values() if isinstance(error, PeerLost)]
    assert any("and rollout-1/0 did not connect" in text for text in told), told
    them.run(pb.ROUND_PHASE_ABORT, them.round(1))
    stays_away.clear()
    them.sync(them.round(2))
    assert same(them.stores["rollout-1/0"], them.expected("rollout-1/0")) == []


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"install_mode": pb.INSTALL_MODE_STAGED}, True),
        ({"install_mode": pb.INSTALL_MODE_STAGED, "transport": pb.SYNC_TRANSPORT_AUTO}, False),  # shared memory here
        ({"install_mode": pb.INSTALL_MODE_STAGED, "allow_staged_nccl": True}, False),
        ({}, False),
    ],
)
def test_prepare_refuses_nccl_beside_an_engines_own_collectives(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], refused: bool
) -> None:
    """As on GPUs, in every round: the transport of the last one is kept."""
    judge = links.check_staged
    monkeypatch.setattr(links, "check_staged", lambda round_, who, _: judge(round_, who, torch.device("cuda")))
    them = fleet(Parallel(tensor=2), {"rollout-0": Parallel(), "rollout-1": Parallel(tensor=2)})
    them.sync(them.round(1, transport=pb.SYNC_TRANSPORT_COLLECTIVE))
    outcome = them.run(pb.ROUND_PHASE_PREPARE, them.round(2, **{"transport": pb.SYNC_TRANSPORT_COLLECTIVE, **changes}))
    errors = [result for result in outcome.values() if isinstance(result, Exception)]
    assert len(errors) == (len(outcome) if refused else 0)
    for error in errors:
        assert isinstance(error, ConfigError)
        assert "sync.install staged" in str(error)
        assert "rollout-1; set sync.install: in_place" in str(error)
        assert "sync.allow_staged_nccl: true" in str(error)
    them.run(pb.ROUND_PHASE_ABORT, them.round(2))
    them.sync(them.round(3, transport=pb.SYNC_TRANSPORT_COLLECTIVE, failed_rounds=1))


def test_an_epoch_before_a_participant_changed_is_refused(fleet: Callable[..., Fleet], redis_server: str) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    round_ = them.round(1)
    Rendezvous(redis_server, GROUP).join("trainer/0", "somebody", 10)
    with pytest.raises(Aborted, match="epoch"):
        them.members["rollout-0/0"].run_phase(pb.ROUND_PHASE_PREPARE, round_)


def test_strangers_come_and_leave_without_a_new_communicator(fleet: Callable[..., Fleet], redis_server: str) -> None:
    them, group = fleet(Parallel(), {"rollout-0": Parallel()}), Rendezvous(redis_server, GROUP)
    collective = {"transport": pb.SYNC_TRANSPORT_COLLECTIVE}
    them.sync(them.round(1, **collective))
    before = {slot: member._transfer._communicators._current for slot, member in them.members.items()}
    for version in (2, 3):
        round_ = them.round(version, **collective)
        group.join("rollout-9/0", "somebody", 10) if version == 2 else group.leave("rollout-9/0", "somebody")
        them.sync(round_)  # it is older than that
        them.sync(them.round(version + 10, **collective))
    assert {slot: member._transfer._communicators._current for slot, member in them.members.items()} == before
    assert same(them.stores["rollout-0/0"], them.expected("rollout-0/0")) == []


def test_a_replaced_worker_is_fenced(redis_server: str) -> None:
    rendezvous = Rendezvous(redis_server, GROUP)
    lease = SlotLease(rendezvous, "rollout-0/0", ttl_s=0.3)
    lease.start()
    before = rendezvous.snapshot().epoch
    rendezvous.join("rollout-0/0", "newcomer", 10)
    assert rendezvous.snapshot().epoch == before + 1
    deadline = rendezvous.wait_until(lambda _: lease.evicted, 5.0, lambda _: "the lease was not told of its eviction")
    assert deadline.members == {"rollout-0/0": "newcomer"}
    lease.close()
    assert rendezvous.snapshot().members == {"rollout-0/0": "newcomer"}  # an evicted worker removes nobody


def test_an_expired_lease_makes_a_new_epoch(redis_server: str) -> None:
    rendezvous = Rendezvous(redis_server, GROUP)
    rendezvous.join("rollout-0/0", "mortal", 0.05)
    epoch = rendezvous.snapshot().epoch
    gone = rendezvous.wait_until(lambda now: now.members == {}, 5.0, lambda now: f"still there: {now.members}")
    assert gone.epoch == epoch + 1
    assert rendezvous.heartbeat("rollout-0/0", "mortal", 1) == "unknown"


def test_another_model_is_refused_by_name(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    store = them.stores["rollout-0/0"]
    store["model.norm.weight"] = torch.zeros(17)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight"):
        them.members["rollout-0/0"].run_phase(pb.ROUND_PHASE_PREPARE, them.round(1))


def test_a_staged_round_without_room_is_refused_in_prepare_and_one_in_place_is_not(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    them.sync(them.round(1))
    monkeypatch.setattr(spare, "free_bytes", lambda device: 1000)
    staged = them.round(2, install_mode=pb.INSTALL_MODE_STAGED)
    outcome = them.run(pb.ROUND_PHASE_PREPARE, staged)
    assert isinstance(outcome["rollout-0/0"], ConfigError)
    assert "rollout-0/0: no room for the spare shard" in str(outcome["rollout-0/0"])
    assert isinstance(outcome["trainer/0"], PeerLost)  # at once: it does not wait until its deadline
    them.run(pb.ROUND_PHASE_ABORT, staged)
    them.sync(them.round(3))


def test_phases_out_of_order_are_refused(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    with pytest.raises(PhaseOrder, match="is not open here"):
        them.members["trainer/0"].run_phase(pb.ROUND_PHASE_TRANSFER, them.round(1))


def test_a_round_left_open_by_a_lost_coordinator_gives_way(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), TWO_REPLICAS)
    abandoned = them.round(1)
    them.run(pb.ROUND_PHASE_PREPARE, abandoned)
    them.run(pb.ROUND_PHASE_TRANSFER, abandoned)
    them.sync(them.round(2))
    assert same(them.stores["rollout-1/0"], them.expected("rollout-1/0")) == []


def test_redis_that_is_gone_is_a_tandem_error(redis_process: Callable[..., RedisProcess]) -> None:
    server = redis_process()
    rendezvous = Rendezvous(server.url, GROUP)
    server.kill()
    with pytest.raises(Unavailable, match="Redis"):
        rendezvous.snapshot()


@pytest.mark.parametrize("replicas", [1, 2])
def test_where_the_run_does_not_say_device_and_chain_decide_how_large_messages_are(
    fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch, replicas: int
) -> None:
    monkeypatch.setitem(limits.DEFAULT_BUCKET_BYTES, "cpu", 1024 * replicas)
    monkeypatch.setitem(limits.LEAST_BUCKET_BYTES, "cpu", 16)
    them = fleet(Parallel(), {f"rollout-{index}": Parallel() for index in range(replicas)})
    silent = them.round(1)
    silent.ClearField("bucket_bytes")
    reports = them.sync(silent)
    assert same(them.stores["rollout-0/0"], them.expected("rollout-0/0")) == []
    assert 0 < reports["rollout-0/0"].staging_bytes <= 2 * 1024
    assert reports["rollout-0/0"].num_messages >= reports["rollout-0/0"].shard_bytes / 1024
