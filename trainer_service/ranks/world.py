"""Connects the trainer's ranks: environment, a TCP store, the process groups."""

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from servicekit.addresses import join_address
from servicekit.environment import ServiceEnvironment, whole_number
from servicekit.errors import ConfigError, DeadlineExceeded, Unavailable
from servicekit.logs import get_logger
from servicekit.redis.registry import Registry
from weightsync.transfer.communicators.interfaces import GLOO_INTERFACE, address_of, interface_of
from weightsync.transfer.communicators.tcp_store import bound_store

STORE_KEY = "trainer/store"
CONNECT_TIMEOUT_S = 3.0
RETRY_S = 0.2
_HOPPER = 9

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process's rank, in torchrun's terms."""

    rank: int
    world_size: int
    local_rank: int
    master: tuple[str, int] | None  # MASTER_ADDR and MASTER_PORT, if they were given

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "Place":
        """Read RANK, WORLD_SIZE, LOCAL_RANK (unset: one rank), MASTER_ADDR and MASTER_PORT.

        Raises: ConfigError: a value is not a number, or out of range.
        """
        rank, world_size = whole_number(environ, "RANK", 0), whole_number(environ, "WORLD_SIZE", 1)
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK {rank} is not below WORLD_SIZE {world_size}")
        master = None
        if "MASTER_ADDR" in environ:
            master = (environ["MASTER_ADDR"].strip("[]"), whole_number(environ, "MASTER_PORT", 0))
            if master[1] == 0:
                raise ConfigError("MASTER_ADDR is set and MASTER_PORT is not; set both or neither")
        local_rank = whole_number(environ, "LOCAL_RANK", rank)
        return cls(rank=rank, world_size=world_size, local_rank=local_rank, master=master)


def device_of(place: Place) -> torch.device:
    """Choose this rank's GPU, or the CPU on a host without GPUs. Raises: ConfigError: no GPU for this rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if place.local_rank >= torch.cuda.device_count():
        seen, chosen = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        raise ConfigError(f"LOCAL_RANK {place.local_rank} has no GPU: CUDA sees {seen} (CUDA_VISIBLE_DEVICES {chosen})")
    return torch.device("cuda", place.local_rank)


def meet(place: Place, registry: Registry, environment: ServiceEnvironment, timeout_s: float) -> dist.TCPStore:
    """Connect to the store that all ranks share: at MASTER_ADDR, or where rank 0 serves it, by the registry.

    Raises: DeadlineExceeded: rank 0 did not serve it within timeout_s.
    """
    if place.master is not None:
        return _torchrun_store(place, timeout_s)
    if place.rank == 0:
        return _publish_store(place, registry, environment, timeout_s)
    return _find_store(place, registry, timeout_s)


def _torchrun_store(place: Place, timeout_s: float) -> dist.TCPStore:
    """Connect to the store at MASTER_ADDR; rank 0 serves it, unless torchrun's agent does (then no rank may)."""
    address, port = place.master or ("", 0)
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank == 0 or by_agent:
        if not by_agent:
            return bound_store(address, timeout_s, port=port, world_size=place.world_size)[0]
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(address, port, place.world_size, False, timeout, wait_for_workers=False)
    where = f"rank {place.rank}: {join_address(address, port)}"
    return _retry(lambda _: _try_store(place, address, port, timeout_s), timeout_s, where)


def _publish_store(
    place: Place, registry: Registry, environment: ServiceEnvironment, timeout_s: float
) -> dist.TCPStore:
    """Serve the store on a free port and publish it: bound first, so that no other process can take the port."""
    store, port = bound_store(environment.bind_host, timeout_s, world_size=place.world_size)
    incarnation = secrets.token_hex(8)
    store.set("incarnation", incarnation)
    registry.set_value(STORE_KEY, f"{environment.advertise_host} {port} {incarnation}")
    return store


def _find_store(place: Place, registry: Registry, timeout_s: float) -> dist.TCPStore:
    """Try the published address until it leads to rank 0 of *this* start of the trainer."""

    def look(left_s: float) -> dist.TCPStore | None:
        text = registry.wait_value(STORE_KEY, left_s)
        match text.split(" "):
            case [address, port, incarnation] if port.isdecimal():
                return _try_store(place, address, int(port), timeout_s, incarnation)
        raise Unavailable(f"value {STORE_KEY} in Redis is {text[:80]!r}, not rank 0's: restart the trainer")

    return _retry(look, timeout_s, f"rank {place.rank}: the address in the registry")


def _retry(look: Callable[[float], dist.TCPStore | None], timeout_s: float, where: str) -> dist.TCPStore:
    """Call `look` with the seconds left until it returns a store. Raises: DeadlineExceeded."""
    deadline = time.monotonic() + timeout_s
    while True:
        store = look(max(0.0, deadline - time.monotonic()))
        if store is not None:
            return store
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"{where} has not led to rank 0 of this start within {timeout_s:g} s")
        time.sleep(RETRY_S)


def _try_store(
    place: Place, address: str, port: int, timeout_s: float, incarnation: str | None = None
) -> dist.TCPStore | None:
    """Connect to a store; None if no process listens there, or only rank 0 of an earlier start, which is about to end.

    An earlier start is one whose incarnation differs from `incarnation` (None: not checked), or in which a process has
    taken our rank already.
    """
    try:
        # TCPStore logs a stack trace for every refused connection
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_S).close()
        store = dist.TCPStore(
            address, port, place.world_size, False, timedelta(seconds=CONNECT_TIMEOUT_S), wait_for_workers=False
        )
        if incarnation is not None and store.get("incarnation").decode() != incarnation:
            return None
        if store.add(f"joined/{place.rank}", 1) != 1:
            return None
    except (OSError, RuntimeError):
        return None
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def choose_interface(host: str, environ: MutableMapping[str, str]) -> None:
    """Have gloo listen on the interface of `host`, unless one is given: else it would take what this machine's name is.

    Raises: ConfigError: this machine has no such address.
    """
    if not environ.get(GLOO_INTERFACE):
        environ[GLOO_INTERFACE] = interface_of(address_of(host))


def overlap_collectives(environ: MutableMapping[str, str], generation: int) -> None:
    """Have GPUs start kernels in the order of their launch, before CUDA is initialised; a value that is set stays.

    Megatron launches a tensor-parallel collective before the product that it overlaps with, and relies on that order
    (megatron/core/tensor_parallel/layers.py); on Blackwell and newer the variable is not needed and costs overlap.

    Args:
        generation: of the newest GPU, 9 for Hopper; 0: unknown, and nothing is set.
    """
    if 0 < generation <= _HOPPER:
        environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def connect(place: Place, store: dist.TCPStore, device: torch.device, host: str, timeout_s: float) -> dist.ProcessGroup:
    """Initialise torch.distributed (NCCL with CUDA, else gloo).

    Args:
        host: address at which the other ranks reach this one.
    Returns: a gloo group of all ranks for commands; it shares no stream and no tag with the engine's groups.
    Raises: ConfigError: this host has no such address.
    """
    choose_interface(host, os.environ)
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"tandem/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )
    group = dist.new_group(backend="gloo", timeout=timeout)
    if group is None:
        raise RuntimeError("torch.distributed made no control group")
    return group
