"""NCCL groups for tensors on GPUs. Written from torch's sources and header (2.13); not run on a GPU yet.

* **We handle errors.** By default a watchdog thread ends the process when a peer is lost
  (TORCH_NCCL_ASYNC_ERROR_HANDLING 3). A group that is made under TORCH_NCCL_BLOCKING_WAIT has no watchdog:
  `is_completed` asks NCCL itself for errors, and `wait` raises them in the thread that called it. Both variables are
  read when a group is made; they are set for that moment only: SGLang's and Megatron's groups keep their own.
* **Communicators are built in PREPARE.** Without a device, each pair of ranks would get one of its own at its first
  message, in TRANSFER: 8 to 64 of them on a receiver. A group connected to a device when it is made has one
  communicator of all ranks, and its messages use that (`eagerInit_` in ProcessGroupNCCL::pointToPoint).
* **Pairs are connected in PREPARE, too.** NCCL connects two ranks at their first message. It blocks the sending thread
  until the other end calls, without a deadline. So the pairs of the plan exchange a byte there, one by one in an order
  that is the same on all ranks (messages.py, `links_of`): a rank that waits knows its peer. One group call for all
  pairs would connect faster, but would not say which of them failed, and gloo has none.
* **Two lanes.** Operations of such a group share a stream, so a message that is passed on would wait behind incoming
  ones. Hop h of the chain goes over lane h modulo 2: a rank receives on one and sends on the other.
* **Beside SGLang's own collectives** progress is not guaranteed: NCCL guarantees it for several communicators on one
  GPU only while their kernels fit next to each other. With `in_place`, the default, generation is paused when the first
  message moves; the proof and the first bytes in PREPARE are one element each, once per epoch. `staged` would move all
  messages during generation: links.py refuses it for engines of several ranks, unless sync.allow_staged_nccl. A
  transfer that hangs is given up at the round's deadline: aborted kernels end, and generation continues.

A thread that waits inside NCCL is left behind when the deadline passes or the round is given up (watched.py); and so is
NCCL's abort, if it waits for that thread: only for nonblocking communicators does NCCL promise that it does not.
"""

import contextlib
import os
import threading
from collections.abc import Iterator, MutableMapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

LANES = 2
# In effect no timeout of the group: the round's deadline and `abort` replace it.
_NO_TIMEOUT = timedelta(days=1)
_OURS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
_making = threading.Lock()


def build_lanes(store: dist.Store, rank: int, size: int, device: torch.device) -> tuple[dist.ProcessGroup, ...]:
    """Make a connected group per lane. Every rank calls it at the same time; it has no deadline of its own."""
    lanes = []
    for lane in range(LANES):
        with _making, _set_for_now(os.environ):
            group = _make(dist.PrefixStore(f"lane/{lane}", store), rank, size)
        group.eager_connect_single_device(device)
        lanes.append(group)
    return tuple(lanes)


def _make(store: dist.Store, rank: int, size: int) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NO_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, size, options)


@contextlib.contextmanager
def _set_for_now(environ: MutableMapping[str, str]) -> Iterator[None]:
    before = {name: environ.get(name) for name in _OURS}
    environ.update(_OURS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value
