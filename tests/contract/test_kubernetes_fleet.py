"""The coordinator's Kubernetes side against the API stand-in (a fake): watching, retries, refusals, Events, eviction.

A fleet of pods keeps the same contract as one that the registry alone knows.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.fleet.arrivals import wait_for_enough
from coordinator.fleet.kubernetes import cluster as cluster_module
from coordinator.fleet.kubernetes import placement, size
from coordinator.fleet.kubernetes.api import watch
from coordinator.fleet.kubernetes.api.client import MANAGER
from coordinator.fleet.kubernetes.api.events import About
from coordinator.fleet.kubernetes.api.permissions import PERMISSIONS
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import PodOutlook
from coordinator.fleet.kubernetes.arrivals import ClusterOutlook, TrainerDead
from coordinator.fleet.kubernetes.cluster import Cluster, connect, reach_cluster
from coordinator.fleet.kubernetes.fleet import KubernetesFleet
from coordinator.fleet.kubernetes.keeper import Keeper
from coordinator.fleet.kubernetes.returns import TrainerGuard
from coordinator.fleet.kubernetes.troubles import Troubles
from coordinator.watch.events import EventKind, EventLog
from servicekit.environment import ServiceEnvironment
from servicekit.errors import (
    Aborted,
    ConfigError,
    DeadlineExceeded,
    Fenced,
    PermissionDenied,
    Unavailable,
    WrongVersion,
)
from servicekit.redis.records import ServiceRecord
from servicekit.redis.registry import Registry
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.fleet import Fleet
from tandem_clients.replica import Replica
from tandem_clients.watched_fleet import WatchedFleet
from tandem_config.schema import RunConfig
from tandem_files.leader import PLACEMENT_FILE
from tandem_files.run_folder import Scale, scale_of, write_scale
from tests.contract.coordinator_runs import with_settings
from tests.contract.kube_objects import (
    NAMESPACE,
    gated,
    job_set,
    leader_worker_set,
    pod,
    role_rules,
    rollout_set,
    trainer_set,
    waiting_status,
    worker,
)
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.cluster.kinds import CONTROLLERS
from tests.fakes.cluster.requests import COORDINATOR
from tests.fakes.cluster.verbs import scaled_by, told_to_end
from tests.fakes.fake_fleet import FakeFleet, announced_fleet, fake_fleet
from tests.fakes.fake_fleet import announced as announced_service
from tests.kit.waiting import until

TTL_S = 30.0
DEADLINE_S = 20.0
STATEFUL_SET = PodSet(kind="StatefulSet", name="rollout")
SETS = {"StatefulSet": rollout_set, "LeaderWorkerSet": leader_worker_set}


@pytest.fixture
def api() -> Iterator[FakeCluster]:
    with FakeCluster(NAMESPACE, custom=CONTROLLERS) as api:
        api.bind(role_rules())
        yield api


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FIRST_PAUSE_S", 0.02)


@pytest.fixture
def kube_config(config: RunConfig, api: FakeCluster, tmp_path: Path) -> RunConfig:
    kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig", NAMESPACE, user=COORDINATOR)
    fleet = {"kind": "kubernetes", "kubeconfig": kubeconfig, "unready_after_s": 0.2}
    sync = {"probe_timeout_s": 0.3}
    return with_settings(config, fleet={**fleet, "stuck_after_s": 0.8}, sync=sync, run={"startup_timeout_s": 0.3})


Start = Callable[..., Any]


@pytest.fixture
async def start(kube_config: RunConfig, environment: ServiceEnvironment) -> AsyncIterator[Start]:
    """Starts to watch the cluster, with other settings of the fleet; ended after the test."""
    started: list[Cluster] = []

    async def begin(events: EventLog | None = None, **fleet: Any) -> Cluster:
        config = with_settings(kube_config, fleet=fleet)
        cluster = await asyncio.to_thread(reach_cluster, config, environment, events or EventLog())
        started.append(cluster)
        await cluster.start()
        return cluster

    yield begin
    for cluster in started:
        cluster.close()


def names(cluster: Cluster) -> list[str]:
    return [pod.name for pod in cluster.pods.pods]


async def soon(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(until, condition, DEADLINE_S)


# ---- watching ----


async def test_pods_are_found_by_label_and_followed(api: FakeCluster, start: Start) -> None:
    api.put(pod("rollout-0"))
    api.put(pod("stranger", run_id="another"))
    cluster = await start()
    assert names(cluster) == ["rollout-0"]
    api.put(pod("trainer-0", component="trainer"))
    await soon(lambda: names(cluster) == ["rollout-0", "trainer-0"])
    api.delete("Pod", "rollout-0", NAMESPACE)
    await soon(lambda: names(cluster) == ["trainer-0"])
    assert cluster.troubles() == []


async def test_an_expired_watch_lists_again_and_misses_nothing(
    api: FakeCluster, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    api.put(pod("rollout-0"))
    cluster = await start()
    lists = api.seen["list pods"]
    with api.store.changed:  # so that no watch sees the changes before they have expired
        api.delete("Pod", "rollout-0", NAMESPACE)
        api.put(pod("rollout-1"))
        api.store.expire()
    await soon(lambda: names(cluster) == ["rollout-1"])
    assert api.seen["list pods"] == lists + 1
    assert "pod watch expired" in caplog.text
    assert "pod watch lost" not in caplog.text  # that is for troubles
    assert cluster.troubles() == []


async def test_a_watch_that_ends_goes_on_from_where_it_was(api: FakeCluster, start: Start) -> None:
    cluster = await start()
    api.put(pod("rollout-0"))
    await soon(lambda: names(cluster) == ["rollout-0"])  # the watch is open
    lists, watches = api.seen["list pods"], api.seen["watch pods"]
    api.store.end_watches()
    api.put(pod("rollout-1"))
    await soon(lambda: names(cluster) == ["rollout-0", "rollout-1"] and api.seen["watch pods"] > watches)
    assert api.seen["list pods"] == lists


async def test_throttling_is_waited_out_as_long_as_the_server_says(api: FakeCluster, start: Start) -> None:
    api.put(pod("rollout-0"))
    api.throttle("list pods", times=1, retry_after_s=1)
    clock = asyncio.get_running_loop().time
    begun_s = clock()
    cluster = await start()
    assert clock() - begun_s >= 1.0
    assert names(cluster) == ["rollout-0"]
    assert api.seen["list pods"] == 2


async def test_throttling_that_does_not_end_names_verb_and_resource(api: FakeCluster, start: Start) -> None:
    cluster = await start()
    api.throttle("create pods/eviction", times=99, retry_after_s=0)
    api.put(pod("rollout-0"))
    await soon(lambda: names(cluster) == ["rollout-0"])
    with pytest.raises(Unavailable, match="create pods/eviction rollout-0 in namespace tandem: throttled"):
        await asyncio.to_thread(cluster.api.evict, cluster.pods.pods[0])


async def test_an_api_that_is_away_leaves_what_was_known(api: FakeCluster, start: Start) -> None:
    api.put(pod("rollout-0"))
    cluster = await start()
    api.refuse("list pods", "watch pods")
    api.store.expire()
    await soon(lambda: cluster.troubles() != [])
    assert not cluster.pods.is_current
    assert names(cluster) == ["rollout-0"]
    (trouble,) = cluster.troubles()
    assert "pods in namespace tandem: refused" in trouble


# ---- what is refused ----


async def test_all_that_rbac_refuses_is_said_once_at_the_start(api: FakeCluster, start: Start) -> None:
    api.refuse("create pods/eviction", "patch statefulsets/scale", "create events")
    api.put(rollout_set(1))
    events = EventLog()
    cluster = await start(events, scale=True)
    told = cluster.noted.all()[0]
    for name in ("create pods/eviction", "patch statefulsets/scale.apps", "create events"):
        assert f"{name} (" in told
    assert "list pods" not in told
    warnings = [event.message for event in events._newer(0) if event.kind is EventKind.WARNING]
    assert warnings[0] == told
    assert sum("create pods/eviction" in warning for warning in warnings) == 1


async def test_only_what_the_settings_need_is_asked_for(api: FakeCluster, start: Start) -> None:
    api.refuse("create pods/eviction", "get statefulsets", "get statefulsets/scale", "patch statefulsets/scale")
    cluster = await start(scale=False, max_evictions_per_hour=0, release_after_s=None)
    assert cluster.troubles() == []


async def test_a_refused_call_names_verb_resource_and_namespace(api: FakeCluster, start: Start) -> None:
    api.put(pod("rollout-0"))
    cluster = await start()
    api.refuse("create pods/eviction")
    with pytest.raises(PermissionDenied, match="create pods/eviction rollout-0 in namespace tandem: refused"):
        await asyncio.to_thread(cluster.api.evict, cluster.pods.pods[0])
    assert api.seen["create pods/eviction"] == 1  # asking again would not help


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("StatefulSet", "statefulsets/scale.apps"),
        ("LeaderWorkerSet", "leaderworkersets/scale.leaderworkerset.x-k8s.io"),
    ],
)
def test_every_call_is_in_the_table_of_permissions(kind: str, sizes: str) -> None:
    always = {"list pods", "watch pods", "create pods/eviction", "create events", "patch events"}
    assert {str(each) for each in PERMISSIONS} == always
    rows = {str(each) for each in PodSet(kind=kind, name="rollout").permissions}
    assert rows == {f"get {sizes}", f"patch {sizes}"}
    assert str(PodSet(kind=kind, name="rollout").get) == f"get {sizes}".replace("/scale", "")
    rows = {str(each) for each in PodSet(kind="JobSet", name="trainer").permissions}
    assert rows == {"get jobsets.jobset.x-k8s.io", "delete jobsets.jobset.x-k8s.io"}


async def test_a_kubeconfig_that_cannot_be_used_is_named(
    kube_config: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    config = with_settings(kube_config, fleet={"kubeconfig": tmp_path / "nowhere"})
    with pytest.raises(ConfigError, match="nowhere"):
        reach_cluster(config, environment, EventLog())


def test_a_pod_without_a_service_account_is_told_so(kube_config: RunConfig) -> None:
    settings = kube_config.fleet.model_copy(update={"kubeconfig": None})
    with pytest.raises(ConfigError, match=r"the pod's service account cannot be used: .*automountServiceAccountToken"):
        connect(settings, "", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


async def test_an_api_server_that_is_not_there_is_named_and_the_registry_decides(
    api: FakeCluster, start: Start, tmp_path: Path
) -> None:
    with FakeCluster(NAMESPACE) as gone:
        kubeconfig = gone.write_kubeconfig(tmp_path / "gone", user=COORDINATOR)
    cluster = await start(kubeconfig=kubeconfig)
    assert not cluster.pods.is_current
    (trouble,) = cluster.troubles()
    assert trouble.startswith("Kubernetes API, list pods in namespace default: no answer: ")
    assert "refused" in trouble


# ---- what it does ----


@pytest.mark.parametrize("kind", SETS)
async def test_the_rollout_set_gets_its_size_in_spite_of_a_conflict(kind: str, api: FakeCluster, start: Start) -> None:
    plural = f"{kind.lower()}s"
    api.put(SETS[kind](5))
    api.conflict(f"patch {plural}/scale", times=1)
    cluster = await start(scale=True, rollout_set_kind=kind)
    assert api.get(kind, "rollout", NAMESPACE)["spec"]["replicas"] == 2
    assert api.seen[f"get {plural}/scale"] == api.seen[f"patch {plural}/scale"] == 2  # read again, then changed
    assert api.get(kind, "rollout", NAMESPACE)["metadata"]["managedFields"] == [scaled_by(MANAGER)]
    assert cluster.troubles() == []
    (event,) = api.list_of("Event")
    assert event["reason"] == "TandemScaled"
    made = api.get(kind, "rollout", NAMESPACE)
    about = event["involvedObject"]
    assert (about["kind"], about["apiVersion"]) == (made["kind"], made["apiVersion"]) == (kind, about["apiVersion"])
    assert "from 5 to 2 replicas" in event["message"]


async def test_a_set_that_is_of_another_kind_is_named(api: FakeCluster, start: Start) -> None:
    api.put(rollout_set(5))
    cluster = await start(scale=True, rollout_set_kind="LeaderWorkerSet")
    (trouble,) = cluster.troubles()
    assert trouble.startswith(
        "the size of leaderworkerset/rollout stays: Kubernetes API, get leaderworkersets.leaderworkerset"
    )
    assert "not found" in trouble


async def test_a_start_does_not_wait_for_the_size_while_the_api_is_away(
    api: FakeCluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A take-over would take most of a minute; the size is set when the API answers again."""
    monkeypatch.setattr(size, "LOOK_S", 0.5)
    api.put(rollout_set(5))
    for request in ("list pods", "get statefulsets"):
        api.throttle(request, times=8, retry_after_s=0)
    await start(scale=True)
    assert api.seen["get statefulsets"] == 0
    await soon(lambda: size_of(api) == 2)


async def test_the_size_of_the_other_kind_need_not_be_allowed(api: FakeCluster, start: Start) -> None:
    api.put(leader_worker_set(2))
    api.refuse("get statefulsets", "get statefulsets/scale", "patch statefulsets/scale")
    cluster = await start(scale=True, rollout_set_kind="LeaderWorkerSet", release_after_s=None)
    assert cluster.troubles() == []


async def test_a_conflict_that_stays_names_verb_and_resource(api: FakeCluster, start: Start) -> None:
    api.put(rollout_set(5))
    cluster = await start()
    api.conflict("patch statefulsets/scale", times=99)
    with pytest.raises(Aborted, match=r"patch statefulsets/scale.apps rollout in namespace tandem"):
        await asyncio.to_thread(cluster.api.scale, STATEFUL_SET, 3)


@pytest.mark.parametrize("change", ["evict", "scale", "delete"])
async def test_a_coordinator_that_is_replaced_between_two_tries_changes_nothing(
    change: str, api: FakeCluster, start: Start
) -> None:
    """As it is when it was frozen while it waited to try again."""
    for obj in (rollout_set(5), job_set(), pod("rollout-0")):
        api.put(obj)
    cluster = await start(trainer_set_kind="JobSet")
    checks = list[int]()

    def check() -> None:
        checks.append(1)
        if len(checks) > 1:
            raise Fenced("coordinator b has taken over the run")

    cluster.api.before_change = check
    api.conflict("patch statefulsets/scale", times=1)
    for request in ("create pods/eviction", "delete jobsets"):
        api.throttle(request, times=1, retry_after_s=0)
    given: dict[str, tuple[Any, ...]] = {
        "evict": (cluster.pods.pods[0],),
        "scale": (STATEFUL_SET, 0),
        "delete": (cluster.trainer_set,),
    }
    with pytest.raises(Fenced):
        await asyncio.to_thread(getattr(cluster.api, change), *given[change])
    assert size_of(api) == 5
    assert len(api.list_of("JobSet")) == 1
    assert "deletionTimestamp" not in api.get("Pod", "rollout-0", NAMESPACE)["metadata"]


async def test_a_coordinator_that_was_replaced_after_it_read_a_size_does_not_change_it(
    api: FakeCluster, start: Start
) -> None:
    """Its successor has not changed the set, so nothing conflicts."""
    api.put(rollout_set(5))
    cluster = await start()

    def check() -> None:
        if api.seen["get statefulsets/scale"]:
            raise Fenced("coordinator b has taken over the run")

    cluster.api.before_change = check
    with pytest.raises(Fenced):
        await asyncio.to_thread(cluster.api.scale, STATEFUL_SET, 0)
    assert size_of(api) == 5


async def test_repeated_events_are_one_with_a_count(api: FakeCluster, start: Start) -> None:
    cluster = await start()
    clock_s = [0.0]
    cluster.recorder._clock = lambda: clock_s[0]
    about = About(kind="Pod", name="rollout-0")
    for clock_s[0] in (0.0, 1.0, 40.0, 41.0, 700.0):
        await asyncio.to_thread(cluster.recorder.record, about, "TandemEngineStuck", "no answer", kind="Warning")
    first, second = sorted(api.list_of("Event"), key=lambda event: -event["count"])
    assert (first["count"], second["count"]) == (3, 1)  # written at 0 and 40 s; a new one after ten minutes
    assert api.seen["patch events"] == 1
    assert first["involvedObject"] == {"kind": "Pod", "apiVersion": "v1", "name": "rollout-0", "namespace": NAMESPACE}


# ---- who sets the size ----


def set_by(manager: str, replicas: int, kind: str = "StatefulSet") -> dict[str, Any]:
    obj = SETS[kind](replicas)
    obj["metadata"]["managedFields"] = [scaled_by(manager)] if manager else []
    return obj


def size_of(api: FakeCluster, kind: str = "StatefulSet") -> int:
    return int(api.get(kind, "rollout", NAMESPACE)["spec"]["replicas"])


@pytest.mark.parametrize("kind", SETS)
async def test_the_size_that_was_reached_is_kept_by_the_next_coordinator(
    kind: str, api: FakeCluster, start: Start, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "LOOK_S", 0.02)
    api.put(set_by("", 1, kind))
    first = await start(scale=True, rollout_set_kind=kind)
    assert size_of(api, kind) == 2
    api.put(set_by("kubectl", 6, kind))  # kubectl scale
    await soon(lambda: scale_of(environment.run_dir, 2) == 6)
    first.close()
    second = await start(scale=True, rollout_set_kind=kind)
    assert size_of(api, kind) == 6
    second.close()
    # An upgrade deletes the set, and applies its manifest.
    api.put(set_by("", 2, kind))
    await start(scale=True, rollout_set_kind=kind)
    assert size_of(api, kind) == 6
    events = [event["message"] for event in api.list_of("Event") if event["reason"] == "TandemScaled"]
    assert "from 2 to 6 replicas (the size that it had reached)" in events


async def test_another_number_in_the_configuration_counts(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    write_scale(environment.run_dir, Scale(replicas=6, configured=1))
    api.put(set_by("", 6))
    await start(scale=True)
    assert size_of(api) == 2


async def test_an_autoscaler_owns_the_size_and_fleet_scale_beside_it_is_a_trouble(
    api: FakeCluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "LOOK_S", 0.02)
    api.put(set_by("kube-controller-manager", 9))
    cluster = await start(scale=True)
    await soon(lambda: cluster.troubles() != [])
    assert size_of(api) == 9
    (trouble,) = cluster.troubles()
    assert trouble == (
        "statefulset/rollout has two owners of its size: an autoscaler (kube-controller-manager), which has set 9, and "
        "fleet.scale, which leaves it to that one: set fleet.scale: false"
    )
    await soon(lambda: any(event["reason"] == "TandemScaleConflict" for event in api.list_of("Event")))
    api.put(set_by("", 9))
    await soon(lambda: "two owners" not in str(cluster.troubles()))
    assert api.seen["patch statefulsets/scale"] == 0


@pytest.mark.parametrize("scale", [True, False])
async def test_gpus_that_were_given_back_return_as_many_as_they_were(
    api: FakeCluster, start: Start, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch, scale: bool
) -> None:
    monkeypatch.setattr(size, "LOOK_S", 0.02)
    api.put(set_by("kubectl", 6))
    api.put(trainer_set(1))
    first = await start(scale=scale)
    await soon(lambda: scale_of(environment.run_dir, 2) == 6)
    await asyncio.to_thread(first.release, "the run is finished")
    assert size_of(api) == 0
    first.close()
    # The autoscaler's manifest has no size, so applying it leaves the 0.
    await start(scale=scale)
    assert size_of(api) == 6


async def test_a_size_of_0_that_a_person_has_set_stays(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    write_scale(environment.run_dir, Scale(replicas=6, configured=2))
    api.put(set_by("kubectl", 0))
    for scale in (False, True):
        cluster = await start(scale=scale)
        zero = "statefulset/rollout has size 0, which kubectl has set: the run waits for replicas"
        assert cluster.troubles() == [zero]
    assert size_of(api) == 0


async def test_a_size_that_may_not_be_read_is_left_and_named(
    api: FakeCluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(size, "LOOK_S", 0.02)
    api.put(set_by("", 5))
    api.bind([rule for rule in role_rules() if rule["resources"] != ["statefulsets"]])  # that of an earlier release
    cluster = await start(scale=True)
    told = " ".join(cluster.troubles())
    assert "get statefulsets.apps (" in told
    assert "the size of statefulset/rollout stays: Kubernetes API, get statefulsets.apps rollout in namespace" in told
    assert size_of(api) == 5
    api.bind(role_rules())  # the Role is applied
    await soon(lambda: size_of(api) == 2)


# ---- GPUs are given back ----


@pytest.mark.parametrize("kind", SETS)
async def test_a_run_that_is_over_has_no_pods(kind: str, api: FakeCluster, start: Start) -> None:
    api.put(SETS[kind](16))
    api.put(trainer_set(8))
    api.conflict("patch statefulsets/scale", times=1)
    cluster = await start(rollout_set_kind=kind)
    await asyncio.to_thread(cluster.release, "the run is finished")
    assert api.get(kind, "rollout", NAMESPACE)["spec"]["replicas"] == 0
    assert api.get("StatefulSet", "trainer", NAMESPACE)["spec"]["replicas"] == 0
    told = {event["involvedObject"]["name"]: event["message"] for event in api.list_of("Event")}
    why = "the run is finished"
    assert told == {"rollout": f"16 replicas, now none: {why}", "trainer": f"8 replicas, now none: {why}"}
    await asyncio.to_thread(cluster.release, "once more")
    assert len(api.list_of("Event")) == 2
    assert cluster.troubles() == []


async def test_a_job_set_has_no_size_and_is_deleted(api: FakeCluster, start: Start) -> None:
    api.put(rollout_set(2))
    api.put(job_set())
    cluster = await start(trainer_set_kind="JobSet")
    await asyncio.to_thread(cluster.release, "the run is finished")
    assert api.list_of("JobSet") == []
    await asyncio.to_thread(cluster.release, "once more")  # it is not there
    assert cluster.troubles() == []


async def test_the_environment_names_the_trainers_set_of_a_run_with_a_prefix(
    api: FakeCluster, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    api.bind([{**rule, "resourceNames": []} for rule in role_rules()])  # its Role has the prefix too
    renamed = trainer_set(1)
    renamed["metadata"]["name"] = "b-trainer"
    api.put(renamed)
    own = environment.model_copy(update={"trainer_set": "b-trainer"})
    cluster = await asyncio.to_thread(reach_cluster, kube_config, own, EventLog())
    await asyncio.to_thread(cluster.release, "the run is finished")
    assert api.get("StatefulSet", "b-trainer", NAMESPACE)["spec"]["replicas"] == 0


async def test_gpus_that_cannot_be_given_back_are_told_and_the_others_are(api: FakeCluster, start: Start) -> None:
    api.put(rollout_set(2))
    api.put(trainer_set(1))
    cluster = await start()
    api.refuse("patch statefulsets/scale rollout")
    await asyncio.to_thread(cluster.release, "the run is finished")
    assert api.get("StatefulSet", "trainer", NAMESPACE)["spec"]["replicas"] == 0
    (trouble,) = cluster.troubles()
    assert trouble.startswith("statefulset/rollout keeps its GPUs: Kubernetes API, patch statefulsets/scale.apps roll")


# ---- the fleet ----


def announced(environment: ServiceEnvironment) -> AbstractAsyncContextManager[FakeFleet]:
    """Two replicas and a trainer, in the registry."""
    return announced_fleet(environment.redis_url, environment.run_id, ttl_s=TTL_S, slots=())


@asynccontextmanager
async def fleet_of(
    kind: str, api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> AsyncIterator[tuple[Fleet, dict[str, Registry], FakeFleet]]:
    """A fleet of either kind over the same services."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(announced(environment))
        registries = services.registries
        registry = Registry(environment.redis_url, environment.run_id)
        stack.push_async_callback(asyncio.to_thread, registry.close)
        watched = WatchedFleet(registry, services.trainer)
        stack.push_async_callback(watched.close)
        fleet: Fleet = watched
        if kind == "kubernetes":
            for name in ("rollout-0", "rollout-1"):
                api.put(pod(name))
            fleet = KubernetesFleet(watched, (await start()).pods, lease_ttl_s=TTL_S)
        yield fleet, registries, services


@pytest.mark.parametrize("kind", ["registry", "kubernetes"])
async def test_the_contract_of_a_fleet(
    kind: str, api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with fleet_of(kind, api, start, environment) as (fleet, registries, services):
        found = await fleet.look()
        assert [replica.name for replica in found] == ["rollout-0", "rollout-1"]
        assert fleet.serving() == ()
        fleet.admit(found)
        assert fleet.serving() == await fleet.look() == found
        registries["rollout-1"].withdraw()
        assert fleet.serving() == found  # until somebody looks
        assert await fleet.look() == fleet.serving() == found[:1]
        record = ServiceRecord(
            role="rollout", name="rollout-1", address=services.addresses["rollout-1"], worker_id="another process"
        )
        registries["rollout-1"].announce(record, TTL_S)
        again = await fleet.look()
        assert again[0] is found[0]
        assert again[1] is not found[1]
        assert fleet.serving() == found[:1]


async def test_a_replica_whose_pod_leaves_is_drained_before_its_record_ends(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with fleet_of("kubernetes", api, start, environment) as (fleet, _, _):
        found = await fleet.look()
        fleet.admit(found)
        api.put(leaving(pod("rollout-1")))
        await soon(lambda: fleet.serving() == found[:1])
        assert await fleet.look() == found[:1]
        api.delete("Pod", "rollout-0", NAMESPACE)
        await soon(lambda: fleet.serving() == ())


async def test_a_record_that_outlives_its_pod_is_not_taken_for_the_next_pods(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with fleet_of("kubernetes", api, start, environment) as (fleet, registries, services):
        found = await fleet.look()
        fleet.admit(found)
        api.delete("Pod", "rollout-1", NAMESPACE)
        api.put(pod("rollout-1"))  # under its name, by its set; the lease of the old one runs on
        await soon(lambda: fleet.serving() == found[:1])
        assert await fleet.look() == found[:1]
        registries["rollout-1"].withdraw()
        address = services.addresses["rollout-1"]
        registries["rollout-1"].announce(
            ServiceRecord(role="rollout", name="rollout-1", address=address, worker_id="the next"), TTL_S
        )
        assert [replica.name for replica in await fleet.look()] == ["rollout-0", "rollout-1"]
        assert fleet.serving() == found[:1]


async def test_a_replica_that_was_found_before_its_pod_was_known_is_its_pods_after_a_lease(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with fleet_of("kubernetes", api, start, environment) as (fleet, _, _):
        assert isinstance(fleet, KubernetesFleet)
        clock_s = [0.0]
        fleet._clock = lambda: clock_s[0]
        found = await fleet.look()
        fleet.admit(found)
        api.delete("Pod", "rollout-1", NAMESPACE)
        api.put(pod("rollout-1"))
        await soon(lambda: fleet.serving() == found[:1])
        assert await fleet.look() == found[:1]
        clock_s[0] = TTL_S + 1.0
        assert fleet.serving() == found[:1]  # only a look at the registry says that it is announced still
        assert await fleet.look() == fleet.serving() == found


async def test_a_process_that_is_not_announced_any_more_costs_its_pod_nothing(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with kept(api, start, environment) as (fleet, _, services, found):
        assert set(await fleet.members()) == set(found)
        withdrawn = services.registries["rollout-1"]
        withdrawn.withdraw()  # its container was started again; nobody has looked since
        services.rollout_services[1]._gone = True
        assert set(await fleet.members()) == {found[0]}


def leaving(obj: dict[str, Any]) -> dict[str, Any]:
    return told_to_end(obj)


async def test_without_the_api_the_registry_alone_decides(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    api.refuse("list pods")
    async with fleet_of("kubernetes", api, start, environment) as (fleet, _, _):
        assert [replica.name for replica in await fleet.look()] == ["rollout-0", "rollout-1"]


# ---- engines of several pods ----


@pytest.mark.parametrize("what", ["leaves", "is dead", "may come", "stays"])
async def test_a_replica_that_loses_a_worker_is_drained_and_its_worker_is_no_replica(
    what: str, api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with fleet_of("kubernetes", api, start, environment) as (fleet, _, _):
        for name in ("rollout-0-1", "rollout-1-1"):
            api.put(worker(name))
        found = await fleet.look()
        assert [replica.name for replica in found] == ["rollout-0", "rollout-1"]
        fleet.admit(found)
        changed = {
            "leaves": leaving(worker("rollout-1-1")),
            "is dead": worker("rollout-1-1", ready=False, containerStatuses=waiting_status("InvalidImageName", "tag")),
            "may come": worker("rollout-1-1", ready=False, containerStatuses=waiting_status("ImagePullBackOff", "429")),
            "stays": worker("rollout-1-1", ready=False),
        }
        api.put(changed[what])
        api.put(leaving(worker("rollout-2-1")))  # of somebody else; once it is known, so is the other
        pods = fleet._pods  # type: ignore[attr-defined]
        await soon(lambda: [pod.name for pod in pods.pods if pod.leaving][-1:] == ["rollout-2-1"])
        assert fleet.serving() == (found if what in ("may come", "stays") else found[:1])
        assert await fleet.look() == fleet.serving()


async def test_an_engine_that_is_stuck_loses_its_leader(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with kept(api, start, environment) as (fleet, _, services, found):
        for name in ("rollout-0-1", "rollout-1-1"):
            api.put(worker(name))
        services.rollout_services[1]._gone = True
        await soon(lambda: fleet.serving() == found[:1])
        assert "deletionTimestamp" in api.get("Pod", "rollout-1", NAMESPACE)["metadata"]
        assert "deletionTimestamp" not in api.get("Pod", "rollout-1-1", NAMESPACE)["metadata"]
        assert api.seen["create pods/eviction"] == 1


async def test_troubles_of_workers_are_told(api: FakeCluster, start: Start) -> None:
    api.put(pod("rollout-0"))
    api.put(worker("rollout-0-1", ready=False, containerStatuses=waiting_status("ErrImagePull", "no tag")))
    cluster = await start()
    assert cluster.troubles() == ["pod rollout-0-1: container main: ErrImagePull: no tag"]


# ---- the keeper ----


@asynccontextmanager
async def kept(
    api: FakeCluster, start: Start, environment: ServiceEnvironment, **settings: Any
) -> AsyncIterator[tuple[KubernetesFleet, Cluster, FakeFleet, tuple[Replica, ...]]]:
    """A fleet that serves, looked after."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(announced(environment))
        registry = Registry(environment.redis_url, environment.run_id)
        stack.push_async_callback(asyncio.to_thread, registry.close)
        watched = WatchedFleet(registry, services.trainer)
        stack.push_async_callback(watched.close)
        for name in ("rollout-0", "rollout-1"):
            api.put(pod(name))
        cluster = await start(**settings)
        fleet = KubernetesFleet(watched, cluster.pods, lease_ttl_s=TTL_S)
        for service in services.rollout_services:
            service.state = weights_pb2.REPLICA_STATE_SERVING
        found = await fleet.look()
        fleet.admit(found)
        task = asyncio.create_task(Keeper(cluster, fleet, probe_timeout_s=0.3).run())
        try:
            yield fleet, cluster, services, found
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_replica_that_does_not_answer_is_evicted(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with kept(api, start, environment) as (fleet, cluster, services, found):
        uid = api.get("Pod", "rollout-1", NAMESPACE)["metadata"]["uid"]
        services.rollout_services[1]._gone = True
        await soon(lambda: fleet.serving() == found[:1])
        assert "deletionTimestamp" in api.get("Pod", "rollout-1", NAMESPACE)["metadata"]
        await soon(lambda: bool(api.list_of("Event")))
        (event,) = api.list_of("Event")
        assert (event["reason"], event["involvedObject"]["uid"]) == ("TandemEvicted", uid)
        assert "no answer in 0.8 s" in event["message"]
        assert api.seen["create pods/eviction"] == 1
        told = cluster.noted._events
        await soon(lambda: any("rollout-1 was stuck" in event.message for event in told._newer(0)))


async def test_evictions_have_a_budget(api: FakeCluster, start: Start, environment: ServiceEnvironment) -> None:
    async with kept(api, start, environment, max_evictions_per_hour=1) as (_, cluster, services, _):
        for service in services.rollout_services:
            service._gone = True
        await soon(lambda: any("max_evictions_per_hour = 1 is used up" in text for text in cluster.troubles()))
        assert api.seen["create pods/eviction"] == 1


async def test_an_eviction_that_a_budget_of_the_cluster_forbids_is_tried_again(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    names = {"name": "rollout", "namespace": NAMESPACE}
    spec = {"selector": {"matchLabels": {"app.kubernetes.io/component": "rollout"}}}
    head = {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": names}
    api.put({**head, "spec": spec, "status": {"disruptionsAllowed": 0}})
    async with kept(api, start, environment, max_evictions_per_hour=1) as (_, cluster, services, _):
        services.rollout_services[1]._gone = True
        await soon(lambda: any("a PodDisruptionBudget forbids it now" in text for text in cluster.troubles()))
        api.delete("PodDisruptionBudget", "rollout", NAMESPACE)
        await soon(lambda: "deletionTimestamp" in api.get("Pod", "rollout-1", NAMESPACE)["metadata"])


@pytest.mark.parametrize(
    "unready", [pod("rollout-1", ready=False), worker("rollout-1-1", ready=False)], ids=["its pod", "its worker"]
)
async def test_a_serving_replica_that_is_not_ready_for_long_loses_its_work(
    unready: dict[str, Any], api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    async with kept(api, start, environment) as (fleet, _, _, found):
        api.put(unready)
        await soon(lambda: fleet.serving() == found[:1])
        assert await fleet.look() == found  # it may be seeded again
        assert api.seen["create pods/eviction"] == 0


async def test_an_api_that_is_away_takes_no_work_from_a_replica_by_what_was_known_last(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    """Its pod was not seen ready yet, and would be unready for as long as the API is away."""
    async with kept(api, start, environment, unready_after_s=1.0) as (fleet, cluster, _, found):
        api.put(pod("rollout-1", ready=False))
        await soon(lambda: not all(each.ready for each in cluster.pods.pods))
        api.refuse("list pods", "watch pods")
        api.store.expire()
        await soon(lambda: not cluster.pods.is_current)
        with pytest.raises(AssertionError):
            await asyncio.to_thread(until, lambda: fleet.serving() != found, 2.5)


async def test_a_set_that_makes_too_few_pods_is_told_while_it_does(
    api: FakeCluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quota is used up: the run would work with fewer replicas, and expect no more."""
    monkeypatch.setattr(size, "LOOK_S", 0.02)
    api.put(set_by("kubectl", 3))
    for name in ("rollout-0", "rollout-1"):
        api.put(pod(name))
    cluster = await start()
    await soon(lambda: cluster.troubles() != [])
    assert cluster.troubles() == [
        "statefulset/rollout has 2 of 3 pods: its events say why (a quota, a policy of the namespace, no controller)"
    ]
    api.put(pod("rollout-2", ready=False, phase="Pending"))
    await soon(lambda: cluster.troubles() == [])


async def test_a_trainer_that_is_lost_while_the_api_is_away_is_waited_for_where_it_announces_itself(
    api: FakeCluster, start: Start
) -> None:
    """Its kubelet starts it again, without the API; a Job could make no other coordinator."""
    api.put(pod("trainer-0", component="trainer"))
    cluster = await start(unready_after_s=600.0)
    answers = [False]

    async def asked() -> bool:
        return answers[0]

    guard, error = TrainerGuard(cluster, asked), Unavailable("trainer: gone")
    api.put(pod("trainer-0", component="trainer", ready=False))
    await soon(lambda: cluster.trainer_outlook()[0] is PodOutlook.COMING)
    api.refuse("list pods", "watch pods")
    api.store.expire()
    await soon(lambda: not cluster.pods.is_current)
    await asyncio.wait_for(guard.wait_for_return(error), DEADLINE_S)
    answers[0] = True
    with pytest.raises(Unavailable, match="trainer: gone"):  # it was not lost
        await asyncio.wait_for(guard.wait_for_return(error), DEADLINE_S)
    await asyncio.wait_for(guard.wait_for_return(WrongVersion("it was restarted from a checkpoint")), DEADLINE_S)


async def test_troubles_of_pods_are_told_while_they_last(api: FakeCluster, start: Start) -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}
    api.put(pod("rollout-0", ready=False, phase="Pending", conditions=[unschedulable]))
    events = EventLog()
    cluster = await start(events)
    assert cluster.troubles() == ["pod rollout-0: unschedulable: 0/3 nodes: insufficient nvidia.com/gpu"]
    cluster.look()
    api.put(pod("rollout-0"))
    await soon(lambda: cluster.troubles() == [])
    assert len(events._newer(0)) == 1


@pytest.mark.parametrize("kind", ["pods", "engines of two pods"])
async def test_pods_of_a_lost_node_are_told_and_expected_until_it_answers(
    kind: str, api: FakeCluster, start: Start
) -> None:
    api.node("gpu-0", 8)
    api.node("gpu-1", 8)
    lost = ["rollout-1", "trainer-0"]
    api.put(pod("rollout-0", node="gpu-1"))
    api.put(pod("trainer-0", component="trainer", node="gpu-0"))
    if kind == "pods":
        api.put(pod("rollout-1", node="gpu-0"))
    else:
        api.put(pod("rollout-1", node="gpu-1"))
        api.put(worker("rollout-1-1", node="gpu-0"))
        lost[0] = "rollout-1-1"
    events = EventLog()
    cluster = await start(events)
    assert (cluster.troubles(), cluster.num_replicas()) == ([], 2)
    api.lose_node("gpu-0")
    await soon(lambda: sum(each.leaving for each in cluster.pods.pods) == 2)
    assert (cluster.troubles(), cluster.num_replicas()) == ([], 1)  # in their grace period
    api.lose_node("gpu-0", ago_s=300.0)
    await soon(lambda: len(cluster.troubles()) == 2)
    for name, told in zip(lost, cluster.troubles(), strict=True):
        assert told.startswith(f"pod {name}: should have left by ")
        assert "its node gpu-0 does not answer" in told
    assert cluster.num_replicas() == 2
    assert "gpu-0 does not answer" in cluster.trainer_outlook()[1]
    warnings = [event.message for event in events._newer(0) if event.kind is EventKind.WARNING]
    cluster.look()
    assert len(warnings) == len([event for event in events._newer(0) if event.kind is EventKind.WARNING]) == 2
    for name in lost:
        api.delete("Pod", name, NAMESPACE)
    await soon(lambda: cluster.troubles() == [])


# ---- waiting for the trainer ----


async def arrival(kube_config: RunConfig, environment: ServiceEnvironment, cluster: Cluster) -> ServiceRecord:
    registry = Registry(environment.redis_url, environment.run_id)
    try:
        return await wait_for_enough(
            kube_config, registry, ClusterOutlook(kube_config, cluster), lambda: kube_config.rollout.replicas
        )
    finally:
        registry.close()


async def test_a_dead_trainer_ends_the_wait_at_once_with_what_its_pod_says(
    api: FakeCluster, start: Start, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    statuses = waiting_status("ErrImagePull", "reading manifest v9 in r/tandem: manifest unknown")
    api.put(pod("trainer-0", component="trainer", ready=False, containerStatuses=statuses))
    cluster = await start()
    config = with_settings(kube_config, run={"startup_timeout_s": 600.0})
    with pytest.raises(TrainerDead, match=r"trainer-0: .*: ErrImagePull: .* manifest unknown"):
        await asyncio.wait_for(arrival(config, environment, cluster), DEADLINE_S)


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        ("ImagePullBackOff", "429 Too Many Requests"),
        ("CreateContainerConfigError", "failed to sync configmap cache"),
        ("CreateContainerError", "context deadline exceeded"),
        ("RunContainerError", "nvml error: driver not loaded"),
    ],
)
async def test_a_trainer_whose_container_may_still_start_is_waited_for_and_told(
    reason: str,
    message: str,
    api: FakeCluster,
    start: Start,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
) -> None:
    statuses = waiting_status(reason, message)
    api.put(pod("trainer-0", component="trainer", ready=False, containerStatuses=statuses))
    cluster = await start(reschedule_timeout_s=2.0)
    config = with_settings(kube_config, fleet={"reschedule_timeout_s": 2.0})
    waiting = asyncio.create_task(arrival(config, environment, cluster))
    await asyncio.wait({waiting}, timeout=3 * config.run.startup_timeout_s)
    assert not waiting.done()
    told = f"pod trainer-0: container main: {reason}: {message}; waited for, fleet.reschedule_timeout_s = 2 s"
    assert cluster.troubles() == [told]
    with pytest.raises(DeadlineExceeded, match=rf"waited 2 s for the trainer .*{reason}: {message}"):
        await asyncio.wait_for(waiting, DEADLINE_S)
    api.put(pod("trainer-0", component="trainer"))
    await soon(lambda: cluster.troubles() == [])
    guard = TrainerGuard(cluster, lambda: asyncio.sleep(0, result=False))
    api.put(pod("trainer-0", component="trainer", ready=False, containerStatuses=statuses))
    await soon(lambda: cluster.trainer_outlook()[0] is PodOutlook.COMING)
    returns = asyncio.create_task(guard.wait_for_return(Unavailable("trainer: gone")))
    await soon(lambda: any(reason in text for text in cluster.troubles()))
    api.put(pod("trainer-0", component="trainer"))
    await asyncio.wait_for(returns, DEADLINE_S)


async def test_a_trainer_that_is_rescheduled_is_waited_for_longer(
    api: FakeCluster, start: Start, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    api.put(pod("trainer-0", component="trainer", ready=False, phase="Pending"))
    cluster = await start()
    waiting = asyncio.create_task(arrival(kube_config, environment, cluster))
    await asyncio.wait({waiting}, timeout=4 * kube_config.run.startup_timeout_s)
    assert not waiting.done()  # startup_timeout_s is over
    async with fake_fleet() as fleet, AsyncExitStack() as stack:
        for name in ("trainer", "rollout-0"):  # a trainer that comes late does not end the wait for its replicas
            there = announced_service(environment.redis_url, environment.run_id, name, fleet.addresses[name], [], TTL_S)
            await stack.enter_async_context(there)
            await asyncio.wait({waiting}, timeout=0.5 if name == "trainer" else DEADLINE_S)
            assert waiting.done() == (name == "rollout-0")
        assert (await waiting).name == "trainer"


async def test_replicas_whose_pods_are_up_and_that_say_nothing_are_missing(
    api: FakeCluster, start: Start, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(kube_config, rollout={"replicas": 4, "min_replicas": 3})
    for name in ("rollout-2", "rollout-3"):
        api.put(pod(name))
    cluster = await start()
    async with announced(environment):  # trainer, rollout-0, rollout-1
        with pytest.raises(DeadlineExceeded, match=r"waited 0.3 s for the trainer and 3 replicas"):
            await asyncio.wait_for(arrival(config, environment, cluster), DEADLINE_S)


async def test_replicas_that_are_on_their_way_are_waited_for_and_those_that_no_node_takes_are_not(
    api: FakeCluster, start: Start, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(kube_config, rollout={"replicas": 4}, run={"startup_timeout_s": 600.0})
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "insufficient nvidia.com/gpu"}
    for name in ("rollout-0", "rollout-1"):
        api.put(pod(name))
    api.put(pod("rollout-2", ready=False, phase="Pending"))
    api.put(worker("rollout-2-1", ready=False, phase="Pending", conditions=[unschedulable]))
    api.put(pod("rollout-3", ready=False, phase="Pending"))
    cluster = await start()
    async with announced(environment):  # trainer, rollout-0, rollout-1
        waiting = asyncio.create_task(arrival(config, environment, cluster))
        await asyncio.wait({waiting}, timeout=1.0)
        assert not waiting.done()
        api.put(pod("rollout-3", ready=False, phase="Pending", conditions=[unschedulable]))
        assert (await asyncio.wait_for(waiting, DEADLINE_S)).name == "trainer"


async def test_after_the_time_to_start_enough_replicas_are_enough(
    api: FakeCluster, start: Start, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(kube_config, rollout={"replicas": 3, "min_replicas": 2})
    api.put(pod("rollout-2", ready=False, phase="Pending"))
    cluster = await start()
    async with announced(environment):
        assert (await asyncio.wait_for(arrival(config, environment, cluster), DEADLINE_S)).name == "trainer"


async def test_a_trainer_whose_pods_are_up_and_that_says_nothing_is_missing(
    api: FakeCluster, start: Start, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    api.put(pod("trainer-0", component="trainer"))
    cluster = await start()
    with pytest.raises(DeadlineExceeded, match=r"waited 0.3 s for the trainer and 1 replicas .*; announced: none"):
        await asyncio.wait_for(arrival(kube_config, environment, cluster), DEADLINE_S)


# ---- queues ----


async def test_a_queue_is_waited_out_and_told_once_and_the_time_to_start_begins_behind_it(
    api: FakeCluster, start: Start, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    for name, component in (("trainer-0", "trainer"), ("rollout-0", "rollout"), ("rollout-1", "rollout")):
        api.put(gated(name, component))
    events = EventLog()
    cluster = await start(events, reschedule_timeout_s=0.3)
    waiting = asyncio.create_task(arrival(kube_config, environment, cluster))
    await asyncio.wait({waiting}, timeout=4 * kube_config.run.startup_timeout_s)
    assert not waiting.done()
    (trouble,) = cluster.troubles()
    gate = "held by the scheduling gate kueue.x-k8s.io/admission"
    assert trouble == f"pods of rollout and trainer are queued: {gate}: the run waits as long as they are queued"
    assert len(events._newer(0)) == 1
    for name, component in (("trainer-0", "trainer"), ("rollout-0", "rollout"), ("rollout-1", "rollout")):
        api.put(pod(name, component=component))
    await soon(lambda: cluster.troubles() == [])
    with pytest.raises(DeadlineExceeded, match=r"for the trainer and 1 replicas .*; announced: none"):
        await asyncio.wait_for(waiting, DEADLINE_S)


async def test_a_job_set_that_is_suspended_is_queued(
    api: FakeCluster,
    start: Start,
    kube_config: RunConfig,
    environment: ServiceEnvironment,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kueue suspends it: there are no pods that a gate could hold."""
    monkeypatch.setattr(cluster_module, "SET_INTERVAL_S", 0.05)
    api.put(job_set(suspend=True))
    config = with_settings(kube_config, fleet={"reschedule_timeout_s": 0.3})
    cluster = await start(reschedule_timeout_s=0.3, trainer_set_kind="JobSet")
    waiting = asyncio.create_task(arrival(config, environment, cluster))
    await asyncio.wait({waiting}, timeout=4 * kube_config.run.startup_timeout_s)
    assert not waiting.done()
    assert cluster.troubles() == ["jobset/trainer is suspended: the run waits as long as it is queued"]
    api.put(job_set())
    with pytest.raises(DeadlineExceeded, match=r"for the trainer and 1 replicas .*; announced: none; no pod yet"):
        await asyncio.wait_for(waiting, DEADLINE_S)


async def test_replicas_that_are_not_needed_to_begin_are_not_waited_for_in_their_queue(
    api: FakeCluster, start: Start, kube_config: RunConfig, environment: ServiceEnvironment
) -> None:
    config = with_settings(kube_config, rollout={"replicas": 3, "min_replicas": 2}, run={"startup_timeout_s": 600.0})
    api.put(gated("rollout-2", "rollout"))
    cluster = await start()
    async with announced(environment):
        assert (await asyncio.wait_for(arrival(config, environment, cluster), DEADLINE_S)).name == "trainer"


async def test_a_lost_trainer_that_is_queued_is_waited_for(api: FakeCluster, start: Start) -> None:
    """Preempted: the queue has it again."""
    api.put(pod("trainer-0", component="trainer"))
    cluster = await start(reschedule_timeout_s=0.3)
    guard = TrainerGuard(cluster, lambda: asyncio.sleep(0, result=False))
    api.put(gated("trainer-0"))
    await soon(lambda: cluster.trainer_outlook()[0] is PodOutlook.QUEUED)
    waiting = asyncio.create_task(guard.wait_for_return(Unavailable("trainer: gone")))
    await asyncio.wait({waiting}, timeout=1.5)
    assert not waiting.done()
    api.put(pod("trainer-0", component="trainer"))
    await asyncio.wait_for(waiting, DEADLINE_S)


async def test_a_trainer_pod_that_its_job_replaces_is_waited_for_until_the_time_to_reschedule_is_over(
    api: FakeCluster, start: Start
) -> None:
    api.put(pod("trainer-0", component="trainer"))
    cluster = await start(reschedule_timeout_s=1.0)
    guard = TrainerGuard(cluster, lambda: asyncio.sleep(0, result=False))
    failed = pod("trainer-0", component="trainer", ready=False, phase="Failed")
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "trainer-hosts-0", "uid": "j", "controller": True}
    failed["metadata"]["ownerReferences"] = [owner]
    api.put(failed)
    await soon(lambda: cluster.trainer_outlook()[0] is not PodOutlook.UP)
    returns = asyncio.create_task(guard.wait_for_return(Unavailable("trainer: gone")))
    await asyncio.wait({returns}, timeout=0.5)
    api.delete("Pod", "trainer-0", NAMESPACE)
    api.put(pod("trainer-0", component="trainer"))
    await asyncio.wait_for(returns, DEADLINE_S)
    api.put(failed)
    await soon(lambda: cluster.trainer_outlook()[0] is not PodOutlook.UP)
    with pytest.raises(DeadlineExceeded, match=r"waited 1 s for the trainer: .*Job trainer-hosts-0 may replace it"):
        await asyncio.wait_for(guard.wait_for_return(Unavailable("trainer: gone")), DEADLINE_S)


# ---- room for the trainer ----


@pytest.mark.parametrize("kind", SETS)
async def test_rollouts_make_room_for_the_trainer_and_come_back(
    kind: str, api: FakeCluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "AFTER_S", 0.1)
    monkeypatch.setattr(placement, "INTERVAL_S", 0.02)
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "3 Insufficient cpu."}
    api.put(SETS[kind](2))
    api.put(placed("rollout-0"))
    api.put(pod("trainer-0", component="trainer", ready=False, phase="Pending", conditions=[full]))
    first = await start(rollout_set_kind=kind)
    await soon(lambda: api.get(kind, "rollout", NAMESPACE)["spec"]["replicas"] == 0)
    api.delete("Pod", "rollout-0", NAMESPACE)
    await soon(first.has_queued_replicas)  # so that nobody's patience with them ends
    await soon(lambda: any("is scaled from 2 to 0" in trouble for trouble in first.troubles()))
    first.close()
    # Another coordinator, which sets the size at its start (fleet.scale), but not while the trainer has no node.
    second = await start(rollout_set_kind=kind, scale=True)
    assert api.get(kind, "rollout", NAMESPACE)["spec"]["replicas"] == 0
    await soon(lambda: any("is scaled from 2 to 0" in trouble for trouble in second.troubles()))
    api.put(placed("trainer-0", component="trainer"))
    await soon(lambda: api.get(kind, "rollout", NAMESPACE)["spec"]["replicas"] == 2)
    await soon(lambda: not second.has_queued_replicas())
    await soon(lambda: second.troubles() == [])
    (event,) = [each for each in api.list_of("Event") if each["reason"] == "TandemMadeRoom"]
    assert event["involvedObject"]["kind"] == kind


async def test_a_note_of_a_set_that_was_applied_since_does_not_keep_fleet_scale_from_its_size(
    api: FakeCluster, start: Start, environment: ServiceEnvironment
) -> None:
    (environment.run_dir / PLACEMENT_FILE).write_text('{"replicas": 5}')
    api.put(rollout_set(5))
    await start(scale=True)
    assert api.get("StatefulSet", "rollout", NAMESPACE)["spec"]["replicas"] == 2


async def test_warnings_of_it_reach_watchers_and_its_own_failure_is_a_trouble(
    api: FakeCluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events are the loop's: one that a thread appends wakes no watcher."""
    loops, note = set(), Troubles.note

    def noted(self: Troubles, about: str, text: str) -> None:
        if about == "placement":
            loops.add(asyncio._get_running_loop() is not None)
        note(self, about, text)

    monkeypatch.setattr(Troubles, "note", noted)
    monkeypatch.setattr(placement, "INTERVAL_S", 0.02)
    cluster = await start()
    await soon(lambda: loops == {True})
    mistakes: dict[str, None] = {}
    monkeypatch.setattr(placement.RoomForTrainer, "look", lambda self: mistakes["a mistake"])
    await soon(lambda: any("no room is made any more: 'a mistake'" in text for text in cluster.troubles()))
    assert loops == {True}


async def test_rollouts_that_may_not_be_taken_away_are_a_trouble(
    api: FakeCluster, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "AFTER_S", 0.0)
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "3 Insufficient cpu."}
    api.put(rollout_set(2))
    api.put(placed("rollout-0"))
    api.put(pod("trainer-0", component="trainer", ready=False, phase="Pending", conditions=[full]))
    api.refuse("patch statefulsets/scale rollout")
    cluster = await start(scale=False, release_after_s=None)
    await soon(lambda: any("keeps what the trainer may wait for" in trouble for trouble in cluster.troubles()))


def placed(name: str, component: str = "rollout") -> dict[str, Any]:
    """A pod on a node."""
    obj = pod(name, component=component)
    obj["spec"]["nodeName"] = "gpu-0"
    return obj
