"""A run on pods: a real coordinator process, real Redis and gRPC, the API stand-in and fake engines (both named so)."""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.app import conduct, release_unled
from coordinator.fleet.kubernetes.api.client import KubeApi
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.retries import MAX_FAILURES
from launcher.view.status import describe
from servicekit.environment import ServiceEnvironment
from servicekit.errors import Internal, PeerLost
from tandem_config.loading import dump_resolved
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import list_complete
from tandem_files.leader import FAILURES_FILE
from tandem_files.ledger.life import read_life
from tests.contract.coordinator_runs import rows, saved_state, with_settings
from tests.contract.kube_objects import (
    NAMESPACE,
    gated,
    leader_worker_set,
    pod,
    role_rules,
    rollout_set,
    trainer_set,
    waiting_status,
)
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.cluster.kinds import CONTROLLERS
from tests.fakes.cluster.requests import COORDINATOR
from tests.fakes.cluster.verbs import told_to_end
from tests.fakes.fake_fleet import announced, announced_fleet, fake_fleet
from tests.fakes.fake_rollout_set import FakeRolloutSet, fake_rollout_set
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.processes import start_coordinator
from tests.kit.waiting import until
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Rendezvous

pytestmark = pytest.mark.integration
DEADLINE_S = 60.0


@pytest.fixture
def api() -> Iterator[FakeCluster]:
    with FakeCluster(NAMESPACE, custom=CONTROLLERS) as api:
        api.bind(role_rules())
        yield api


@pytest.fixture
def kube_config(config: RunConfig, api: FakeCluster, tmp_path: Path) -> RunConfig:
    fleet = {
        "kind": "kubernetes",
        "kubeconfig": api.write_kubeconfig(tmp_path / "kubeconfig", user=COORDINATOR),
        "scale": True,
    }
    return with_settings(
        config,
        run={"iterations": 1_000_000, "startup_timeout_s": 60.0},
        rollout={"replicas": 2},
        sync={"probe_timeout_s": 0.5, "lease_ttl_s": 1.0},
        fleet={**fleet, "stuck_after_s": 2.0},
    )


class Coordinator:
    """`python -m coordinator` as in a pod."""

    def __init__(self, config: RunConfig, environment: ServiceEnvironment, folder: Path, *options: str) -> None:
        file = folder / "config.yaml"
        file.write_text(dump_resolved(config), encoding="utf-8")
        self.variables = {
            "REDIS_URL": environment.redis_url,
            "TANDEM_RUN_ID": environment.run_id,
            "TANDEM_RUN_DIR": str(environment.run_dir),
            "TANDEM_KUBE_NAMESPACE": NAMESPACE,
        }
        self.run_dir = environment.run_dir
        self.log = folder / "coordinator.log"
        with self.log.open("wb") as log:
            self.process = start_coordinator(["--config", str(file), *options], self.variables, log.fileno())

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=DEADLINE_S)

    def status(self) -> list[tuple[str, str]]:
        """What `tandem status` says in the coordinator's pod."""
        return describe(self.run_dir, self.variables)

    def warnings(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["level"] == "warning"]


@pytest.fixture
def start(environment: ServiceEnvironment, tmp_path: Path) -> Iterator[Callable[..., Coordinator]]:
    started: list[Coordinator] = []

    def begin(config: RunConfig, *options: str) -> Coordinator:
        started.append(Coordinator(config, environment, tmp_path, *options))
        return started[-1]

    yield begin
    for coordinator in started:
        coordinator.process.kill()
        coordinator.process.wait(timeout=10)


Start = Callable[..., Coordinator]


class TrainerPod:
    """A fake trainer, in the registry and in the weight group, and its pod's state."""

    def __init__(self, api: FakeCluster, environment: ServiceEnvironment) -> None:
        self._api, self._environment = api, environment
        self._stack = AsyncExitStack()
        self.service = FakeTrainer()

    async def start(self) -> None:
        """Another process, up, with the newest checkpoint."""
        environment = self._environment
        self.service = FakeTrainer(policy_version=newest_version(environment.run_dir))
        services = await self._stack.enter_async_context(fake_fleet(num_replicas=0, trainer=self.service))
        slots = ["trainer/0", "trainer/1"]
        address = services.addresses["trainer"]
        there = announced(environment.redis_url, environment.run_id, "trainer", address, slots)
        await self._stack.enter_async_context(there)
        self.show()

    async def stop(self) -> None:
        await self._stack.aclose()

    def show(self, **state: Any) -> None:
        """What the API server says of the pod; without anything: that it is ready."""
        self._api.put(pod("trainer-0", component="trainer", run_id=self._environment.run_id, **state))


def newest_version(run_dir: Path) -> int:
    complete = list_complete(run_dir)
    return int((complete[-1][1] / "trainer" / "version").read_text()) if complete else 0


@asynccontextmanager
async def a_trainer(api: FakeCluster, environment: ServiceEnvironment) -> AsyncIterator[TrainerPod]:
    """A trainer pod that is up, and an empty rollout set."""
    trainer = TrainerPod(api, environment)
    await trainer.start()
    api.put(rollout_set(0))
    try:
        yield trainer
    finally:
        await trainer.stop()


@asynccontextmanager
async def pods(
    api: FakeCluster, environment: ServiceEnvironment, kind: str = "StatefulSet"
) -> AsyncIterator[tuple[TrainerPod, FakeRolloutSet]]:
    """That, and somebody who makes and runs the set's pods."""
    async with (
        a_trainer(api, environment) as trainer,
        fake_rollout_set(api, environment.redis_url, environment.run_id, kind) as rollouts,
    ):
        yield trainer, rollouts


async def soon(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition, DEADLINE_S)


async def iterated(environment: ServiceEnvironment, more_than: int) -> None:
    """Until the run has done so many iterations and one more."""
    file = environment.run_dir / "metrics.jsonl"
    await soon(lambda: file.exists() and len(rows(environment)) > more_than)


async def got_work(rollouts: FakeRolloutSet, name: str, starts: int) -> None:
    """Until the pod's process of its `starts`-th start has been asked for something."""
    await soon(lambda: len(rollouts.history.get(name, [])) >= starts)
    await asyncio.wait_for(rollouts.history[name][starts - 1].asked.wait(), DEADLINE_S)


async def test_a_run_on_pods_that_appear_end_hang_and_become_more(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    async with pods(api, environment) as (_, rollouts):
        coordinator = start(kube_config)
        for name in ("rollout-0", "rollout-1"):  # scaled from 0 to rollout.replicas
            await got_work(rollouts, name, starts=1)

        api.throttle("list pods", times=1)
        api.store.expire()  # the run goes on, and what happens next is seen all the same
        api.put(told_to_end(api.get("Pod", "rollout-1", NAMESPACE)))  # as `kubectl delete pod` does
        await got_work(rollouts, "rollout-1", starts=2)
        assert "create pods/eviction" not in api.seen

        rollouts.history["rollout-0"][0]._gone = True  # it answers nothing any more
        await got_work(rollouts, "rollout-0", starts=2)
        assert api.seen["create pods/eviction"] == 1
        await soon(lambda: {event["reason"] for event in api.list_of("Event")} == {"TandemScaled", "TandemEvicted"})
        (evicted,) = [event for event in api.list_of("Event") if event["reason"] == "TandemEvicted"]
        assert evicted["involvedObject"]["name"] == "rollout-0"
        assert evicted["message"] == "the replica is stuck: no answer in 2 s"

        api.put(rollout_set(3))  # as `kubectl scale` does
        await got_work(rollouts, "rollout-2", starts=1)
        done = len(rows(environment))
        await soon(lambda: len(rows(environment)) > done)
        said = dict(await asyncio.to_thread(coordinator.status))
        assert said["state"] == "running"
        assert said["serving"] == "rollout-0, rollout-1, rollout-2"
        assert await asyncio.to_thread(coordinator.stop) == 0
        services = [service for each in rollouts.history.values() for service in each]
        assert len(services) == 5
        assert not any(service.was_asked_unseeded for service in services)
    life = [(entry.who, entry.kind) for entry in read_life(environment.run_dir, 50)]
    assert life[0] == ("coordinator", "coordinator started")
    ended = [kind for who, kind in life if who == "rollout-1"]
    # It may be gone before the watch, which has expired, says that it was asked to end.
    assert ended[:3] in (
        ["replica joined", "replica left", "replica joined"],
        ["replica joined", "replica lost", "replica back"],
    )
    # Lost is one that answers no call; the watch may tell of the eviction first.
    assert [kind for who, kind in life if who == "rollout-0"] in (
        ["replica joined", "replica lost", "replica back"],
        ["replica joined", "replica left", "replica joined"],
    )
    assert ("rollout-2", "replica joined") in life
    assert life[-1] == ("coordinator", "coordinator ended")
    iterations = [row["iteration"] for row in rows(environment)]
    assert iterations == list(range(1, len(iterations) + 1))


async def test_a_run_on_groups_of_pods_that_end_as_a_whole(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    api.put(leader_worker_set(0))
    fleet = {"rollout_set_kind": "LeaderWorkerSet"}
    async with pods(api, environment, "LeaderWorkerSet") as (_, rollouts):
        coordinator = start(with_settings(kube_config, fleet=fleet, rollout={"nodes": 2, "tensor_parallel": 2}))
        for name in ("rollout-0", "rollout-1"):
            await got_work(rollouts, name, starts=1)
        assert api.get("LeaderWorkerSet", "rollout", NAMESPACE)["spec"]["replicas"] == 2

        api.put(told_to_end(api.get("Pod", "rollout-1-1", NAMESPACE)))  # a node is drained
        await got_work(rollouts, "rollout-1", starts=2)
        assert "create pods/eviction" not in api.seen

        rollouts.history["rollout-0"][0]._gone = True  # it answers nothing any more
        await got_work(rollouts, "rollout-0", starts=2)
        assert api.seen["create pods/eviction"] == 1
        evicted = [event for event in api.list_of("Event") if event["reason"] == "TandemEvicted"]
        assert [event["involvedObject"]["name"] for event in evicted] == ["rollout-0"]
        await soon(lambda: dict(coordinator.status())["serving"] == "rollout-0, rollout-1")
        assert await asyncio.to_thread(coordinator.stop) == 0
        services = [service for each in rollouts.history.values() for service in each]
        assert len(services) == 4
        assert not any(service.was_asked_unseeded for service in services)


async def test_replicas_that_are_all_preempted_are_waited_for_as_long_as_they_are_queued(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    """In the middle of a run, for longer than rollout.rejoin_timeout_s and sync.formation_timeout_s."""
    names = ("rollout-0", "rollout-1")
    times = {"formation_timeout_s": 1.0}
    async with pods(api, environment) as (_, rollouts):
        coordinator = start(with_settings(kube_config, rollout={"rejoin_timeout_s": 4.0}, sync=times))
        for name in names:
            await got_work(rollouts, name, starts=1)
        await iterated(environment, 2)
        for name in names:
            api.put(gated(name, "rollout", environment.run_id))
        with pytest.raises(subprocess.TimeoutExpired):  # it does not end
            await asyncio.to_thread(coordinator.process.wait, 9.0)
        said = await asyncio.to_thread(coordinator.status)
        queued = "pods of rollout are queued: held by the scheduling gate kueue.x-k8s.io/admission"
        assert ("trouble", f"{queued}: the run waits as long as they are queued") in said
        waits = "too few replicas, others are queued: waiting as long as they are"
        assert [line["message"] for line in coordinator.warnings()].count(waits) == 1
        done = len(rows(environment))
        for name in names:
            api.put(pod(name, run_id=environment.run_id, ready=False))
        for name in names:
            await got_work(rollouts, name, starts=2)
        await iterated(environment, done)
        assert await asyncio.to_thread(coordinator.stop) == 0


@pytest.mark.parametrize("lost", ["coordinator", "trainer"])
async def test_a_run_that_continues_waits_for_no_pod_that_starts(
    api: FakeCluster, kube_config: RunConfig, environment: ServiceEnvironment, lost: str, tmp_path: Path
) -> None:
    """It works with what is there; the replica joins when it comes."""
    kubeconfig = api.write_kubeconfig(tmp_path / "in-process", NAMESPACE, user=COORDINATOR)
    fleet = {"scale": False, "release_after_s": None, "kubeconfig": kubeconfig}
    config = with_settings(kube_config, run={"iterations": 6, "startup_timeout_s": 600.0}, fleet=fleet)
    config = with_settings(config, rollout={"replicas": 3}, trainer={"checkpoint_optimizer": False})
    run_id = environment.run_id
    held = [{"type": "PodScheduled", "status": "False", "message": "insufficient nvidia.com/gpu"}]
    for name in ("rollout-0", "rollout-1", "trainer-0"):
        api.put(pod(name, component=name.partition("-")[0], run_id=run_id))
    api.put(pod("rollout-2", run_id=run_id, ready=False, phase="Pending", conditions=held))

    async def fail(step: int) -> None:
        if step != 3 or api.get("Pod", "rollout-2", NAMESPACE)["status"]["conditions"] != held:
            return
        api.put(pod("rollout-2", run_id=run_id, ready=False, phase="Pending"))
        if lost == "trainer":
            status = {"name": "main", "image": "i", "imageID": "", "ready": True, "restartCount": 1, "state": {}}
            api.put(pod("trainer-0", component="trainer", run_id=run_id, containerStatuses=[status]))
            raise PeerLost("a rank is gone")
        raise Internal("cuda error")

    trainer = FakeTrainer(before_step=fail)
    async with announced_fleet(environment.redis_url, run_id, trainer), asyncio.timeout(DEADLINE_S):
        codes = [await conduct(config, environment, resume=True, stop=asyncio.Event())]
        if lost == "coordinator":
            codes.append(await conduct(config, environment, resume=True, stop=asyncio.Event()))
    assert codes == ([1, 0] if lost == "coordinator" else [0])
    assert len(rows(environment)) == 6


async def test_what_keeps_a_run_from_starting_is_in_its_status(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    api.refuse("create events")
    async with a_trainer(api, environment):
        statuses = waiting_status("ImagePullBackOff", "tandem-rollout:typo: not found")
        api.put(pod("rollout-0", ready=False, phase="Pending", containerStatuses=statuses))
        coordinator = start(kube_config)

        def troubles() -> list[str]:
            return [text for name, text in coordinator.status() if name == "trouble"]

        image = "pod rollout-0: container main: ImagePullBackOff: tandem-rollout:typo: not found"
        await soon(lambda: image in troubles())
        refused = [text for text in await asyncio.to_thread(troubles) if "RBAC" in text]
        assert len(refused) == 1
        assert "create events (" in refused[0]
        assert dict(await asyncio.to_thread(coordinator.status))["serving"] == "no replica yet"
        assert await asyncio.to_thread(coordinator.stop) == 0
        told = [line for line in coordinator.warnings() if "create events" in line.get("trouble", "")]
        assert len(told) == 1


async def test_a_stop_does_not_wait_for_a_trainer_that_is_rescheduled(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    """Nothing is left to save: the coordinator ends at once, not after run.stop_timeout_s."""
    async with pods(api, environment) as (trainer, _):
        coordinator = start(with_settings(kube_config, run={"stop_timeout_s": 600.0}))
        await iterated(environment, 2)
        trainer.show(ready=False, phase="Pending")
        await trainer.stop()
        await soon(lambda: any("the trainer was lost" in text for _, text in coordinator.status()))
        assert await asyncio.to_thread(coordinator.stop) == 0


async def test_a_trainer_that_is_drained_loses_no_iteration(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    """Its pod is deleted, and it serves until the run has saved: the next one continues from there."""
    async with pods(api, environment) as (trainer, _):
        coordinator = start(with_settings(kube_config, run={"checkpoint_every": 100_000}))
        await iterated(environment, 4)
        assert trainer.service.saved == []

        api.put(told_to_end(api.get("Pod", "trainer-0", NAMESPACE), 160))
        trainer.service.leaves = True
        await soon(lambda: trainer.service.saved != [])
        (saved,) = trainer.service.saved
        done, trained = len(rows(environment)), len(trainer.service.steps)
        await trainer.stop()
        assert len(trainer.service.steps) == trained, "it would have to be saved again"
        api.delete("Pod", "trainer-0", NAMESPACE)
        trainer.show(ready=False, phase="Pending")
        await trainer.start()
        await soon(lambda: len(rows(environment)) > done)
        assert int(saved.parent.name.rpartition("-")[2]) == done
        assert trainer.service.steps[0].header.policy_version == done, "nothing is done again"
        assert await asyncio.to_thread(coordinator.stop) == 0
    iterations = [row["iteration"] for row in rows(environment)]
    assert iterations == list(range(1, len(iterations) + 1))


async def test_gpus_are_given_back_when_the_run_is_over(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    async with pods(api, environment):
        api.put(trainer_set(1))
        coordinator = start(with_settings(kube_config, run={"iterations": 2}))
        assert await asyncio.to_thread(coordinator.process.wait, DEADLINE_S) == 0
    sizes = {each["metadata"]["name"]: each["spec"]["replicas"] for each in api.list_of("StatefulSet")}
    assert sizes == {"rollout": 0, "trainer": 0}
    assert {"TandemScaled", "TandemReleased"} == {event["reason"] for event in api.list_of("Event")}
    assert saved_state(environment)["status"] == "finished"


async def test_gpus_are_kept_where_they_are_to_be_kept_or_the_run_goes_on(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    async with pods(api, environment):
        api.put(trainer_set(1))
        coordinator = start(kube_config)  # interrupted: a Job would start it again
        await iterated(environment, 1)
        assert await asyncio.to_thread(coordinator.stop) == 0
        done = len(rows(environment))
        kept = with_settings(kube_config, run={"iterations": done + 1}, fleet={"release_after_s": None})
        coordinator = start(kept, "--resume")
        assert await asyncio.to_thread(coordinator.process.wait, DEADLINE_S) == 0
    sizes = {each["metadata"]["name"]: each["spec"]["replicas"] for each in api.list_of("StatefulSet")}
    assert sizes == {"rollout": 2, "trainer": 1}


async def test_gpus_are_given_back_after_a_while_or_at_a_stop(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    """Meanwhile the run's status can be read; its end is no interruption."""
    async with pods(api, environment):
        api.put(trainer_set(1))
        config = with_settings(kube_config, run={"iterations": 2}, fleet={"release_after_s": 600.0})
        coordinator = start(config, "--interrupted-exit", "143")
        await soon(lambda: "gpus kept for a while" in coordinator.log.read_text())
        assert dict(await asyncio.to_thread(coordinator.status))["state"] == "finished"
        assert api.get("StatefulSet", "trainer", NAMESPACE)["spec"]["replicas"] == 1
        assert await asyncio.to_thread(coordinator.stop) == 0
    assert {each["spec"]["replicas"] for each in api.list_of("StatefulSet")} == {0}


@pytest.mark.parametrize("why", ["bad data", "given up"])
async def test_gpus_are_given_back_when_a_job_will_not_try_again(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
    why: str,
    tmp_path: Path,
) -> None:
    if why == "bad data":
        kube_config = with_settings(kube_config, data={"train": tmp_path / "nowhere.jsonl"})
    else:
        (environment.run_dir / FAILURES_FILE).write_text(json.dumps({"iteration": 0, "failures": MAX_FAILURES - 1}))
    async with pods(api, environment) as (trainer, _):
        trainer.service.faults.append(Internal("cuda error"))
        api.put(trainer_set(1))
        coordinator = start(kube_config, "--resume", "--retry-exit", "75")
        code = await asyncio.to_thread(coordinator.process.wait, DEADLINE_S)
    assert code == (2 if why == "bad data" else 4)
    assert {each["spec"]["replicas"] for each in api.list_of("StatefulSet")} == {0}


async def test_one_that_was_to_release_the_gpus_of_a_bad_configuration_and_froze_takes_none_from_the_next(
    api: FakeCluster, kube_config: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person has corrected the configuration meanwhile."""
    api.put(rollout_set(2))
    real = KubeApi.replicas_of
    group = Rendezvous(environment.redis_url, f"tandem:{environment.run_id}")

    def frozen(own: KubeApi, pod_set: PodSet) -> tuple[int, str]:
        found = real(own, pod_set)
        group._redis.zadd(f"{{tandem:{environment.run_id}}}:leases", {COORDINATOR_SLOT: 0})
        group.lead(COORDINATOR_SLOT, "the next one", 30.0)
        return found

    monkeypatch.setattr(KubeApi, "replicas_of", frozen)
    monkeypatch.setattr(CoordinatorLease, "left_s", 0.0)  # it was frozen for longer
    kubeconfig = api.write_kubeconfig(environment.run_dir / "kubeconfig", NAMESPACE, user=COORDINATOR)
    config = with_settings(kube_config, fleet={"kubeconfig": kubeconfig})
    await asyncio.to_thread(release_unled, config, environment, "bad configuration")
    assert api.get("StatefulSet", "rollout", NAMESPACE)["spec"]["replicas"] == 2


async def test_a_run_waits_for_a_trainer_that_is_rescheduled_and_ends_with_one_that_is_dead(
    api: FakeCluster,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    start: Start,
) -> None:
    async with pods(api, environment) as (trainer, _):
        coordinator = start(kube_config)
        await iterated(environment, 4)

        trainer.show(ready=False, phase="Pending")  # the node is gone, the set has made another pod
        await trainer.stop()
        await soon(lambda: any("the trainer was lost" in text for _, text in coordinator.status()))
        done = len(rows(environment))
        await trainer.start()
        await soon(lambda: len(rows(environment)) > done)
        assert trainer.service.restored == []
        assert done - 2 < trainer.service.steps[0].header.policy_version <= done  # run.checkpoint_every
        troubles = [text for name, text in await asyncio.to_thread(coordinator.status) if name == "trouble"]
        assert not [text for text in troubles if "have equal rewards" not in text]  # which these fakes may give

        statuses = waiting_status("CrashLoopBackOff", restarts=9)
        trainer.show(ready=False, containerStatuses=statuses)
        await trainer.stop()
        assert await asyncio.to_thread(coordinator.process.wait, DEADLINE_S) == 1
        said = dict(await asyncio.to_thread(coordinator.status))
        assert said["ended"].startswith(
            "failed: the trainer is dead, waiting would not help: trainer-0: container main"
        )
        assert "9 restarts, 9 of them in a row; lost by: " in said["ended"]
    iterations = [row["iteration"] for row in rows(environment)]
    assert iterations == list(range(1, len(iterations) + 1))
