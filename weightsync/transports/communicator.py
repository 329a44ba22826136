"""A process group of one epoch: gloo for bytes in host memory, NCCL for those on GPUs; none of torch's global groups.

Headers, cards and acknowledgements are host bytes and always go over gloo, so that a peer's death is noticed at once
(weight-sync.md section 8) also where the payload goes over NCCL.

NCCL has not been run here (no GPU). Written from its interface, unverified: bare send/recv pairs of ProcessGroupNCCL,
each pair used in one direction only; `is_completed` polled by the host, since `wait` only blocks a stream; the group's
own timeout is out of the way (its watchdog would end the process), the host's deadline and `abort` stand in for it.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from servicekit.errors import DeadlineExceeded, PeerLost

NCCL_POLL_S = 0.0005  # much shorter than a bucket's way (32 MiB at 50 GB/s: 0.7 ms), long enough to leave the core
NCCL_WATCHDOG_S = 24 * 3600.0
CARD_BYTES = 1024
_CLOSING_TAG = 2**31 - 1  # of a message that nobody sends


@dataclass(frozen=True, slots=True)
class Pending:
    """A send or receive under way."""

    work: dist.Work
    on_device: bool


class Communicator:
    """Point-to-point messages between the ranks of a group. Every wait has a deadline.

    SGLang and Megatron own the global default groups of their processes, so this holds bare process groups that are
    registered nowhere: nothing of theirs can collide with them, and dropping them closes them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        rank: int,
        slots: Sequence[str],
        store: dist.Store,
        device_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.rank = rank
        self.slots = tuple(slots)
        self._group = group
        self._device_group = device_group
        self._store = store  # keeps the TCP store alive for as long as its group

    def send(self, buffer: torch.Tensor, to: int, tag: int) -> Pending:
        """Starts sending a contiguous buffer. Raises: PeerLost: the peer is known to be gone."""
        with self._peer_errors(to):
            return Pending(self._carrier(buffer).send([buffer], to, tag), buffer.is_cuda)

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> Pending:
        """Starts receiving into a contiguous buffer. Raises: PeerLost: the peer is known to be gone."""
        with self._peer_errors(source):
            return Pending(self._carrier(buffer).recv([buffer], source, tag), buffer.is_cuda)

    def wait(self, pending: Pending, peer: int, timeout_s: float) -> None:
        """Raises: PeerLost, naming the peer: it died, or did not answer within the deadline."""
        with self._peer_errors(peer):
            if pending.on_device:
                self._poll(pending.work, timeout_s)
            else:
                pending.work.wait(timedelta(seconds=max(timeout_s, 0.001)))

    @contextmanager
    def _peer_errors(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"{self.slots[self.rank]}: lost {self.slots[peer]}: {error}") from error

    def exchange(self, card: bytes, timeout_s: float) -> list[bytes]:
        """Gives every rank every rank's card (fewer than CARD_BYTES bytes). Returns: the cards, by rank."""
        if len(card) > CARD_BYTES - 4:
            raise ValueError(f"a card has {len(card)} bytes, at most {CARD_BYTES - 4} fit")
        framed = (len(card).to_bytes(4, "little") + card).ljust(CARD_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in self.slots]
        try:
            work = self._group.allgather([theirs], [mine])
            work.wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            raise PeerLost(f"{self.slots[self.rank]}: lost a peer before the transfer: {error}") from error
        frames = [bytes(tensor.numpy()) for tensor in theirs]
        return [frame[4 : 4 + int.from_bytes(frame[:4], "little")] for frame in frames]

    def prove(self, timeout_s: float) -> None:
        """A tiny exchange that every rank takes part in: the groups work, not only connect."""
        self._prove(self._group, torch.ones(1, dtype=torch.int64), timeout_s)
        if self._device_group is not None:
            self._prove(self._device_group, torch.ones(1, dtype=torch.int64, device="cuda"), timeout_s)

    def abort(self) -> None:
        """Closes the connections at once; pending operations on any rank fail. May be called from any thread."""
        if self._device_group is not None and hasattr(self._device_group, "abort"):
            self._device_group.abort()
        self._close_gloo()

    def _close_gloo(self) -> None:
        """ProcessGroupGloo.abort() leaves pending waits alone; a receive that times out closes every connection."""
        peer = (self.rank + 1) % len(self.slots)
        try:
            work = self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _CLOSING_TAG)
            work.wait(timedelta(milliseconds=1))
        except RuntimeError:  # the time-out, or connections that are closed already
            return

    def _prove(self, group: dist.ProcessGroup, token: torch.Tensor, timeout_s: float) -> None:
        self.wait(Pending(group.allreduce([token]), token.is_cuda), self.rank, timeout_s)
        if int(token.item()) != len(self.slots):
            raise PeerLost(
                f"{self.slots[self.rank]}: {int(token.item())} of {len(self.slots)} ranks answered the proof"
            )

    def _carrier(self, buffer: torch.Tensor) -> dist.ProcessGroup:
        if buffer.device.type == "cpu":
            return self._group
        if self._device_group is None:
            raise ValueError(f"a buffer on {buffer.device} in a group without NCCL")
        return self._device_group

    def _poll(self, work: dist.Work, timeout_s: float) -> None:
        """Waits on the host for NCCL. Raises: RuntimeError: time is over (and the group aborted), or NCCL's own."""
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not work.is_completed():
            if time.monotonic() >= deadline:
                self.abort()  # its kernels would spin on the GPU for ever
                raise RuntimeError(f"NCCL did not finish in {timeout_s:g} s")
            pause.wait(NCCL_POLL_S)
        work.wait()  # raises what NCCL has noticed


def join_store(endpoint: str, timeout_s: float) -> dist.TCPStore:
    """Connects to a store at "host:port". Raises: PeerLost: nobody listens there."""
    host, _, port = endpoint.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), None, False, timedelta(seconds=timeout_s))
    except (RuntimeError, dist.DistNetworkError) as error:
        raise PeerLost(f"the TCP store at {endpoint} does not answer: {error}") from error


def form(
    store: dist.Store,
    *,
    name: str,
    rank: int,
    slots: Sequence[str],
    host: str,
    device: torch.device,
    timeout_s: float,
) -> Communicator:
    """Builds the group; every rank calls it at the same time.

    Args:
        name: unique per group and epoch, so that a stale process cannot join.
        slots: name of each rank.
        host: address of this process's interface (gloo binds to it).
    Raises: DeadlineExceeded: naming the ranks that did not come.
    """
    prefixed = dist.PrefixStore(name, store)
    prefixed.set(f"here/{rank}", b"1")
    build: Callable[[], dist.ProcessGroup | None] = (
        (lambda: _nccl(dist.PrefixStore("nccl", prefixed), rank, len(slots), timeout_s))
        if device.type == "cuda"
        else (lambda: None)
    )
    try:
        group = _gloo(prefixed, rank, len(slots), host, timeout_s)
        communicator = Communicator(group, rank=rank, slots=slots, store=store, device_group=build())
        communicator.prove(timeout_s)
        return communicator
    except (RuntimeError, PeerLost) as error:
        missing = [slot for i, slot in enumerate(slots) if not _is_here(prefixed, i)]
        who = f"missing: {', '.join(missing)}" if missing else str(error)
        raise DeadlineExceeded(f"{slots[rank]}: group {name} was not formed in {timeout_s:g} s; {who}") from error


def _is_here(store: dist.Store, rank: int) -> bool:
    try:
        return bool(store.check([f"here/{rank}"]))
    except RuntimeError:
        return False


def _gloo(store: dist.Store, rank: int, size: int, host: str, timeout_s: float) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=max(timeout_s, NCCL_WATCHDOG_S))
    return dist.ProcessGroupNCCL(store, rank, size, options)
