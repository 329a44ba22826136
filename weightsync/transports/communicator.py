"""A process group of one epoch over gloo (CPU) or NCCL (CUDA), apart from torch.distributed's global groups."""

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from servicekit.errors import DeadlineExceeded, PeerLost


class Communicator:
    """Point-to-point messages between the ranks of a group. Every wait has a deadline.

    SGLang and Megatron own the global default groups of their processes, so this holds a bare process group that is
    registered nowhere: nothing of theirs can collide with it, and dropping it closes it.
    """

    def __init__(self, group: dist.ProcessGroup, *, rank: int, slots: Sequence[str], store: dist.Store) -> None:
        self.rank = rank
        self.slots = tuple(slots)
        self._group = group
        self._store = store  # keeps the TCP store alive for as long as its group

    def send(self, buffer: torch.Tensor, to: int, tag: int) -> dist.Work:
        """Starts sending a contiguous buffer."""
        return self._group.send([buffer], to, tag)

    def receive(self, buffer: torch.Tensor, source: int, tag: int) -> dist.Work:
        """Starts receiving into a contiguous buffer."""
        return self._group.recv([buffer], source, tag)

    def wait(self, work: dist.Work, peer: int, timeout_s: float) -> None:
        """Raises: PeerLost, naming the peer: it died, or did not answer within the deadline."""
        try:
            work.wait(timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:
            raise PeerLost(f"{self.slots[self.rank]}: lost {self.slots[peer]}: {error}") from error

    def prove(self, device: torch.device, timeout_s: float) -> None:
        """A tiny exchange that every rank takes part in: the group works, not only connects."""
        token = torch.ones(1, dtype=torch.int64, device=device)
        work = self._group.allreduce([token])
        self.wait(work, self.rank, timeout_s)
        if int(token.item()) != len(self.slots):
            raise PeerLost(
                f"{self.slots[self.rank]}: {int(token.item())} of {len(self.slots)} ranks answered the proof"
            )

    def abort(self) -> None:
        """Closes the connections at once; pending operations on any rank fail."""
        if hasattr(self._group, "abort"):
            self._group.abort()


def host_store(host: str, timeout_s: float) -> dist.TCPStore:
    """A TCP store on a port that the system picks. Returns: the store; its address is host:store.port."""
    return dist.TCPStore(host, 0, None, True, timedelta(seconds=timeout_s), wait_for_workers=False)


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
    build: Callable[[], dist.ProcessGroup] = (
        (lambda: _nccl(prefixed, rank, len(slots), timeout_s))
        if device.type == "cuda"
        else (lambda: _gloo(prefixed, rank, len(slots), host, timeout_s))
    )
    try:
        communicator = Communicator(build(), rank=rank, slots=slots, store=store)
        communicator.prove(device, timeout_s)
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
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
