"""Refuses a coordinator that another one has replaced: a paused process that wakes must not harm its successor."""

import threading

from servicekit.errors import Fenced
from servicekit.logs import get_logger
from tandem_api.common.v1 import common_pb2

log = get_logger(__name__)


class FenceGuard:
    """Remembers the newest coordinator that it has seen. Thread-safe.

    A call without a fence (a test, a tool) is admitted as long as no coordinator has been seen. A service that starts
    remembers the one that Redis knows: it must not obey an older one only because it comes first.

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
        """One that was seen elsewhere, by an earlier process of this service, say."""
        with self._lock:
            if fence.token > self._newest.token:
                self._newest = common_pb2.CoordinatorFence(worker_id=fence.worker_id, token=fence.token)

    def admit(self, fence: common_pb2.CoordinatorFence) -> None:
        """Raises: Fenced: it is older than one that was admitted before."""
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
