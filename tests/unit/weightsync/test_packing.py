"""A packer lends what is contiguous, packs the rest, casts, and both ends cut a message alike."""

import pytest
import torch

from tests.kit.stores import canonical_tensors, cut, empty_like_rank, same, tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.plans.limits import SEGMENT_BYTES
from weightsync.plans.messages import cut_messages
from weightsync.plans.plan import make_plan
from weightsync.transfer.transports import packing
from weightsync.transfer.transports.packing import Packer, Packers

SPEC = tiny_spec(hidden_size=64, intermediate_size=96)
SOURCE = megatron_layout(SPEC, Parallel(tensor=2))
TARGET = sglang_layout(SPEC, Parallel())
MESSAGES = cut_messages(make_plan(SOURCE, TARGET), 4096)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEGMENT_BYTES, "cpu", 2048)


def sender(rank: int, dtype: torch.dtype | None = None) -> Packer:
    return Packer(SOURCE, cut(SOURCE, rank, canonical_tensors(SPEC)), "src", dtype)


def test_both_ends_cut_a_message_alike_and_lend_what_they_can() -> None:
    ends = [sender(rank) for rank in range(2)]
    receiver = Packer(TARGET, empty_like_rank(TARGET, 0), "dst")
    lent = [0, 0]
    for message in MESSAGES:
        theirs, ours = ends[message.src].segments(message), receiver.segments(message)
        assert [segment.num_bytes for segment in theirs] == [segment.num_bytes for segment in ours]
        assert sum(segment.num_bytes for segment in ours) == receiver.payload_bytes(message)
        lent[0] += sum(segment.lent is not None for segment in theirs)
        lent[1] += sum(segment.lent is not None for segment in ours)
    assert lent[0] > lent[1] > 0  # column blocks are whole parameters at the source, strided at the target


def test_segments_carry_the_whole_message() -> None:
    ends = [sender(rank) for rank in range(2)]
    store = empty_like_rank(TARGET, 0)
    receiver = Packer(TARGET, store, "dst")
    for message in MESSAGES:
        for theirs, ours in zip(ends[message.src].segments(message), receiver.segments(message), strict=True):
            part = theirs.lent if theirs.lent is not None else torch.empty(theirs.num_bytes, dtype=torch.uint8)
            if theirs.lent is None:
                ends[message.src].pack_segment(theirs, part)
            if ours.lent is not None:
                ours.lent.copy_(part)
            else:
                receiver.unpack_segment(ours, part)
    expected = cut(TARGET, 0, canonical_tensors(SPEC))
    for name, tensor in store.items():
        tensor.nan_to_num_(0.0)  # padding of the vocabulary
        assert same({name: tensor}, {name: expected[name]}) == []


def test_a_cast_lends_nothing() -> None:
    packer = sender(0, torch.bfloat16)
    message = next(message for message in MESSAGES if message.src == 0)
    assert all(segment.lent is None for segment in packer.segments(message))
    assert packer.payload_bytes(message) == message.elements * 2
    payload = torch.empty(packer.payload_bytes(message), dtype=torch.uint8)
    packer.pack(message, payload)
    exact = torch.empty(message.elements * 4, dtype=torch.uint8)
    sender(0).pack(message, exact)
    assert torch.equal(payload.view(torch.bfloat16), exact.view(torch.float32).to(torch.bfloat16))


def test_packers_are_made_anew_where_a_tensor_moved() -> None:
    store = cut(SOURCE, 0, canonical_tensors(SPEC))
    packers = Packers(SOURCE, "src")
    first = packers.get(store, None)
    assert packers.get(store, None) is first
    assert packers.get(store, torch.bfloat16) is not first
    again = packers.get(store, None)
    name = next(iter(store))
    store[name] = store[name].clone()
    assert packers.get(store, None) is not again


@pytest.mark.parametrize("piece_bytes", [64, 256 * 1024])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_stored_is_what_would_be_packed(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, dtype: torch.dtype | None
) -> None:
    monkeypatch.setattr(packing, "PIECE_BYTES", piece_bytes)
    packer = Packer(TARGET, cut(TARGET, 0, canonical_tensors(SPEC)), "dst", dtype)
    for message in MESSAGES:
        payload = torch.empty(packer.payload_bytes(message), dtype=torch.uint8)
        packer.pack(message, payload)
        pieces = [piece.clone() for piece in packer.stored(message)]  # one is valid until the next
        assert torch.equal(torch.cat(pieces), payload)


@pytest.mark.parametrize(("device", "bytes_each"), [("cpu", 2**12), ("meta", 2**13)])
def test_segments_are_of_the_devices_size(device: str, bytes_each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL wants larger ones than gloo: what is smaller is gathered, what is larger goes alone."""
    monkeypatch.setitem(SEGMENT_BYTES, device, bytes_each)
    tensors = {name: torch.empty(shape, device=device) for name, shape in TARGET.parameters_of(0).items()}
    receiver = Packer(TARGET, tensors, "dst")
    messages = cut_messages(make_plan(SOURCE, TARGET), 10**9)
    segments = [segment for message in messages for segment in receiver.segments(message)]
    sizes = [[block.elements * 4 for block in segment.blocks] for segment in segments]
    large = sum(size >= bytes_each for blocks in sizes for size in blocks)
    assert large > 0
    assert sum(len(blocks) == 1 and blocks[0] >= bytes_each for blocks in sizes) == large
    assert len(sizes) <= 2 * large + len(messages)  # between two that go alone, what is small is one segment
