"""Refuses calls of a coordinator that has been replaced, e.g. of a paused process that continues."""

import asyncio
import threading
import time
from collections.abc import Callable

from servicekit.errors import Fenced, Unavailable
from servicekit.logs import get_logger
from tandem_api.common.v1 import common_pb2

# Tokens begin at Redis's clock, in ms. Unconfirmed ones are believed up to here, beyond any difference of clocks.
_AHEAD_S = 86_400.0

log = get_logger(__name__)
AskLeader = Callable[[], common_pb2.CoordinatorFence]


class FenceGuard:
    """Admits calls of the newest coordinator known. Thread-safe.

    A call without a fence (of a test, a tool) is admitted as long as no coordinator is known. A service that starts
    uses `remember` with the one that Redis knows, so that an older one is not admitted because it calls first. A newer
    one is believed if Redis knows it: one call with a made-up token would lock out every coordinator to come.

    Args:
        ask_leader: who leads the run as Redis has it, token 0 if that has lost its data; blocking, and may raise
            Unavailable: a token is believed then that a clock can have given. None: there is no Redis to ask.

    >>> guard = FenceGuard()
    >>> guard.admit(common_pb2.CoordinatorFence(worker_id="b", token=8))
    >>> guard.admit(common_pb2.CoordinatorFence(worker_id="a", token=7))
    Traceback (most recent call last):
    ...
    servicekit.errors.Fenced: coordinator a (token 7) no longer leads the run: coordinator b (token 8) has taken over
    """

    def __init__(self, ask_leader: AskLeader = common_pb2.CoordinatorFence) -> None:
        self._ask_leader = ask_leader
        self._lock = threading.Lock()
        self._newest = common_pb2.CoordinatorFence()

    def remember(self, fence: common_pb2.CoordinatorFence) -> None:
        """Note a coordinator that is known from elsewhere, e.g. from an earlier process of this service."""
        with self._lock:
            if fence.token > self._newest.token:
                self._newest = common_pb2.CoordinatorFence(worker_id=fence.worker_id, token=fence.token)

    def admit(self, fence: common_pb2.CoordinatorFence) -> None:
        """Admit a coordinator's call; blocks for Redis if it is newer than all before.

        Raises: Fenced: it is older than one that was admitted before; Unavailable: Redis does not know it.
        """
        with self._lock:
            newest = self._newest
        if fence.token < newest.token:
            raise Fenced(f"{_name(fence)} no longer leads the run: {_name(newest)} has taken over")
        if fence.token == newest.token:
            return
        self._confirm(fence)
        self.remember(fence)
        if newest.token and newest.worker_id != fence.worker_id:
            log.warning("another coordinator has taken over", new=_name(fence), old=_name(newest))
        self.admit(fence)  # an even newer one may have come meanwhile

    async def admit_soon(self, fence: common_pb2.CoordinatorFence) -> None:
        """Admit as `admit` does, which may block, without holding up the event loop."""
        if fence.token > self._newest.token:
            await asyncio.to_thread(self.admit, fence)
        else:
            self.admit(fence)

    def _confirm(self, fence: common_pb2.CoordinatorFence) -> None:
        """Raises: Unavailable: Redis knows only older ones, or does not answer and the token cannot be of a clock."""
        try:
            known = self._ask_leader()
        except Unavailable as error:
            log.warning("newer coordinator not confirmed, Redis does not answer", new=_name(fence), error=str(error))
            known = common_pb2.CoordinatorFence()
        newest_ms = known.token or (time.time() + _AHEAD_S) * 1000
        if fence.token > newest_ms:
            says = (
                f"as Redis has it, {_name(known)} leads the run" if known.token else "no clock has given such a token"
            )
            log.warning("newer coordinator not believed", new=_name(fence), leader=_name(known))
            raise Unavailable(f"{_name(fence)} is not known: {says}; call again if it leads")


def _name(fence: common_pb2.CoordinatorFence) -> str:
    return f"coordinator {fence.worker_id} (token {fence.token})" if fence.token else "a caller without a fence"
