"""How NCCL groups are made: without torch's own error handling, connected at once, a lane for each direction."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.communicators.nccl import LANES, build_lanes

GPU = torch.device("cuda", 3)
SETTINGS = ("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


class Group:
    """ProcessGroupNCCL, as far as it is used; it notes what torch reads from the environment."""

    made: list["Group"]

    class Options:
        """Its options."""

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.environment = {name: os.environ.get(name) for name in SETTINGS}
        self.connected: list[torch.device] = []
        self.sent: list[int] = []
        self.received: list[int] = []
        self.aborts = 0
        self.made.append(self)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)

    def send(self, tensors: Any, to: int, tag: int) -> None:
        self.sent.append(to)

    def recv(self, tensors: Any, source: int, tag: int) -> None:
        self.received.append(source)

    def abort(self) -> None:
        self.aborts += 1


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    Group.made = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.setenv(SETTINGS[1], "1")
    monkeypatch.delenv(SETTINGS[0], raising=False)
    return Group.made


def test_a_lost_peer_is_an_error_and_no_end_of_the_process(groups: list[Group]) -> None:
    build_lanes(dist.HashStore(), 0, 2, GPU)
    assert [group.environment for group in groups] == [dict(zip(SETTINGS, ("1", "0"), strict=True))] * LANES
    assert {name: os.environ.get(name) for name in SETTINGS} == {SETTINGS[0]: None, SETTINGS[1]: "1"}


def test_communicators_are_connected_before_a_message(groups: list[Group]) -> None:
    build_lanes(dist.HashStore(), 0, 2, GPU)
    assert [group.connected for group in groups] == [[GPU]] * LANES


class Closed:
    """A gloo group without connections."""

    def recv(self, *_: Any) -> None:
        raise RuntimeError("closed")


def communicator(lanes: Any) -> Communicator:
    group: Any = Closed()
    return Communicator(group, rank=0, slots=["a", "b", "c"], store=group, device=GPU, lanes=lanes)


def test_what_is_passed_on_does_not_wait_behind_what_comes(groups: list[Group]) -> None:
    ours = communicator(build_lanes(dist.HashStore(), 0, 3, GPU))

    class OnGpu:
        """A tensor on a GPU."""

        is_cuda, device = True, GPU

    buffer: Any = OnGpu()
    ours.receive(buffer, 1, 7, lane=0)
    ours.send(buffer, 2, 7, lane=1)
    ours.receive(buffer, 1, 8, lane=2)
    assert [(group.sent, group.received) for group in groups] == [([], [1, 1]), ([2], [])]


def test_an_abort_ends_both_lanes_once(groups: list[Group]) -> None:
    """Whoever fails, whoever watches and whoever drops it abort it: a lane that hangs must not hold each of them up."""
    ours = communicator(build_lanes(dist.HashStore(), 0, 3, GPU))
    ours.abort("given up")
    ours.abort("failed")
    assert [group.aborts for group in groups] == [1] * LANES
