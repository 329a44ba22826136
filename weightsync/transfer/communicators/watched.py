"""Watched work on a communicator: it ends when a peer is lost or the communicator is closed, whatever gloo does.

A rank whose work fails closes the communicator, so that the others do not wait for it until their deadline.

The work runs in a thread of its own. If one of its waits never ends (communicator.py says why), the thread is left
behind: its connections are closed, so no bytes arrive, and it touches nothing when its wait reaches its deadline. Until
then it holds its buffers, at most two messages.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from servicekit.errors import PeerLost
from weightsync.round import deadlines
from weightsync.transfer.communicators.communicator import Communicator
from weightsync.transfer.devices import on_device

# Seconds between two checks. A check is free while the work makes progress; once a wait lasts longer than this, it
# posts one operation per peer.
LOOK_S = 0.1

T = TypeVar("T")


def run_watched(communicator: Communicator, work: Callable[[], T], deadline: float, late: Callable[[], str]) -> T:
    """Run `work`, all of whose waits are on the communicator. Returns: its result.

    Args:
        deadline: time.monotonic() seconds, for waits that have none: NCCL's for a peer, before it has begun to send.
        late: makes the error's text if the deadline passes.
    Raises: PeerLost: a peer is lost, the deadline has passed, or the communicator was aborted; what `work` raises.
    """
    result: Future[T] = Future()
    name = f"work-{communicator.slots[communicator.rank]}"
    threading.Thread(target=_carry_out, args=(communicator.device, work, result), name=name, daemon=True).start()
    try:
        while not wait([result], LOOK_S).done:
            # From the deadline on, gloo's own time-out closes the connections: its error names who was waited for.
            if time.monotonic() < deadline - LOOK_S:
                communicator.probe(LOOK_S)
            if time.monotonic() >= deadline + deadlines.WATCH_MARGIN_S and not communicator.closed:
                communicator.abort(late())
            if communicator.give_up():
                raise PeerLost(f"{communicator.slots[communicator.rank]}: {communicator.closed}")
        return result.result()
    except BaseException as error:
        communicator.abort(f"failed: {error}")
        raise


def _carry_out(device: torch.device, work: Callable[[], T], result: "Future[T]") -> None:
    try:
        with on_device(device):
            result.set_result(work())
    except BaseException as error:  # noqa: BLE001 - the boundary of the thread: the caller gets it
        result.set_exception(error)
