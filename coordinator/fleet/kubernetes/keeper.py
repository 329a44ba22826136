"""Maintains the fleet during a run: takes work from replicas whose pods are not ready, and evicts stuck ones.

A replica whose engine stands still ends itself (rollout.stall_timeout_s). One that is slow, paused, unseeded or without
work is not stuck, nor is a process that has ended: its record expires with its lease, and the kubelet starts it again.
"""

import asyncio
import time
from collections.abc import Callable

from coordinator.fleet.kubernetes.api.events import About
from coordinator.fleet.kubernetes.api.pods import Pod
from coordinator.fleet.kubernetes.cluster import Cluster
from coordinator.fleet.kubernetes.fleet import KubernetesFleet
from coordinator.watch import metrics
from servicekit.errors import TandemError, Unavailable
from servicekit.lifecycle.budget import HourlyBudget
from servicekit.logs import get_logger
from tandem_clients.replica import Replica

# Between two checks; a quarter of a setting that is shorter than four times this.
LONGEST_INTERVAL_S = 10.0

log = get_logger(__name__)


class StuckDetector:
    """Detects stuck replicas from repeated observations; keys are incarnations, times are arguments."""

    def __init__(self, stuck_after_s: float) -> None:
        self._stuck_after_s = stuck_after_s
        self._silent_since_s: dict[object, float] = {}

    def observe(self, key: object, answers: bool, now_s: float) -> str:
        """Record an observation. Returns: why the replica is stuck; "" if it is not."""
        if answers:
            self._silent_since_s.pop(key, None)
            return ""
        since_s = self._silent_since_s.setdefault(key, now_s)
        # Without the exact time, because a trouble is reported once per text.
        return f"no answer in {self._stuck_after_s:g} s" if now_s - since_s >= self._stuck_after_s else ""

    def keep(self, keys: set[object]) -> None:
        """Forget all replicas but these."""
        self._silent_since_s = {key: since_s for key, since_s in self._silent_since_s.items() if key in keys}


class Keeper:
    """Maintains a fleet until it is cancelled.

    Args:
        probe_timeout_s: seconds for a replica to answer a status call; then it is silent.
    """

    def __init__(
        self,
        cluster: Cluster,
        fleet: KubernetesFleet,
        *,
        probe_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = cluster.settings
        self._cluster, self._fleet, self._clock = cluster, fleet, clock
        self._probe_timeout_s = probe_timeout_s
        self._unready_after_s = settings.unready_after_s
        self._interval_s = min(LONGEST_INTERVAL_S, settings.stuck_after_s / 4, settings.unready_after_s / 4)
        self._detector = StuckDetector(settings.stuck_after_s)
        self._budget = HourlyBudget(settings.max_evictions_per_hour)
        self._unready_since_s: dict[Replica, float] = {}
        self._evicted: set[str] = set()  # uids

    async def run(self) -> None:
        """Check the fleet again and again, until cancelled."""
        while True:
            self._cluster.look()
            try:
                members = await self._fleet.members()
            except Unavailable:  # without Redis, pods cannot be matched with replicas
                members = {}
            await self._demote_unready(members)
            await self._evict_stuck(members)
            await asyncio.sleep(self._interval_s)

    async def _demote_unready(self, members: dict[Replica, Pod]) -> None:
        now_s = self._clock()
        known = members if self._cluster.pods.is_current else {}  # what was known last is no news
        there = {replica: known[replica] for replica in self._fleet.serving() if replica in known}
        unready = {replica: pod for replica, pod in there.items() if not pod.ready}
        self._unready_since_s = {r: self._unready_since_s.get(r, now_s) for r in unready}
        for replica, pod in unready.items():
            quiet_s = now_s - self._unready_since_s[replica]
            if quiet_s >= self._unready_after_s:
                self._fleet.demote(replica)
                log.warning("replica not ready, no work until it is seeded again", replica=replica.name)
                await self._record(pod, "TandemNotReady", "not ready for long: seeded again before it gets work")

    async def _evict_stuck(self, members: dict[Replica, Pod]) -> None:
        answers = await asyncio.gather(*(self._answers(replica) for replica in members), return_exceptions=True)
        stuck: dict[str, str] = {}
        for (replica, pod), answer in zip(members.items(), answers, strict=True):
            # A channel that is closed meanwhile cancels its calls: the replica is lost.
            if isinstance(answer, BaseException):
                continue
            why = self._detector.observe((replica, pod.incarnation), answer, self._clock())
            if why and pod.uid not in self._evicted:
                stuck[f"stuck/{pod.name}"] = await self._evict(pod, why)
        self._detector.keep({(replica, pod.incarnation) for replica, pod in members.items()})
        for about, text in stuck.items():
            self._cluster.noted.note(about, text)
        self._cluster.noted.keep("stuck/", stuck)

    async def _answers(self, replica: Replica) -> bool:
        try:
            await replica.status(timeout_s=self._probe_timeout_s)
        except TandemError:
            return False
        return True

    async def _evict(self, pod: Pod, why: str) -> str:
        """Evict a stuck pod if the budget allows it. Returns: a sentence about the outcome."""
        if not self._budget.spend(self._clock()):
            limit = f"fleet.max_evictions_per_hour = {self._budget.per_hour} is used up"
            await self._record(pod, "TandemEngineStuck", f"{limit}: not evicted", kind="Warning")
            return f"{pod.name} is stuck ({why}) and stays: {limit}"
        try:
            await asyncio.to_thread(self._cluster.api.evict, pod)
        except TandemError as error:
            self._budget.give_back()
            return f"{pod.name} is stuck ({why}) and could not be evicted: {error}"
        self._evicted.add(pod.uid)
        metrics.EVICTIONS.inc()
        log.warning("stuck replica evicted", replica=pod.name, why=why)
        await self._record(pod, "TandemEvicted", f"the replica is stuck: {why}", kind="Warning")
        return f"{pod.name} was stuck ({why}): evicted"

    async def _record(self, pod: Pod, reason: str, message: str, *, kind: str = "Normal") -> None:
        recorder = self._cluster.recorder
        await asyncio.to_thread(recorder.record, About.pod(pod), reason, message, kind=kind)
