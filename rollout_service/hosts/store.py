"""The TCP store in the leader's process where SGLang's ranks of all hosts find each other."""

import socket
from datetime import timedelta

import torch.distributed as dist

# How long a read of the store waits; SGLang sets a timeout of its own on its connections.
_READ_S = 300.0


def open_store(bind_host: str) -> tuple[dist.TCPStore, int]:
    """Binds a port that the system chooses, here and for good: no other process can take it in between.

    Returns: the store, which lasts as long as somebody holds it, and its port.
    """
    listener = socket.create_server((bind_host, 0))
    port: int = listener.getsockname()[1]
    store = dist.TCPStore(
        bind_host,
        port,
        None,
        True,
        timedelta(seconds=_READ_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port
