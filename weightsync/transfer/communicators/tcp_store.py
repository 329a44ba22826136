"""torch's TCP store, bound where it is told: left to itself it listens on every address of the machine."""

import socket
from datetime import timedelta

import torch.distributed as dist


def bound_store(
    host: str, timeout_s: float, *, port: int = 0, world_size: int | None = None
) -> tuple[dist.TCPStore, int]:
    """Serves a store on `host` alone, here and for good: no other process can take its port in between.

    Args:
        host: name or IPv4 address of this machine; the wildcard only if that is what the process was told.
        timeout_s: how long a read waits.
        port: 0 for one that the system chooses.
    Returns: the store, which lasts as long as somebody holds it, and its port.
    Raises: OSError: the address is in use or not one of this machine.
    """
    listener = socket.create_server((host, port))
    bound: int = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        bound,
        world_size,
        True,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, bound
