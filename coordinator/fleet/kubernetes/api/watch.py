"""Follows the run's pods from a thread: list, then watch; list again when the watch has missed too much.

event                   what the watch does
watch ends by time      continues from the last version
410 Gone                lists again
API unreachable, 429    lists again after a growing pause; until then the pods are those known last
refused (RBAC)          reports it, tries again once a minute: roles may be corrected during a run

A pod's restart count is of its whole life. `Crashes` counts those in a row, from what is seen of the pod:

pod, as seen                                its next crash is
ready                                       the first
crashed after it ran for LONG_RUN_S         the second: this one was the first
was not started by its runtime              the second, as after a long run
crashed earlier, never seen ready           one more than its restarts: all of them count
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from coordinator.fleet.kubernetes.api.client import KubeApi, PodChange
from coordinator.fleet.kubernetes.api.errors import Expired
from coordinator.fleet.kubernetes.api.pods import Pod, PodOutlook, seen_at
from servicekit.errors import PermissionDenied, TandemError
from servicekit.logs import get_logger

FIRST_PAUSE_S, LONGEST_PAUSE_S, REFUSED_PAUSE_S = 0.5, 30.0, 60.0
# A rank that loses another one ends too, once or twice; a pod that crashes so often in a row has a fault of its own.
CRASHES_OF_A_DEAD_POD = 4
# The kubelet forgets the crashes of a container that has run for so long, too.
LONG_RUN_S = 600.0

log = get_logger(__name__)


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


class PodWatch:
    """The run's pods, as the API server last reported them; `pods` can be read from any thread."""

    def __init__(self, api: KubeApi, selector: str, *, unix_clock: Callable[[], float] = time.time) -> None:
        self._api, self._selector, self._unix_clock = api, selector, unix_clock
        self._lock = threading.Lock()
        self._pods: dict[str, Pod] = {}  # by name
        self._crashes = Crashes()
        self._is_current = False
        self._trouble = ""
        self._failures = 0  # in a row
        self._stop = threading.Event()
        self._stream: Any = None
        self._first_look = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pod-watch", daemon=True)

    def start(self, timeout_s: float) -> None:
        """Start the thread, and wait until the pods are listed, or that failed, or for timeout_s."""
        self._thread.start()
        self._first_look.wait(timeout_s)

    def stop(self) -> None:
        """Ask the thread to end; does not wait for it."""
        self._stop.set()
        self._api.close()
        if self._stream is not None:
            self._stream.stop()

    @property
    def pods(self) -> Sequence[Pod]:
        """The pods, sorted by name; the last known ones if the API server is unreachable."""
        now_s = self._unix_clock()
        with self._lock:
            return [seen_at(self._pods[name], now_s) for name in sorted(self._pods)]

    @property
    def is_current(self) -> bool:
        """Whether `pods` is up to date: not before the first list, nor while the API server is unreachable."""
        return self._is_current

    @property
    def trouble(self) -> str:
        """The error of the watch; "" if it works."""
        return self._trouble

    def _run(self) -> None:
        while not self._stop.is_set():
            pause_s = min(FIRST_PAUSE_S * 2**self._failures, LONGEST_PAUSE_S)
            try:
                self._list_and_watch()
            except Expired as error:
                self._is_current = False
                log.info("pod watch expired, listing again", why=str(error))
            except PermissionDenied as error:
                self._lost(error)
                pause_s = REFUSED_PAUSE_S
            except TandemError as error:
                self._lost(error)
            except Exception as error:  # the boundary of the thread
                if not self._stop.is_set():  # else: of a socket that stop() has closed
                    log.error("pod watch failed", error=str(error), exc_info=error)
                self._lost(error)
            self._first_look.set()
            self._stop.wait(pause_s)

    def _list_and_watch(self) -> None:
        """List the pods, then watch them until that fails. Raises: Expired, and the API's errors."""
        pods, version = self._api.list_pods(self._selector)
        self._replace(pods)
        self._first_look.set()
        while not self._stop.is_set():
            for change in self._api.watch_pods(self._selector, version, self._on_open):
                version = change.resource_version
                self._apply(change)
                if self._stop.is_set():
                    return

    def _on_open(self, stream: Any) -> None:
        self._stream = stream

    def _replace(self, pods: Sequence[Pod]) -> None:
        judged = {pod.name: self._crashes.judge(pod) for pod in pods}
        self._crashes.keep(pod.uid for pod in pods)
        with self._lock:
            self._pods = judged
        if self._trouble:
            log.info("kubernetes API reachable again", pods=len(pods))
        self._trouble, self._is_current, self._failures = "", True, 0

    def _apply(self, change: PodChange) -> None:
        if change.pod is None:
            return
        pod = self._crashes.judge(change.pod)
        with self._lock:
            if change.kind == "DELETED":
                self._pods.pop(pod.name, None)
            else:
                self._pods[pod.name] = pod

    def _lost(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        if not self._trouble:
            log.warning("pod watch lost", error=str(error))
        self._trouble, self._is_current = str(error), False
        self._failures = min(self._failures + 1, 16)  # 2 to any higher power is no number of seconds
