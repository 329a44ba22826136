"""A process group of one epoch: gloo for bytes in host memory, NCCL for those on GPUs; none of torch's global groups.

Headers, cards and acknowledgements are host bytes and always go over gloo. So a peer's death is noticed immediately
also where the payload goes over NCCL. When a connection closes, gloo ends the waits of operations that have not begun.
It forgets one that is half received, or queued behind a send (pair.cc, signalException: neither `rx_` nor `tx_`): its
wait ends at its deadline only, whatever is closed meanwhile. So no code relies on the end of a wait: `probe` finds a
closed connection, `abort` closes all others, and a waiting thread can be left behind (`give_up`, watched.py).

nccl.py makes NCCL's groups. The host polls `is_completed`, because its deadline and `abort` replace the groups' own.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from servicekit.addresses import split_address
from servicekit.errors import DeadlineExceeded, PeerLost
from weightsync.transfer.communicators.nccl import build_lanes

NCCL_POLL_S = 0.0005  # shorter than the transfer of a bucket (32 MiB at 50 GB/s: 0.7 ms), long enough to free the core
# NCCL's abort waits for calls under way in other threads, which may wait for a lost peer: leave it behind after this.
LANE_ABORT_S = 2.0
CARD_BYTES = 1024
CPU = torch.device("cpu")
# Tags of messages that no rank sends, and of the first one between two ranks: no sequence of a plan is as large.
_CLOSING_TAG = 2**31 - 1
_PROBE_TAG = 2**31 - 3
_FIRST_TAG = 2**31 - 5


@dataclass(frozen=True, slots=True)
class Pending:
    """A send or receive under way."""

    work: dist.Work
    on_device: bool


class Communicator:
    """Point-to-point messages between the ranks of a group. Every wait has a deadline.

    SGLang and Megatron own the global default groups of their processes, so this uses bare process groups that are not
    registered: they cannot collide with others, and dropping them closes them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        rank: int,
        slots: Sequence[str],
        store: dist.Store,
        device: torch.device = CPU,
        lanes: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.rank = rank
        self.slots = tuple(slots)
        self.device = device
        self._group = group
        self._lanes = tuple(lanes)  # of NCCL
        self._unaborted = self._lanes
        self._store = store  # keeps the TCP store alive for as long as its group
        self._lock = threading.Lock()
        self.closed = ""  # why it was closed; empty while it is open
        self._waits_since_s: float | None = None
        self._given_up = False
        self._peers: set[int] = set()  # with whom there has been a message
        self._connected: set[tuple[int, int]] = set()

    def send(self, buffer: torch.Tensor, to: int, tag: int, lane: int = 0) -> Pending:
        """Start sending a contiguous buffer. Raises: PeerLost: the peer is known to be lost.

        Args:
            tag: identifies the message; the same at both ends.
            lane: NCCL lane; the same at both ends.
        """
        self._peers.add(to)
        with self._peer_errors(to), self._starting(buffer):
            return Pending(self._carrier(buffer, lane).send([buffer], to, tag), _on_device(buffer))

    def receive(self, buffer: torch.Tensor, source: int, tag: int, lane: int = 0) -> Pending:
        """Start receiving into a contiguous buffer; see send(). Raises: PeerLost: the peer is known to be lost."""
        self._peers.add(source)
        with self._peer_errors(source), self._starting(buffer):
            return Pending(self._carrier(buffer, lane).recv([buffer], source, tag), _on_device(buffer))

    def _starting(self, buffer: torch.Tensor) -> AbstractContextManager[None]:
        """Count the start of an NCCL operation as a wait: NCCL may block in it until the peer's first message."""
        return self._waiting() if _on_device(buffer) else nullcontext()

    def connect(self, sender: int, receiver: int, lane: int, timeout_s: float) -> None:
        """Send a byte from one rank to the other, of which this is one, and wait for it; nothing the second time.

        NCCL connects two ranks at their first message, and waits there for the other end, however long that takes.

        Raises: PeerLost: naming the other end.
        """
        if (sender, receiver) in self._connected:
            return
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        if sender == self.rank:
            pending, peer = self.send(byte, receiver, _FIRST_TAG, lane), receiver
        else:
            pending, peer = self.receive(byte, sender, _FIRST_TAG, lane), sender
        self.wait(pending, peer, timeout_s)
        self._connected.add((sender, receiver))

    def wait(self, pending: Pending, peer: int, timeout_s: float) -> None:
        """Wait for an operation. Raises: PeerLost, naming the peer: it died, or did not answer within the deadline."""
        with self._peer_errors(peer), self._waiting():
            if pending.on_device:
                self._poll(pending.work, timeout_s)
            else:
                pending.work.wait(timedelta(seconds=max(timeout_s, 0.001)))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Surround every wait: nothing is read or written inside, so that a waiting thread may be left behind.

        Raises: PeerLost: the communicator was closed.
        """
        with self._lock:
            self._require_open()
            self._waits_since_s = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._waits_since_s = None
                given_up = self._given_up
        if given_up:
            self._require_open()

    def _require_open(self) -> None:
        if self.closed:
            raise PeerLost(f"{self.slots[self.rank]}: {self.closed}")

    @contextmanager
    def _peer_errors(self, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(f"{self.slots[self.rank]}: lost {self.slots[peer]}: {error}") from error

    def exchange(self, card: bytes, timeout_s: float) -> list[bytes]:
        """Send this rank's card (at most CARD_BYTES - 4 bytes) to all ranks. Returns: the cards of all, by rank."""
        if len(card) > CARD_BYTES - 4:
            raise ValueError(f"a card has {len(card)} bytes, at most {CARD_BYTES - 4} fit")
        framed = (len(card).to_bytes(4, "little") + card).ljust(CARD_BYTES, b"\0")
        mine = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in self.slots]
        try:
            work = self._group.allgather([theirs], [mine])
            with self._waiting():
                work.wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            raise PeerLost(f"{self.slots[self.rank]}: lost a peer before the transfer: {error}") from error
        frames = [bytes(tensor.numpy()) for tensor in theirs]
        return [frame[4 : 4 + int.from_bytes(frame[:4], "little")] for frame in frames]

    def prove(self, timeout_s: float) -> None:
        """Run a tiny allreduce over every group: it proves that the groups work, not only connect."""
        self._prove(self._group, torch.ones(1, dtype=torch.int64), timeout_s)
        for lane in self._lanes:
            self._prove(lane, torch.ones(1, dtype=torch.int64, device=self.device), timeout_s)

    def probe(self, waiting_s: float) -> None:
        """Look for a lost peer if the owner has waited for this long; abort the communicator if one is found.

        An operation can be posted only on an open connection. Called from another thread than the owner's.
        """
        with self._lock:
            since_s = self._waits_since_s
        if self.closed or since_s is None or time.monotonic() - since_s < waiting_s:
            return
        for peer in sorted(self._peers):
            try:
                self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _PROBE_TAG)
            except RuntimeError as error:
                self.abort(f"lost {self.slots[peer]}: {error}")
                return

    def give_up(self) -> bool:
        """Give up a closed communicator's owner if it is in a wait: it will touch nothing when that ends.

        Returns: whether it is in a wait.
        """
        with self._lock:
            self._given_up = bool(self.closed) and self._waits_since_s is not None
            return self._given_up

    def abort(self, why: str = "given up") -> None:
        """Close the connections, so that every other rank notices. May be called from any thread."""
        with self._lock:
            self.closed = self.closed or why
            lanes, self._unaborted = self._unaborted, ()
        self._close_gloo()  # first: our waits for NCCL poll `closed`, and our peers watch their connections to us
        ends = [threading.Thread(target=lane.abort, name="abort", daemon=True) for lane in lanes]
        for end in ends:
            end.start()
        give_up_at = time.monotonic() + LANE_ABORT_S
        for end in ends:
            end.join(max(0.0, give_up_at - time.monotonic()))

    def _close_gloo(self) -> None:
        """Close all connections: ProcessGroupGloo.abort() does not, but a receive that times out does.

        A receive that ends because its peer closes at the same moment closes no other, so all peers are tried.
        """
        for peer in range(len(self.slots)):
            if peer == self.rank:
                continue
            with suppress(RuntimeError):  # closed already, by its peer or an earlier time-out; or this time-out
                work = self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, _CLOSING_TAG)
                work.wait(timedelta(milliseconds=1))

    def _prove(self, group: dist.ProcessGroup, token: torch.Tensor, timeout_s: float) -> None:
        self.wait(Pending(group.allreduce([token]), _on_device(token)), self.rank, timeout_s)
        if int(token.item()) != len(self.slots):
            raise PeerLost(
                f"{self.slots[self.rank]}: {int(token.item())} of {len(self.slots)} ranks answered the proof"
            )

    def _carrier(self, buffer: torch.Tensor, lane: int) -> dist.ProcessGroup:
        if not _on_device(buffer):
            return self._group
        if not self._lanes:
            raise ValueError(f"a buffer on {buffer.device} in a group without NCCL")
        return self._lanes[lane % len(self._lanes)]

    def _poll(self, work: dist.Work, timeout_s: float) -> None:
        """Wait on the host for NCCL. Raises: RuntimeError: NCCL's, or the deadline has passed (and it is aborted)."""
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not work.is_completed():
            self._require_open()
            if time.monotonic() >= deadline:
                self.abort("an NCCL operation is late")  # its kernels would spin on the GPU for ever
                raise RuntimeError(f"NCCL did not finish in {timeout_s:g} s")
            pause.wait(NCCL_POLL_S)
        work.wait()  # raises NCCL's error, if there is one


def _on_device(buffer: torch.Tensor) -> bool:
    return bool(buffer.device.type != "cpu")


def join_store(endpoint: str, timeout_s: float) -> dist.TCPStore:
    """Connect to a store at "host:port". Raises: PeerLost: it does not answer."""
    host, port = split_address(endpoint)
    try:
        return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout_s))
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
    """Form the group; every rank calls it at the same time.

    Args:
        name: unique per attempt, so that a stale process cannot join.
        slots: name of each rank.
        host: address of this process's interface (gloo binds to it).
    Raises: DeadlineExceeded: naming the ranks that did not join.
    """
    prefixed = dist.PrefixStore(name, store)
    prefixed.set(f"here/{rank}", b"1")
    try:
        group = _gloo(prefixed, rank, len(slots), host, timeout_s)
        lanes = build_lanes(prefixed, rank, len(slots), device) if device.type == "cuda" else ()
        communicator = Communicator(group, rank=rank, slots=slots, store=store, device=device, lanes=lanes)
        communicator.prove(timeout_s)
        return communicator
    except (RuntimeError, PeerLost) as error:
        missing = [slot for i, slot in enumerate(slots) if not _has_joined(prefixed, i)]
        who = f"missing: {', '.join(missing)}" if missing else str(error)
        raise DeadlineExceeded(f"{slots[rank]}: group {name} was not formed in {timeout_s:g} s; {who}") from error


def _has_joined(store: dist.Store, rank: int) -> bool:
    try:
        return bool(store.check([f"here/{rank}"]))
    except RuntimeError:
        return False


def _gloo(store: dist.Store, rank: int, size: int, host: str, timeout_s: float) -> dist.ProcessGroup:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)
