"""Counts a pod's crashes in a row, from what is seen of it one after another; its restart count is of its whole life.

pod, as seen                                its next crash is
ready                                       the first
crashed after it ran for LONG_RUN_S         the second: this one was the first
was not started by its runtime              the second, as after a long run
crashed earlier, never seen ready           one more than its restarts: all of them count
"""

import dataclasses
import threading
from collections.abc import Iterable

from coordinator.fleet.kubernetes.api.pods import Pod, PodOutlook

# A rank that loses another one ends too, once or twice; a pod that crashes so often in a row has a fault of its own.
CRASHES_OF_A_DEAD_POD = 4
# The kubelet forgets the crashes of a container that has run for so long, too.
LONG_RUN_S = 600.0


class Crashes:
    """Remembers when pods last worked, by uid. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Restarts that do not count: those up to the last time that the pod worked.
        self._forgiven: dict[str, int] = {}

    def judge(self, pod: Pod) -> Pod:
        """Remember a pod as it is now. Returns: it, as DEAD if it has crashed CRASHES_OF_A_DEAD_POD times in a row."""
        with self._lock:
            if pod.ready:
                self._forgiven[pod.uid] = pod.restarts
            elif pod.crashes and pod.ran_s is not None and pod.ran_s >= LONG_RUN_S:
                self._forgiven[pod.uid] = pod.crashes - 1
            in_a_row = pod.crashes - self._forgiven.get(pod.uid, 0)
        if in_a_row < CRASHES_OF_A_DEAD_POD:
            return pod
        return dataclasses.replace(pod, outlook=PodOutlook.DEAD, trouble=f"{pod.trouble}, {in_a_row} of them in a row")

    def keep(self, uids: Iterable[str]) -> None:
        """Forget all pods but these."""
        kept = set(uids)
        with self._lock:
            self._forgiven = {uid: count for uid, count in self._forgiven.items() if uid in kept}
