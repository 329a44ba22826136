"""The walk of one rank through its hops: what it sends, receives and passes on, in which order.

The transport `collective` does the steps, the simulation lets them take time. Only counts decide the order, never time.
A rank waits only for its oldest message, whose other end gets to it too: the order of hops is the same on all ranks.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from weightsync.plans.limits import RECEIVES, SENDS
from weightsync.plans.messages import Hop, Message


class Step(Enum):
    """What a rank does with a hop."""

    SEND = "pack and hash the message, and start to send it"
    SENT = "wait until it is sent; its buffer is free"
    RECEIVE = "start to receive it"
    RECEIVED = "wait until it has arrived"
    VERIFIED = "wait until it has arrived, and hash it: only verified bytes are passed on"
    RELAY = "start to pass it on"
    UNPACK = "copy it to the parameters"
    UNPACKED = "its buffer is free"


def walk(
    rank: int, hops: Sequence[Hop], buffers: int, needs_buffer: Callable[[Message], bool]
) -> Iterator[tuple[Step, Hop]]:
    """Yield the steps of a rank.

    Args:
        rank: rank of the communicator.
        hops: the hops in which the rank takes part, in order.
        buffers: how many messages may have a buffer, at least SENDS.
        needs_buffer: whether a part of a message is not one block of memory at this rank.
    """
    free, outgoing, incoming = buffers, deque[Hop](), deque[Hop]()
    to_receive = deque(hop for hop in hops if hop.receiver == rank)
    onward = {hop.message.sequence: hop for hop in hops if hop.sender == rank and hop.hop > 0}

    def finish_sends(left: int) -> Iterator[tuple[Step, Hop]]:
        nonlocal free
        while len(outgoing) > left:
            hop = outgoing.popleft()
            free += needs_buffer(hop.message)
            yield Step.SENT, hop

    for hop in hops:
        if hop.sender == rank and hop.hop == 0:
            yield from finish_sends(SENDS - 1)
            free -= needs_buffer(hop.message)
            outgoing.append(hop)
            yield Step.SEND, hop
    while to_receive or incoming:
        while to_receive and len(incoming) < RECEIVES:
            needed = needs_buffer(to_receive[0].message)
            while needed and free == 0 and not incoming:
                yield from finish_sends(len(outgoing) - 1)  # nothing is being received, so sends hold the buffers
            if needed and free == 0:
                break
            free -= needed
            incoming.append(to_receive.popleft())
            yield Step.RECEIVE, incoming[-1]
        hop = incoming.popleft()
        relay = onward.get(hop.message.sequence)
        if relay is None:
            yield Step.RECEIVED, hop
            yield Step.UNPACK, hop
            free += needs_buffer(hop.message)
            yield Step.UNPACKED, hop
        else:
            yield Step.VERIFIED, hop
            yield from finish_sends(SENDS - 1)
            outgoing.append(relay)
            yield Step.RELAY, relay
            yield Step.UNPACK, hop
    yield from finish_sends(0)
