"""Refuses calls of a coordinator that has been replaced, e.g. of a paused process that continues."""

import threading

from servicekit.errors import Fenced
from servicekit.logs import get_logger
from tandem_api.common.v1 import common_pb2

log = get_logger(__name__)


class FenceGuard:
    """Admits calls of the newest coordinator known. Thread-safe.

    A call without a fence (of a test, a tool) is admitted as long as no coordinator is known. A service that starts
    uses `remember` with the one that Redis knows, so that an older one is not admitted because it calls first.

    >>> guard = FenceGuard()
    >>> guard.admit(common_pb2.CoordinatorFence(worker_id="b", token=8))
    >>> guard.admit(common_pb2.CoordinatorFence(worker_id="a", token=7))
    Traceback (most recent call last):
    ...
    servicekit.errors.Fenced: coordinator a (token 7) no longer leads the run: coordinator b (token 8) has taken over
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = common_pb2.CoordinatorFence()

    def remember(self, fence: common_pb2.CoordinatorFence) -> None:
        """Note a coordinator that is known from elsewhere, e.g. from an earlier process of this service."""
        with self._lock:
            if fence.token > self._newest.token:
                self._newest = common_pb2.CoordinatorFence(worker_id=fence.worker_id, token=fence.token)

    def admit(self, fence: common_pb2.CoordinatorFence) -> None:
        """Admit a coordinator's call. Raises: Fenced: it is older than one that was admitted before."""
        with self._lock:
            newest = self._newest
            if fence.token < newest.token:
                raise Fenced(f"{_name(fence)} no longer leads the run: {_name(newest)} has taken over")
            if fence.token == newest.token:
                return
            self._newest = common_pb2.CoordinatorFence(worker_id=fence.worker_id, token=fence.token)
        if newest.token and newest.worker_id != fence.worker_id:
            log.warning("another coordinator has taken over", new=_name(fence), old=_name(newest))


def _name(fence: common_pb2.CoordinatorFence) -> str:
    return f"coordinator {fence.worker_id} (token {fence.token})" if fence.token else "a caller without a fence"
