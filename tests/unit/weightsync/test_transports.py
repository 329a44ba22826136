"""Ranks judge each other's cards by one rule; descriptors travel over a socket that only a key opens."""

import os
import threading
import time

import pytest
import torch

from servicekit.errors import Aborted, ConfigError, DeadlineExceeded, PeerLost
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.transfer.transports import shared_memory
from weightsync.transfer.transports.links import check_cards
from weightsync.transfer.transports.shared_memory import (
    Exposure,
    MemoryServer,
    OpenedMemory,
    expose_parameters,
    expose_slots,
    host_id,
    open_memory,
)

SLOTS = ("trainer/0", "trainer/1", "rollout-0/0")


def card(**changes: object) -> pb.TransportCard:
    one = pb.TransportCard(round_id="r", plan_digest="p", wire_dtype="bfloat16")
    one.MergeFrom(pb.TransportCard(**changes))  # type: ignore[arg-type]
    return one


def test_equal_cards_pass() -> None:
    check_cards([card()] * 3, SLOTS, 2)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"round_id": "other"}, Aborted, "rollout-0/0 is in round other, trainer/0 in r"),
        ({"wire_dtype": "float32"}, ConfigError, "rollout-0/0 holds float32, trainer/0 sends bfloat16"),
        ({"transport": pb.SYNC_TRANSPORT_DISK}, ConfigError, "rollout-0/0 takes SYNC_TRANSPORT_DISK"),
        ({"plan_digest": "q"}, ConfigError, "rollout-0/0 has plan q, trainer/0 has p"),
    ],
)
def test_the_card_that_differs_is_named(changes: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        check_cards([card(), card(), card(**changes)], SLOTS, 2)


def opened(exposure: Exposure) -> OpenedMemory:
    """What a receiver sees of an exposure that was handed out over a socket."""
    server = MemoryServer()
    thread = threading.Thread(target=server.serve, args=(exposure, 1, time.monotonic() + 10))
    thread.start()
    try:
        return open_memory(server.name, server.key, time.monotonic() + 10)
    finally:
        thread.join(timeout=10)
        server.close()


def test_parameters_move_into_shared_memory_with_their_views() -> None:
    storage = torch.arange(24, dtype=torch.float32)
    view = storage[8:].view(4, 4)
    exposure = expose_parameters({"a": storage[:8], "b": view})
    assert exposure is not None
    assert len(exposure.fds) == 1  # one storage
    theirs = opened(exposure)
    storage.mul_(2)  # the owner goes on with its own tensors
    assert torch.equal(theirs.parameter("b", (4, 4), torch.float32), view)
    assert view[0, 0] == 16


def test_more_descriptors_than_one_message_passes_arrive() -> None:
    tensors = {f"p{i}": torch.full((3,), float(i)) for i in range(300)}
    exposure = expose_parameters(tensors)
    assert exposure is not None
    theirs = opened(exposure)
    assert all(torch.equal(theirs.parameter(name, (3,), torch.float32), value) for name, value in tensors.items())


def test_slots_are_taken_in_turn() -> None:
    exposure = expose_slots(2, 64, torch.device("cpu"))
    exposure.tensors[0][64:] = 7
    theirs = opened(exposure)
    exposure.close()  # a mapping outlives its descriptor
    assert theirs.slot(3).tolist() == [7] * 64
    assert theirs.slot(4).tolist() == [0] * 64


def test_a_parameter_that_was_not_handed_out_is_named() -> None:
    exposure = expose_parameters({"a": torch.zeros(4)})
    assert exposure is not None
    theirs = opened(exposure)
    with pytest.raises(PeerLost, match="no b of 16 bytes"):
        theirs.parameter("b", (4,), torch.float32)
    with pytest.raises(PeerLost, match="no a of 32 bytes"):
        theirs.parameter("a", (8,), torch.float32)


def test_who_does_not_know_the_key_gets_nothing() -> None:
    server = MemoryServer()
    failures: list[Exception] = []

    def serve() -> None:
        try:
            server.serve(expose_slots(1, 64, torch.device("cpu")), 1, time.monotonic() + 0.5)
        except DeadlineExceeded as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises((PeerLost, OSError)):
        open_memory(server.name, os.urandom(32), time.monotonic() + 5)
    thread.join(timeout=10)
    server.close()
    assert "0 of 1 receivers" in str(failures[0])


def test_a_host_is_known_by_its_kernel_and_its_network() -> None:
    assert host_id() == host_id()
    assert len(host_id().split()) == 2


class Gpu:
    """What CUDA says of a GPU."""

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """This process's, in its order; the trainer has others at the same ordinals."""
    here = [Gpu("uuid-of-6"), Gpu("uuid-of-5")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(here))
    monkeypatch.setattr(torch.cuda, "get_device_properties", here.__getitem__)
    return here


def test_a_trainers_gpu_is_found_by_its_uuid(gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    opened_at: list[int] = []

    def open_at(ordinal: int, *_: object) -> None:
        opened_at.append(ordinal)
        raise InterruptedError

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_at, raising=False)
    with pytest.raises(InterruptedError):
        shared_memory._open_cuda(pb.CudaHandle(device=0, device_uuid="uuid-of-5"))
    assert opened_at == [1]


def test_a_gpu_that_this_process_does_not_see_is_named(gpus: list[Gpu]) -> None:
    with pytest.raises(ConfigError, match=r"GPU uuid-of-0 is not among those .*uuid-of-6, uuid-of-5.*collective"):
        shared_memory._open_cuda(pb.CudaHandle(device=0, device_uuid="uuid-of-0"))
