"""A trainer rank's memory, opened by receivers on the same host: descriptors over a Unix socket, no pickle.

On CPUs a region is a file descriptor (SCM_RIGHTS); on GPUs a CUDA IPC handle, as torch makes it. The CUDA part is
written from torch's interface; not run on a GPU yet.
"""

import contextlib
import hmac
import mmap
import os
import resource
import secrets
import socket
import struct
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from servicekit.errors import ConfigError, DeadlineExceeded, PeerLost
from tandem_api.weights.v1 import weights_pb2 as pb

KEY_BYTES = 32
_LENGTH = struct.Struct("<I")
_FDS_AT_ONCE = 128  # Linux passes at most 253 in one message


def host_id() -> bytes:
    """Return an id that is equal for processes of one kernel and one network namespace, as abstract sockets need.

    Descriptors can be passed between containers that differ in everything else, because no file system is involved. The
    proof is the opening itself, in PREPARE; an error names the ranks that cannot open.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}".encode()  # noqa: PTH116 (a namespace is no file)


@dataclass(kw_only=True)
class Exposure:
    """Memory that a trainer rank hands out.

    Attributes:
        fds: descriptors of the regions on CPUs.
        cuda: storages of the regions on GPUs.
        tensors: keep the memory alive.
    """

    description: pb.SharedMemory
    fds: list[int]
    cuda: list[torch.UntypedStorage]
    tensors: list[torch.Tensor]
    owned: bool  # the descriptors are ours to close

    def describe(self) -> pb.SharedMemory:
        """Describe the regions for one receiver: a CUDA handle counts its readers, so each reader gets its own."""
        described = pb.SharedMemory()
        described.CopyFrom(self.description)
        for number, storage in enumerate(self.cuda):
            described.regions[number].cuda.CopyFrom(_cuda_handle(storage))
        return described

    def close(self) -> None:
        """Close descriptors that were made for this; the receivers' mappings stay."""
        if self.owned:
            for fd in self.fds:
                os.close(fd)
        self.fds = []


def expose_parameters(tensors: Mapping[str, torch.Tensor]) -> Exposure | None:
    """Expose the parameters themselves. On CPUs their storages move into shared memory, in place, once.

    Every tensor that views such a storage sees the move; a bare pointer into it (a numpy alias) does not.

    Returns: None if that is not possible: too many storages for descriptors, or no room in /dev/shm.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors.values():
        storages.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage())
    if len(storages) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4:
        return None
    index = {key: i for i, key in enumerate(storages)}
    parameters = [
        pb.SharedParameter(
            name=name,
            region=index[tensor.untyped_storage()._cdata],
            offset_bytes=tensor.storage_offset() * tensor.element_size(),
        )
        for name, tensor in tensors.items()
    ]
    regions = [pb.SharedRegion(bytes=storage.nbytes()) for storage in storages.values()]
    on_gpu = next(iter(tensors.values())).is_cuda
    try:
        fds = [] if on_gpu else [_descriptor(storage) for storage in storages.values()]
    except RuntimeError:
        return None
    return Exposure(
        description=pb.SharedMemory(regions=regions, parameters=parameters),
        fds=fds,
        cuda=list(storages.values()) if on_gpu else [],
        tensors=list(tensors.values()),
        owned=False,
    )


def expose_slots(slots: int, slot_bytes: int, device: torch.device) -> Exposure:
    """Make a new region of `slots` buffers, to be filled in turn."""
    size = slots * slot_bytes
    fds: list[int] = []
    if device.type == "cuda":
        arena = torch.empty(size, dtype=torch.uint8, device=device)
    else:
        fds.append(os.memfd_create("tandem-weights", os.MFD_CLOEXEC))
        os.posix_fallocate(fds[0], 0, size)  # now: a lack of memory is an error here, and would be a signal later
        arena = _mapped(fds[0], size, writable=True)
    return Exposure(
        description=pb.SharedMemory(regions=[pb.SharedRegion(bytes=size)], slots=slots, slot_bytes=slot_bytes),
        fds=fds,
        cuda=[arena.untyped_storage()] if arena.is_cuda else [],
        tensors=[arena],
        owned=True,
    )


def _descriptor(storage: Any) -> int:
    """Move a storage into shared memory unless it is there. Raises: RuntimeError: no room in /dev/shm."""
    fd, _ = storage._share_fd_cpu_()
    return int(fd)


def _cuda_handle(storage: Any) -> pb.CudaHandle:
    device, handle, size, offset, counter, counter_offset, event, sync = storage._share_cuda_()
    return pb.CudaHandle(
        device=device,
        handle=handle,
        storage_bytes=size,
        storage_offset_bytes=offset,
        ref_counter_handle=counter,
        ref_counter_offset=counter_offset,
        event_handle=event,
        event_sync_required=sync,
        device_uuid=_uuid(device),
    )


def _uuid(ordinal: int) -> str:
    """Return the driver's UUID of a GPU."""
    return str(torch.cuda.get_device_properties(ordinal).uuid)


def _ordinal_here(uuid: str) -> int:
    """Return which of this process's GPUs it is. Raises: ConfigError: none of them."""
    here = [_uuid(ordinal) for ordinal in range(torch.cuda.device_count())]
    if uuid not in here:
        raise ConfigError(
            f"the trainer's GPU {uuid} is not among those that this process sees ({', '.join(here) or 'none'}): "
            "sync.transport colocated needs CUDA_VISIBLE_DEVICES to list the GPUs of both, its own first; collective "
            "does not"
        )
    return here.index(uuid)


@dataclass(kw_only=True)
class OpenedMemory:
    """A trainer rank's memory as a receiver sees it: a uint8 tensor per region."""

    description: pb.SharedMemory
    regions: list[torch.Tensor]

    def parameter(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter. Raises: PeerLost: it was not handed out, or does not fit its region."""
        found = self._parameters.get(name)
        size = torch.Size(shape).numel() * dtype.itemsize
        if found is None or found.offset_bytes + size > self.regions[found.region].numel():
            raise PeerLost(f"the trainer's memory has no {name} of {size} bytes")
        region = self.regions[found.region]
        return region[found.offset_bytes : found.offset_bytes + size].view(dtype).view(shape)

    def slot(self, number: int) -> torch.Tensor:
        """Return the slot that holds the message of this number."""
        size = self.description.slot_bytes
        begin = (number % self.description.slots) * size
        return self.regions[0][begin : begin + size]

    def __post_init__(self) -> None:
        self._parameters = {parameter.name: parameter for parameter in self.description.parameters}


class MemoryServer:
    """An abstract Unix socket that hands out an exposure, once to each of `receivers` processes that know the key."""

    def __init__(self) -> None:
        self.name = f"tandem-{secrets.token_hex(12)}"
        self.key = secrets.token_bytes(KEY_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)

    def serve(self, exposure: Exposure, receivers: int, deadline: float) -> None:
        """Hand the exposure out. Raises: DeadlineExceeded: not all receivers have connected."""
        served = 0
        while served < receivers:
            try:
                with contextlib.closing(_accept(self._listener, deadline)) as peer:
                    if hmac.compare_digest(_receive_exactly(peer, KEY_BYTES), self.key):
                        _send_exposure(peer, exposure)
                        served += 1
            except TimeoutError:
                raise DeadlineExceeded(f"{served} of {receivers} receivers opened the trainer's memory") from None
            except (OSError, PeerLost):
                continue  # that peer has disconnected; the others still have until the deadline

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()


def open_memory(name: str, key: bytes, deadline: float) -> OpenedMemory:
    """Open what the server of that name hands out. Raises: PeerLost; OSError: why it cannot be opened here."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as peer:
        peer.settimeout(_remaining_s(deadline))
        peer.connect(f"\0{name}")
        peer.sendall(key)
        (length,) = _LENGTH.unpack(_receive_exactly(peer, _LENGTH.size))
        description = pb.SharedMemory.FromString(_receive_exactly(peer, length))
        on_cpu = sum(not region.HasField("cuda") for region in description.regions)
        fds = _receive_fds(peer, on_cpu)
    try:
        left = iter(fds)
        regions = [
            _open_cuda(region.cuda) if region.HasField("cuda") else _open_descriptor(region, next(left))
            for region in description.regions
        ]
    finally:
        for fd in fds:
            os.close(fd)
    return OpenedMemory(description=description, regions=regions)


def _open_descriptor(region: pb.SharedRegion, fd: int) -> torch.Tensor:
    size = os.fstat(fd).st_size
    if size < region.bytes:
        raise PeerLost(f"a region of the trainer's memory has {size} of {region.bytes} bytes")
    return _mapped(fd, region.bytes, writable=False)


def _open_cuda(cuda: pb.CudaHandle) -> torch.Tensor:
    ordinal = _ordinal_here(cuda.device_uuid)
    storage: Any = torch.UntypedStorage._new_shared_cuda(
        ordinal,
        cuda.handle,
        cuda.storage_bytes,
        cuda.storage_offset_bytes,
        cuda.ref_counter_handle,
        cuda.ref_counter_offset,
        cuda.event_handle,
        cuda.event_sync_required,
    )
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{ordinal}").set_(storage)


def _mapped(fd: int, size: int, *, writable: bool) -> torch.Tensor:
    """Map a descriptor as uint8 [size], for as long as the tensor lives. Fill the page tables now, not in the round."""
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it has no read-only tensors
        return torch.frombuffer(memory, dtype=torch.uint8)


def _send_exposure(peer: socket.socket, exposure: Exposure) -> None:
    body = exposure.describe().SerializeToString()
    peer.sendall(_LENGTH.pack(len(body)) + body)
    for begin in range(0, len(exposure.fds), _FDS_AT_ONCE):
        socket.send_fds(peer, [b"f"], exposure.fds[begin : begin + _FDS_AT_ONCE])
        _receive_exactly(peer, 1)  # one batch per read: the kernel never joins two


def _receive_fds(peer: socket.socket, count: int) -> list[int]:
    fds: list[int] = []
    while len(fds) < count:
        data, received, _, _ = socket.recv_fds(peer, 1, min(_FDS_AT_ONCE, count - len(fds)))
        fds += received
        if not data or not received:
            for fd in fds:
                os.close(fd)
            raise PeerLost(f"the trainer passed {len(fds)} of {count} descriptors")
        peer.sendall(b"k")
    return fds


def _accept(listener: socket.socket, deadline: float) -> socket.socket:
    listener.settimeout(_remaining_s(deadline))
    peer, _ = listener.accept()
    peer.settimeout(_remaining_s(deadline))
    return peer


def _receive_exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise PeerLost(f"a peer closed its socket after {len(data)} of {size} bytes")
        data += part
    return bytes(data)


def _remaining_s(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())
