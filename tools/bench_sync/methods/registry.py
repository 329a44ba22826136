"""The measured methods of bringing new weights into the engines, by name.

A method does one whole update, from the trainer's shards to engines that serve them, and returns the seconds of its
parts.
"""

import asyncio

from tools.bench_sync.methods.ours import COLLECTIVE, COLOCATED, IN_PLACE, STAGED, Update, ours, ours_while_generating
from tools.bench_sync.methods.session import Seconds, Session
from tools.bench_sync.methods.stock import from_disk, from_distributed


def floor(do: str) -> Update:
    """Make a method that measures a lower bound, `gloo` or `memcpy`: the slowest rank's seconds after a barrier."""

    async def run(session: Session) -> Seconds:
        return {"total": max(await asyncio.gather(*(rank.call(do) for rank in session.rig.floor)))}

    return run


METHODS: dict[str, Update] = {
    "ours_in_place": ours(IN_PLACE, COLLECTIVE),
    "ours_staged": ours(STAGED, COLLECTIVE),
    "ours_colocated_in_place": ours(IN_PLACE, COLOCATED),
    "ours_colocated_staged": ours(STAGED, COLOCATED),
    "stock_flattened": from_distributed("flattened_bucket"),
    "stock_per_tensor": from_distributed(None),
    "stock_disk": from_disk,
    "floor_gloo": floor("gloo"),
    "floor_memcpy": floor("memcpy"),
    "ours_in_place_generating": ours_while_generating(IN_PLACE),
    "ours_staged_generating": ours_while_generating(STAGED),
}
BUSY = ("ours_in_place_generating", "ours_staged_generating")
WRITING = tuple(name for name in METHODS if not name.startswith("floor") and name not in BUSY)
