"""Makes room for the trainer: takes the run's rollouts away while they hold what its pods wait for.

trainer pods                                   the rollout set
have nodes                                     is left to kubectl, an autoscaler, fleet.scale at the start
unschedulable for AFTER_S, rollouts on nodes   is scaled to 0, and its size noted in the run's folder
have nodes again                               gets that size back, also from a coordinator that was started since
another writer has scaled the set meanwhile    is theirs: left as it is, until the trainer has had nodes once
has never been seen at 0 (a lost answer)       is judged anew

To 0: a smaller step may leave no node whole, autoscalers leave a set of 0 alone, and Kueue admits no other size.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.fleet.kubernetes.api.client import KubeApi
from coordinator.fleet.kubernetes.api.events import About, EventRecorder
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import TRAINER, Pod
from coordinator.fleet.kubernetes.api.watch import PodWatch
from coordinator.fleet.kubernetes.pod_states import trainers
from coordinator.fleet.kubernetes.troubles import Troubles
from servicekit.errors import TandemError
from servicekit.logs import get_logger
from tandem_files.atomic import remove_each, write_json_atomic
from tandem_files.leader import PLACEMENT_FILE

# More than a rollout's 75 s to end: preemption and pods that leave may be making room already.
AFTER_S = 90.0
INTERVAL_S = 5.0
# The scheduler's word for a resource that nodes have too little of; taints and volumes are not cured by fewer rollouts.
_NO_ROOM = "Insufficient "

log = get_logger(__name__)


class RoomForTrainer:
    """Scales one rollout set. Its questions to the API block.

    Args:
        folder: of the run.
    """

    def __init__(
        self,
        api: KubeApi,
        pods: PodWatch,
        troubles: Troubles,
        rollout_set: PodSet,
        folder: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._api, self._pods, self._noted, self._set = api, pods, troubles, rollout_set
        self._recorder = EventRecorder(api)
        self._file, self._clock = folder / PLACEMENT_FILE, clock
        self._since_s: float | None = None
        self._is_theirs = self._is_placed = self._is_empty = False
        self._trouble = ""
        self.size_before: int | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the rollouts are taken away, and the trainer does not have its nodes yet."""
        return self.size_before is not None and not self._is_placed

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self.look)
            except (TandemError, OSError) as error:
                does = "stays at 0" if self._is_empty else "keeps what the trainer may wait for"
                self._trouble = f"{self._set} {does}: {error}"
            self._noted.note("placement", self._trouble)  # here, because events are the loop's
            await asyncio.sleep(INTERVAL_S)

    def look(self) -> None:
        """Take the rollouts away, or bring them back, if it is time. Raises: TandemError, OSError: it could not."""
        if not self._pods.is_current:
            return
        pods = self._pods.pods
        mine = trainers(pods)
        self._is_placed = bool(mine) and all(pod.node and not pod.goes for pod in mine)
        if self.size_before is not None:
            self._look_at_emptied()
        elif self._is_placed:
            self._is_theirs, self._trouble = False, ""
        rollouts_hold = any(pod.node and not pod.goes for pod in pods if pod.component != TRAINER)
        if self.size_before is not None or self._is_theirs or not (rollouts_hold and _lack_room(mine)):
            self._since_s = None
            return
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        if now_s - self._since_s >= AFTER_S:
            self._since_s = None
            self._empty()

    def forget(self) -> None:
        """The rollouts do not come back by this. Raises: as before_change."""
        self.size_before, self._is_empty = None, False
        for text in remove_each([self._file], self._api.before_change):
            log.warning("size of the rollout set not removed", error=text)

    def _empty(self) -> None:
        before, _ = self._api.replicas_of(self._set)
        if not before:
            return
        # First: who is started after this moment must know the size.
        write_json_atomic(self._file, {"replicas": before}, self._api.before_change)
        self.size_before = before
        self._api.scale(self._set, 0)
        self._is_empty, self._trouble = True, self._text(before)
        self._recorder.record(About.pod_set(self._set), "TandemMadeRoom", self._trouble)

    def _text(self, before: int) -> str:
        return f"{self._set} is scaled from {before} to 0 until the trainer has its nodes: it finds no room beside them"

    def _look_at_emptied(self) -> None:
        size, _ = self._api.replicas_of(self._set)
        before = self.size_before or 0
        if size:
            log.info("rollout set is not at 0", pod_set=str(self._set), replicas=size, was_at_0=self._is_empty)
            self._is_theirs = self._is_empty and not self._is_placed
        else:
            self._is_empty = True
            if not self._is_placed:
                self._trouble = self._text(before)
                return
            self._api.scale(self._set, before)
            text = f"from 0 to {before} replicas: the trainer has its nodes"
            log.info("rollouts brought back", pod_set=str(self._set), replicas=before)
            self._recorder.record(About.pod_set(self._set), "TandemScaled", text)
        self._trouble = ""
        self.forget()

    def recall(self) -> None:
        """Read the size that a predecessor has noted, if one has."""
        try:
            self.size_before = int(json.loads(self._file.read_text(encoding="utf-8"))["replicas"])
        except FileNotFoundError:
            self.size_before = None
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("size of the rollout set not read", file=str(self._file), error=str(error))


def _lack_room(mine: Sequence[Pod]) -> bool:
    """Whether a trainer pod is unschedulable, because nodes have too little of something."""
    waiting = [pod.trouble for pod in mine if not pod.node and not pod.goes]
    return any(trouble.startswith("unschedulable") and _NO_ROOM in trouble for trouble in waiting)
