"""What goes wrong between two ranks is caught by name, before anything is committed; the next round works."""

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from servicekit.errors import ConfigError, DigestMismatch, PeerLost, PhaseOrder, TandemError
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import Fleet
from tests.kit.stores import same, tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.plans.messages import Message
from weightsync.transfer.communicators.communicator import Communicator, Pending
from weightsync.transfer.digest import HEADER_BYTES

pytestmark = pytest.mark.integration
CHAIN = {"rollout-0": Parallel(), "rollout-1": Parallel()}
Change = Callable[[torch.Tensor, int], tuple[torch.Tensor, int]]


class TamperedWire:
    """A communicator whose sends go through `change`: (bytes, tag) -> (bytes, tag)."""

    def __init__(self, inner: Communicator, change: Change) -> None:
        self._inner = inner
        self._change = change
        self._sent: list[torch.Tensor] = []  # a changed copy must live until it is sent
        self.rank, self.slots = inner.rank, inner.slots
        self.receive, self.wait = inner.receive, inner.wait

    def send(self, buffer: torch.Tensor, to: int, tag: int, lane: int = 0) -> Pending:
        changed, tag = self._change(buffer, tag)
        self._sent.append(changed)
        return self._inner.send(changed, to, tag)


def is_header(buffer: torch.Tensor) -> bool:
    return bytes(buffer[:8].numpy()) == b"TANDEMW1" and buffer.numel() == HEADER_BYTES


def transfer(them: Fleet, round_: pb.Round) -> dict[str, pb.PhaseReport | BaseException]:
    """TRANSFER; once a rank has failed, the waits of the others are ended, as the coordinator does it."""
    with ThreadPoolExecutor(len(them.members)) as pool:
        work = {
            slot: pool.submit(member.run_phase, pb.ROUND_PHASE_TRANSFER, round_)
            for slot, member in them.members.items()
        }
        done, _ = wait(work.values(), return_when=FIRST_EXCEPTION)
        if any(each.exception() for each in done):
            for member in them.members.values():
                member.run_phase(pb.ROUND_PHASE_ABORT, round_)
        return {slot: each.exception() or each.result() for slot, each in work.items()}


def transfer_over(
    them: Fleet, slot: str, change: Change, round_: pb.Round
) -> dict[str, pb.PhaseReport | BaseException]:
    """PREPARE and TRANSFER, with `slot`'s sends tampered with."""
    them.run(pb.ROUND_PHASE_PREPARE, round_)
    transport = them.members[slot]._transfer._prepared.transport  # type: ignore[union-attr]
    transport._comm = TamperedWire(transport._comm, change)  # type: ignore[union-attr]
    return transfer(them, round_)


def error_of(outcome: dict[str, pb.PhaseReport | BaseException], slot: str, kind: type[TandemError]) -> str:
    assert isinstance(outcome[slot], kind), outcome[slot]
    return str(outcome[slot])


@pytest.fixture
def chain(four: Fleet) -> Iterator[Fleet]:
    """Trainer TP2 and a chain of two replicas; after the test's fault, a round works again."""
    them = four
    yield them
    with pytest.raises(PhaseOrder):  # nothing can be committed
        them.members["rollout-1/0"].run_phase(pb.ROUND_PHASE_COMMIT, them.round(1))
    them.run(pb.ROUND_PHASE_ABORT, them.round(1))
    them.sync(them.round(2))
    assert same(them.stores["rollout-1/0"], them.expected("rollout-1/0")) == []


def flip(sequence: int) -> Change:
    def change(buffer: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        if tag != sequence or is_header(buffer):
            return buffer, tag
        changed = buffer.clone()
        changed[changed.numel() // 2] ^= 4
        return changed, tag

    return change


def test_a_flipped_byte_is_caught_where_it_would_be_passed_on(chain: Fleet) -> None:
    outcome = transfer_over(chain, "trainer/0", flip(0), chain.round(1))
    message = error_of(outcome, "rollout-0/0", DigestMismatch)
    assert "message 0 from trainer/0" in message
    assert "not passed on" in message


def test_a_flipped_byte_on_the_last_link_is_caught_by_verify(chain: Fleet) -> None:
    round_ = chain.round(1)
    transfer_over(chain, "rollout-0/0", flip(3), round_)
    verified = chain.run(pb.ROUND_PHASE_VERIFY, round_)
    assert isinstance(verified["rollout-0/0"], pb.PhaseReport)
    assert "the first, 3, holds" in error_of(verified, "rollout-1/0", DigestMismatch)


def neighbours(them: Fleet) -> tuple[Message, Message]:
    """Two messages, one after the other on the same link, of the same size in the same pieces."""
    member = them.members["trainer/0"]
    messages = member._transfer._plan.messages[Parallel()]  # type: ignore[union-attr]
    packer = member._shard.packers.get(member._shard.tensors, None)
    mine = [message for message in messages if message.src == 0]
    sizes = {m.sequence: [segment.num_bytes for segment in packer.segments(m)] for m in mine}
    return next((a, b) for a, b in pairwise(mine) if sizes[a.sequence] == sizes[b.sequence])


def small_messages(them: Fleet) -> pb.Round:
    """A round of many messages, so that some are of one size."""
    return them.round(1, bucket_bytes=512)


def swap_places(them: Fleet) -> Change:
    """Gives two messages each other's places, headers and all."""

    def change(buffer: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        a, b = (message.sequence for message in neighbours(them))
        return (buffer, a + b - tag) if tag in (a, b) else (buffer, tag)

    return change


def swap_payloads(them: Fleet) -> Change:
    """Sends each of two messages under its own header, with the other's payload."""

    def change(buffer: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        pair = {message.sequence: message for message in neighbours(them)}
        if tag not in pair or is_header(buffer):
            return buffer, tag
        (other,) = (message for sequence, message in pair.items() if sequence != tag)
        member = them.members["trainer/0"]
        payload = torch.empty_like(buffer)
        member._shard.packers.get(member._shard.tensors, None).pack(other, payload)
        return payload, tag

    return change


def test_two_swapped_buckets_are_caught_by_their_headers(chain: Fleet) -> None:
    outcome = transfer_over(chain, "trainer/0", swap_places(chain), small_messages(chain))
    a, b = (message.sequence for message in neighbours(chain))
    assert f"message {a}: sequence is {b}" in error_of(outcome, "rollout-0/0", DigestMismatch)


def test_two_swapped_payloads_are_caught_by_their_digests(chain: Fleet) -> None:
    outcome = transfer_over(chain, "trainer/0", swap_payloads(chain), small_messages(chain))
    a = neighbours(chain)[0].sequence
    assert f"message {a} from trainer/0" in error_of(outcome, "rollout-0/0", DigestMismatch)


def test_a_truncated_message_is_caught(chain: Fleet) -> None:
    def cut(buffer: torch.Tensor, tag: int) -> tuple[torch.Tensor, int]:
        return (buffer, tag) if tag != 1 or is_header(buffer) else (buffer[:-8], tag)

    for tensors in (chain.stores["rollout-0/0"], chain.stores["rollout-1/0"]):
        for tensor in tensors.values():
            tensor.fill_(torch.nan)
    outcome = transfer_over(chain, "trainer/1", cut, chain.round(1))
    assert "message 1" in error_of(outcome, "rollout-0/0", DigestMismatch)


def test_a_message_of_a_stale_plan_is_caught(chain: Fleet) -> None:
    round_ = chain.round(1)
    chain.run(pb.ROUND_PHASE_PREPARE, round_)
    sender = chain.members["trainer/0"]._transfer
    assert sender._prepared is not None
    stale = replace(sender._prepared.plan, digest="0" * 32)
    sender._prepared = replace(sender._prepared, plan=stale)
    outcome = transfer(chain, round_)
    assert "plan_digest" in error_of(outcome, "rollout-0/0", DigestMismatch)


def test_a_rank_with_a_stale_plan_is_named_in_prepare(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), CHAIN)
    rounds = dict.fromkeys(them.members, them.round(1)) | {"rollout-1/0": them.round(1, bucket_bytes=8192)}
    outcome = them.run_each(pb.ROUND_PHASE_PREPARE, rounds)
    for slot in them.members:  # everybody says the same
        assert "rollout-1/0 has plan" in error_of(outcome, slot, ConfigError)


def test_a_receiver_with_another_config_is_named_in_prepare(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    them.members["rollout-0/0"]._shard.spec = tiny_spec(num_hidden_layers=3)
    outcome = them.run(pb.ROUND_PHASE_PREPARE, them.round(1))
    assert "rollout-0/0 has plan" in error_of(outcome, "trainer/0", ConfigError)


def test_a_parameter_that_no_rule_covers_stops_everybody_at_once(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(tensor=2), CHAIN)
    them.sync(them.round(1))
    them.stores["rollout-1/0"]["model.extra.weight"] = torch.zeros(3)
    outcome = them.run(pb.ROUND_PHASE_PREPARE, them.round(2, formation_timeout_s=30))
    assert "model.extra.weight" in error_of(outcome, "rollout-1/0", ConfigError)
    # The others do not wait for its card until their deadline.
    assert isinstance(outcome["trainer/0"], PeerLost)


def test_a_rank_in_another_round_is_named(fleet: Callable[..., Fleet]) -> None:
    them = fleet(Parallel(), {"rollout-0": Parallel()})
    them.sync(them.round(1))
    outcome = them.run_each(pb.ROUND_PHASE_PREPARE, {"trainer/0": them.round(2), "rollout-0/0": them.round(3)})
    assert "rollout-0/0 is in round round-3" in str(outcome["trainer/0"])
