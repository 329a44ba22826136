"""A FAKE of what makes pods run: the controller of the rollout set, and the kubelet, over the fake cluster.

A pod's process is a fake rollout service on the calling event loop, announced in the registry, with its slot in the
weight group. Pods come up not ready, are ready while they serve, and end when they have been told to. With a
LeaderWorkerSet each such pod leads a worker, in which nothing runs; a group ends as a whole.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_api.weights.v1 import weights_pb2
from tests.contract.kube_objects import NAMESPACE, pod, worker
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.fake_fleet import announced, served
from tests.fakes.fake_rollout import FakeRollout


@dataclass
class PodRollout(FakeRollout):
    """Also says how busy it is, and remembers whether it got work before it had weights."""

    running: int = 0
    was_asked_unseeded: bool = False

    async def Generate(
        self, requests: AsyncIterator[pb.GenerateRequest], context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.was_asked_unseeded |= self.state != weights_pb2.REPLICA_STATE_SERVING
        self.running += 1
        try:
            async for response in super().Generate(requests, context):
                yield response
        finally:
            self.running -= 1

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        status = await super().GetStatus(request, context)
        status.running_groups, status.generated_tokens = self.running, len(self.requests)
        return status


@dataclass
class FakeRolloutSet:
    """Runs the pods of the set `rollout`."""

    api: FakeCluster
    redis_url: str
    run_id: str
    # "StatefulSet" or "LeaderWorkerSet".
    kind: str = "StatefulSet"
    # Service, and what ends it, by pod name.
    _running: dict[str, tuple[PodRollout, AsyncExitStack]] = field(default_factory=dict)
    # Every service that ever ran, by pod name, in the order of their starts.
    history: dict[str, list[PodRollout]] = field(default_factory=dict)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                self._make_pods()
                for obj in self.api.list_of("Pod"):
                    component = obj["metadata"]["labels"]["app.kubernetes.io/component"]
                    if component == "rollout":
                        await self._tend(obj)
                    elif component == "rollout-worker":
                        self._tend_worker(obj)
                await asyncio.to_thread(self._wait_for_change)
        finally:
            for name in list(self._running):
                await self._end(name)

    def _wait_for_change(self) -> None:
        with self.api.store.changed:
            self.api.store.changed.wait(0.05)

    def _make_pods(self) -> None:
        """As the set's controller: pods 0 to replicas - 1, one that is gone again; those beyond are told to end."""
        wanted = self.api.get(self.kind, "rollout", NAMESPACE)["spec"]["replicas"]
        there = {obj["metadata"]["name"] for obj in self.api.list_of("Pod")}
        for index in range(wanted):
            if f"rollout-{index}" not in there:
                self.api.put(pod(f"rollout-{index}", run_id=self.run_id, ready=False))
                if self.kind == "LeaderWorkerSet":
                    self.api.put(worker(f"rollout-{index}-1", run_id=self.run_id))

    def _tend_worker(self, obj: dict[str, Any]) -> None:
        """One that has ended takes its leader along, and one whose leader is gone ends."""
        leader = obj["metadata"]["annotations"]["leaderworkerset.sigs.k8s.io/leader-name"]
        leaders = {each["metadata"]["name"]: each for each in self.api.list_of("Pod")}
        if "deletionTimestamp" in obj["metadata"] and leader in leaders:
            told = leaders[leader]
            told["metadata"]["deletionTimestamp"] = obj["metadata"]["deletionTimestamp"]
            self.api.put(told)

    async def _tend(self, obj: dict[str, Any]) -> None:
        name = obj["metadata"]["name"]
        if obj["spec"].get("schedulingGates"):
            await self._end(name)
            return
        if "deletionTimestamp" in obj["metadata"]:
            await self._end(name)
            for each in self.api.list_of("Pod"):
                if each["metadata"]["name"] in (name, f"{name}-1"):
                    self.api.delete("Pod", each["metadata"]["name"], NAMESPACE)
            return
        if name not in self._running:
            await self._start(name)
        ready = self._running[name][0].state == weights_pb2.REPLICA_STATE_SERVING
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        if obj["status"]["conditions"] != [condition]:
            self.api.put({**obj, "status": {**obj["status"], "conditions": [condition]}})

    async def _start(self, name: str) -> None:
        service, stack = PodRollout(name=name), AsyncExitStack()
        _, address = await stack.enter_async_context(served(service))
        slot = announced(self.redis_url, self.run_id, name, address, [f"{name}/0"])
        await stack.enter_async_context(slot)
        self._running[name] = service, stack
        self.history.setdefault(name, []).append(service)

    async def _end(self, name: str) -> None:
        if name in self._running:
            await self._running.pop(name)[1].aclose()


@asynccontextmanager
async def fake_rollout_set(
    api: FakeCluster, redis_url: str, run_id: str, kind: str = "StatefulSet"
) -> AsyncIterator[FakeRolloutSet]:
    """Runs the pods inside the block."""
    made = FakeRolloutSet(api, redis_url, run_id, kind)
    task = asyncio.create_task(made.run(), name="fake-rollout-set")
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
