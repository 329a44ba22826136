"""How large the rollout set is and who has set that, which is said, and kept for the next coordinator.

who has set it                        at our start, with fleet.scale: true        what is said
its manifest (kubectl apply), or we   gets the size that was reached              an Event, if that is another one
a person (kubectl scale)              stays                                       -
an autoscaler                         stays: it would set it back                 a trouble: two owners
we, to 0, when a run was over         gets the size that was reached; also with fleet.scale: false

What was reached is noted in the run's folder (scale.json) while the run lasts. Where rollout.replicas has changed
since, that counts.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

from coordinator.fleet.kubernetes.api.client import MANAGER, KubeApi
from coordinator.fleet.kubernetes.api.events import About, EventRecorder
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.troubles import Troubles
from servicekit.errors import NotReady, TandemError, Unavailable
from servicekit.logs import get_logger
from tandem_files.run_folder import Scale, scale_of, write_scale

LOOK_S = 15.0
# Who writes sizes for a HorizontalPodAutoscaler, and for a ScaledObject from and to 0.
_AUTOSCALERS = ("kube-controller-manager", "keda")

log = get_logger(__name__)


class RolloutSize:
    """The size of one rollout set. Its questions to the API block.

    Args:
        folder: of the run.
        configured: rollout.replicas.
        scales: fleet.scale.
        num_pods: returns how many pods of it there are, those of engines; None: not known.
        is_emptied: whether the set was scaled to 0 to make room for the trainer (placement.py), and comes back by that.
    """

    def __init__(
        self,
        api: KubeApi,
        troubles: Troubles,
        rollout_set: PodSet,
        folder: Path,
        *,
        configured: int,
        scales: bool,
        num_pods: Callable[[], int | None],
        is_emptied: Callable[[], bool],
    ) -> None:
        self._api, self._noted, self._set, self._folder = api, troubles, rollout_set, folder
        self._configured, self._scales, self._is_emptied = configured, scales, is_emptied
        self._recorder, self._num_pods = EventRecorder(api), num_pods
        self._has_begun = self._lacks_pods = False

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Set the size, once, if it is ours to set; then note what it is, and who sets it beside us."""
        try:
            trouble = await asyncio.to_thread(self._look)
        except Unavailable as error:  # as the watch says
            log.warning("size not read", pod_set=str(self._set), error=str(error))
            return
        except (TandemError, OSError) as error:
            does = "is not noted" if self._has_begun else "stays"
            trouble = f"the size of {self._set} {does}: {error}"
        self._noted.note("size", trouble)

    def _look(self) -> str:
        """Do what look() says. Returns: the trouble; "": none."""
        size, owner = self._size()
        if not self._has_begun:
            size = self._begin(size, owner)
            self._has_begun = True
        if size and size != scale_of(self._folder, self._configured):  # 0 is no one's goal
            write_scale(self._folder, Scale(replicas=size, configured=self._configured), self._api.before_change)
            log.info("rollout set has another size", pod_set=str(self._set), replicas=size, set_by=owner or "manifest")
        if not self._scales or not owner.startswith(_AUTOSCALERS):
            return self._lacking(size, owner)
        text = (
            f"{self._set} has two owners of its size: an autoscaler ({owner}), which has set {size}, and fleet.scale, "
            "which leaves it to that one: set fleet.scale: false"
        )
        self._recorder.record(About.pod_set(self._set), "TandemScaleConflict", text, kind="Warning")
        return text

    def _begin(self, size: int, owner: str) -> int:
        """Set the size that was reached, if it is ours to set. Returns: the size."""
        wanted = scale_of(self._folder, self._configured)
        is_ours = (self._scales and owner in ("", MANAGER)) or (size == 0 and owner == MANAGER)
        if size == wanted or not is_ours or (size == 0 and self._is_emptied()):
            return size
        self._api.scale(self._set, wanted)
        log.info("rollout set scaled", pod_set=str(self._set), before=size, replicas=wanted)
        what = "rollout.replicas" if wanted == self._configured else "the size that it had reached"
        text = f"from {size} to {wanted} replicas ({what})"
        self._recorder.record(About.pod_set(self._set), "TandemScaled", text)
        return wanted

    def _lacking(self, size: int, owner: str) -> str:
        """Say that another one wants no pods, or that there were too few at the last two looks; "": neither."""
        if size == 0 and owner not in ("", MANAGER):
            return f"{self._set} has size 0, which {owner} has set: the run waits for replicas"
        there, lacked = self._num_pods(), self._lacks_pods
        self._lacks_pods = there is not None and there < size
        why = "a quota, a policy of the namespace, no controller"
        return f"{self._set} has {there} of {size} pods: its events say why ({why})" * (lacked and self._lacks_pods)

    def _size(self) -> tuple[int, str]:
        try:
            return self._api.size_of(self._set)
        except NotReady:  # there is no such set, and we need none
            if self._scales:
                raise
            return 0, ""
