"""torch's TCP store, bound to one address: by default it listens on every address of the machine."""

from datetime import timedelta

import torch.distributed as dist

from servicekit.addresses import LOOPBACK, WILDCARDS, join_address, listen
from servicekit.errors import DeadlineExceeded


def bound_store(
    host: str, timeout_s: float, *, port: int = 0, world_size: int | None = None
) -> tuple[dist.TCPStore, int]:
    """Serve a store on `host` alone, on a socket bound here: no other process can take its port in between.

    Args:
        host: name or address of this machine; a wildcard only if the process is configured so.
        timeout_s: how long a read waits.
        port: 0 for one that the system chooses.
    Returns: the store, which is served for as long as it is referenced, and its port.
    Raises: OSError: the address is in use or not one of this machine; DeadlineExceeded: its own connection took longer.
    """
    listener = listen(host, port)
    bound: int = listener.getsockname()[1]
    try:
        store = dist.TCPStore(
            # Its connection to itself: without IPv6 addresses on this machine, `::` can be listened on, not reached.
            LOOPBACK if host in WILDCARDS else host,
            bound,
            world_size,
            True,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except dist.DistNetworkError as error:
        raise DeadlineExceeded(f"a store at {join_address(host, bound)} was not up in {timeout_s:g} s") from error
    return store, bound
