"""Every thread that works for a rank works on the rank's GPU; CUDA's current device, a thread's own, is simulated."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from servicekit.errors import ConfigError
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.stores import tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.transfer import devices
from weightsync.transfer.communicators.cache import CommunicatorCache
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.communicators.watched import run_watched
from weightsync.transfer.session import SyncMember

GPU = torch.device("cuda", 3)
SLOTS = ("trainer/0", "rollout-0/0", "rollout-0/1", "rollout-0/2", "rollout-0/3")


@dataclass
class Threads:
    """CUDA's current device of each thread, and which devices were waited for, in words."""

    _own: threading.local = field(default_factory=threading.local)
    waited: list[str] = field(default_factory=list)

    def current(self) -> int:
        return int(getattr(self._own, "index", 0))

    def exchange(self, index: int) -> int:
        before = self.current()
        if index >= 0:
            self._own.index = index
        return before

    def index_of(self, device: Any) -> int:
        return self.current() if device is None else torch.device(device).index

    def synchronize(self, device: Any = None) -> None:
        self.waited.append(f"device {self.index_of(device)}")

    def current_stream(self, device: Any = None) -> Any:
        index, waited = self.index_of(device), self.waited

        class Stream:
            def synchronize(self) -> None:
                waited.append(f"stream of {index}")

        return Stream()


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    them = Threads()
    replacements: dict[str, Callable[..., Any]] = {
        "_exchange_device": them.exchange,
        "_maybe_exchange_device": them.exchange,
        "current_device": them.current,
        "synchronize": them.synchronize,
        "current_stream": them.current_stream,
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    return them


@pytest.fixture
def member(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> SyncMember:
    """TP rank 3 of a replica, whose parameters are on GPU 3."""
    monkeypatch.setattr("weightsync.transfer.session.Rendezvous", lambda *_: None)
    spec, parallel = tiny_spec(num_key_value_heads=4), Parallel(tensor=4)
    with FakeTensorMode():
        tensors = {
            name: torch.empty(shape, device=GPU)
            for name, shape in sglang_layout(spec, parallel).parameters_of(3).items()
        }
    return SyncMember(
        spec=spec, slot="rollout-0/3", parallel=parallel, tensors=tensors, redis_url="unix:///nobody", group="g"
    )


def in_a_foreign_thread(action: Callable[[], Any]) -> Any:
    """As gRPC runs what a request asks for."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(action).result()


@pytest.mark.parametrize("phase", [each for each in pb.RoundPhase.values() if each])
def test_a_phase_runs_on_the_ranks_gpu(
    threads: Threads, member: SyncMember, monkeypatch: pytest.MonkeyPatch, phase: "pb.RoundPhase.ValueType"
) -> None:
    seen: list[int] = []

    def run(*_: Any) -> pb.PhaseReport:
        seen.append(torch.cuda.current_device())
        return pb.PhaseReport()

    for work in ("_advance", "_abort"):
        monkeypatch.setattr(member, work, run)
    in_a_foreign_thread(lambda: member.run_phase(phase, pb.Round(round_id="r")))
    assert seen == [GPU.index]
    assert threads.current() == 0  # of this thread


def test_what_is_no_phase_runs_there_too(
    threads: Threads, member: SyncMember, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[int] = []

    def look(*_: Any, **__: Any) -> Any:
        seen.append(torch.cuda.current_device())
        raise InterruptedError

    for name in ("shard.tensor_checksums", "shard.poison_tensors", "transfer.open_latest", "transfer.check_folder"):
        monkeypatch.setattr(f"weightsync.transfer.{name}", look)
    for action in (member.checksums, member.poison, lambda: member.load_published(tmp_path, at_least=1)):
        with pytest.raises(InterruptedError):
            in_a_foreign_thread(action)
    assert seen == [GPU.index] * 3


def test_a_commit_waits_for_the_ranks_gpu(threads: Threads, member: SyncMember) -> None:
    in_a_foreign_thread(lambda: member._transfer.run(pb.ROUND_PHASE_COMMIT, pb.Round()))
    assert set(threads.waited) == {f"device {GPU.index}"}


def test_waits_name_the_device(threads: Threads) -> None:
    in_a_foreign_thread(lambda: devices.wait_for_stream(GPU))
    in_a_foreign_thread(lambda: devices.wait_for_device(GPU))
    devices.wait_for_device(torch.device("cpu"))
    assert threads.waited == ["stream of 3", "device 3"]


def communicator_on_gpu() -> Communicator:
    group: Any = object()
    return Communicator(group, rank=4, slots=SLOTS, store=group, device=GPU, lanes=[group])


def test_the_proof_of_a_group_is_on_the_ranks_gpu(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL refuses a communicator whose ranks share a GPU, or hangs."""
    tokens: list[torch.device] = []
    monkeypatch.setattr(Communicator, "_prove", lambda self, group, token, timeout_s: tokens.append(token.device))

    def prove() -> None:
        with FakeTensorMode():
            communicator_on_gpu().prove(1.0)

    in_a_foreign_thread(prove)
    assert tokens == [torch.device("cpu"), GPU]


def test_a_group_is_formed_on_the_ranks_gpu(threads: Threads) -> None:
    """In a thread of its own: NCCL makes a communicator for the current device of the thread that asks."""
    lease: Any = SimpleNamespace(slot="rollout-0/3")
    build: Callable[[], Any] = torch.cuda.current_device
    cache = CommunicatorCache(lease, "127.0.0.1", GPU)
    assert in_a_foreign_thread(lambda: cache._build(build, pb.Round(formation_timeout_s=10))) == GPU.index


def test_watched_work_runs_on_the_ranks_gpu(threads: Threads) -> None:
    work = torch.cuda.current_device
    watched = lambda: run_watched(communicator_on_gpu(), work, time.monotonic() + 10, str)  # noqa: E731
    assert in_a_foreign_thread(watched) == GPU.index


@pytest.mark.parametrize(("there", "held"), [(True, 8), (False, 0)])
def test_ranks_hold_a_gpu_each_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch, there: bool, held: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert devices.gpus_of(8) == held


@pytest.mark.parametrize(
    ("chosen", "seen", "why"),
    [
        (None, 4, ""),
        ("0,1", 2, ""),
        ("2,9", 1, "CUDA_VISIBLE_DEVICES=2,9 names 2 GPUs, and CUDA sees 1"),
        ("MIG-a,MIG-b", 1, "one MIG device at most"),
    ],
)
def test_every_gpu_that_is_chosen_is_there(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None, seen: int, why: str
) -> None:
    """CUDA leaves out what it does not find, without a word; a rank would end later, with an error of an engine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    if not why:
        devices.check_device("cuda")
        return
    with pytest.raises(ConfigError, match=why):
        devices.check_device("cuda")


@pytest.mark.parametrize(
    ("wanted", "there", "built_for", "refusal"),
    [
        ("auto", True, "13.0", None),
        ("auto", False, None, None),
        ("cuda", True, "13.0", None),
        ("cpu", False, "13.0", None),
        ("cpu", True, "13.0", "set CUDA_VISIBLE_DEVICES= "),
        ("cuda", False, None, "is built without CUDA"),
        ("cuda", False, "13.0", "driver 535.104.05 serves CUDA 12, and torch is built for CUDA 13.0"),
    ],
)
def test_a_device_that_is_asked_for_is_there_or_why_not(
    monkeypatch: pytest.MonkeyPatch, wanted: str, there: bool, built_for: str | None, refusal: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(devices, "driver_text", lambda: "NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n")
    monkeypatch.setattr(devices, "driver_cuda", lambda: 12020)
    if refusal is None:
        devices.check_device(wanted)
    else:
        with pytest.raises(ConfigError, match=refusal):
            devices.check_device(wanted)
