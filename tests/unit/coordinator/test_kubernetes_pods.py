"""What pods' states mean, and when a replica is stuck: no API, no clock."""

import dataclasses
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from coordinator.fleet.kubernetes.api.client import KubeApi
from coordinator.fleet.kubernetes.api.errors import Expired, Throttled, translate
from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import Pod, PodOutlook, read_pod, seen_at, selector
from coordinator.fleet.kubernetes.api.watch import Crashes
from coordinator.fleet.kubernetes.cluster import Cluster
from coordinator.fleet.kubernetes.keeper import StuckDetector
from coordinator.fleet.kubernetes.pod_states import engines, trainer_outlook
from coordinator.fleet.kubernetes.troubles import Troubles
from coordinator.fleet.view import FleetView
from coordinator.watch.events import EventLog
from servicekit.errors import Aborted, ConfigError, Fenced, InvalidRequest, NotReady, PermissionDenied, Unavailable
from servicekit.lifecycle.budget import HourlyBudget
from tandem_config.schema import RunConfig


def pod_of(status: dict[str, Any], **metadata: Any) -> Pod:
    """As the client reads it from the API's JSON."""
    labels = {"app.kubernetes.io/component": "trainer"}
    spec = metadata.pop("spec", {"containers": []})
    raw = {"metadata": {"name": "trainer-0", "uid": "u", "labels": labels, **metadata}, "spec": spec, "status": status}
    return read_pod(client.ApiClient().deserialize(json.dumps(raw), "V1Pod", "application/json"))


def container(state: dict[str, Any], *, restarts: int = 0, last: dict[str, Any] | None = None) -> dict[str, Any]:
    status = {"name": "trainer", "image": "i", "imageID": "", "ready": False, "restartCount": restarts, "state": state}
    return {"phase": "Running", "containerStatuses": [{**status, "lastState": last or {}}]}


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return container({"waiting": {"reason": reason, "message": message}}, **more)


def owner(kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": kind, "name": name, "uid": f"of {name}", "controller": True}


READY = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no gpu"}
OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
FAILED_CONTAINER = {
    "containerStatuses": container({"terminated": {"exitCode": 1, "reason": "Error"}})["containerStatuses"]
}


@pytest.mark.parametrize(
    ("status", "metadata", "outlook", "trouble"),
    [
        (READY, {}, PodOutlook.UP, ""),
        (READY, {"deletionTimestamp": "2026-11-20T14:00:00Z"}, PodOutlook.COMING, ""),
        ({"phase": "Pending"}, {}, PodOutlook.COMING, ""),
        (
            {"phase": "Pending", "conditions": [UNSCHEDULABLE]},
            {},
            PodOutlook.COMING,
            "unschedulable: 0/3 nodes: no gpu",
        ),
        (waiting("ContainerCreating"), {}, PodOutlook.COMING, ""),
        (waiting("ErrImagePull", "no such tag"), {}, PodOutlook.COMING, "container trainer: ErrImagePull: no such tag"),
        (
            waiting("CrashLoopBackOff", restarts=1, last=OOM),
            {},
            PodOutlook.COMING,
            "container trainer: CrashLoopBackOff: OOMKilled (exit code 137), 1 restarts",
        ),
        (
            waiting("CrashLoopBackOff", restarts=7, last=OOM),
            {},
            PodOutlook.COMING,  # crashes.py says how many of them were in a row
            "container trainer: CrashLoopBackOff: OOMKilled (exit code 137), 7 restarts",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "node was low on memory"},
            {},
            PodOutlook.DEAD,
            "ended (Evicted: node was low on memory)",
        ),
        ({"phase": "Failed"}, {}, PodOutlook.DEAD, "ended (failed)"),
        ({"phase": "Succeeded"}, {}, PodOutlook.DEAD, "ended (succeeded)"),
        (
            {"phase": "Failed", **FAILED_CONTAINER},
            {"ownerReferences": [owner("Job", "trainer-hosts-0")]},
            PodOutlook.COMING,
            "ended (Error (exit code 1)), Job trainer-hosts-0 may replace it",
        ),
        (
            {"phase": "Failed"},
            {"ownerReferences": [owner("StatefulSet", "trainer")]},
            PodOutlook.COMING,
            "ended (failed), StatefulSet trainer may replace it",
        ),
        (
            {"phase": "Pending", "conditions": [{**UNSCHEDULABLE, "reason": "SchedulingGated"}]},
            {},
            PodOutlook.QUEUED,
            "queued: held by the scheduling gate (unnamed)",
        ),
    ],
)
def test_a_pods_outlook_is_that_of_its_state(
    status: dict[str, Any], metadata: dict[str, Any], outlook: PodOutlook, trouble: str
) -> None:
    pod = pod_of(status, **metadata)
    assert (pod.outlook, pod.trouble) == (outlook, trouble)
    assert pod.leaving == ("deletionTimestamp" in metadata)
    assert pod.ready == (outlook is PodOutlook.UP)


PULL = 'rpc error: code = {} desc = failed to pull and unpack image "r/tandem:v9": '
RESOLVE = PULL + 'failed to resolve reference "r/tandem:v9": '
AGAIN = 'Back-off pulling image "r/tandem:v9": ErrImagePull: '
# What the kubelet and the runtimes (containerd, CRI-O, Docker) say, word for word but for names.
NO_DRIVER = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: "
    "unable to start container process: error during container init: error running prestart hook #0: exit status 1, "
    "stdout: , stderr: Auto-detected mode as 'legacy'\nnvidia-container-cli: initialization error: nvml error: driver "
    "not loaded: unknown"
)
HEALS = [
    ("ImagePullBackOff", 'Back-off pulling image "r/tandem:v9"'),  # before Kubernetes 1.32
    ("ErrImagePull", RESOLVE.format("Unknown") + "unexpected status from HEAD request to r: 429 Too Many Requests"),
    (
        "ImagePullBackOff",
        f"{AGAIN}toomanyrequests: You have reached your unauthenticated pull rate limit.",
    ),
    ("ErrImagePull", RESOLVE.format("Unavailable") + "failed to do request: Head r: dial tcp: lookup r: i/o timeout"),
    ("ErrImagePull", RESOLVE.format("Unknown") + "failed to do request: Head r: dial tcp: lookup r: no such host"),
    ("ImagePullBackOff", AGAIN + RESOLVE.format("Unknown") + "unexpected status: 503 Service Unavailable"),
    (
        "ErrImagePull",
        RESOLVE.format("Unknown")
        + "failed to authorize: failed to fetch oauth token: unexpected status: 401 Unauthorized",
    ),
    (
        "ErrImagePull",
        RESOLVE.format("Unknown") + "failed to authorize: failed to fetch anonymous token: 404 Not Found",
    ),
    (
        "ErrImagePull",
        RESOLVE.format("Unknown") + "pull access denied, repository does not exist or may require authorization: "
        "server message: insufficient_scope: authorization failed",
    ),
    ("ErrImagePull", RESOLVE.format("Unknown") + "unexpected status from HEAD request to r: 403 Forbidden"),
    ("ErrImagePull", "initializing source docker://r/tandem:v9: pinging container registry r: EOF"),
    ("ErrImagePull", "reading manifest v9 in r/tandem: unauthorized: authentication required"),
    (
        "ErrImagePull",
        "(Mirrors also failed: [m/tandem:v9: pinging container registry m: i/o timeout]): r/tandem:v9: reading "
        "manifest v9 in r/tandem: manifest unknown",
    ),
    (
        "ErrImagePull",
        PULL.format("NotFound")
        + "failed to copy: httpReadSeeker: failed open: content at r/v2/blobs/sha256:9f: not found",
    ),
    (
        "ErrImagePull",
        PULL.format("NotFound") + "failed to get reader from content store: content digest sha256:9f: not found",
    ),
    ("ErrImagePull", "Error response from daemon: Get r/v2/: net/http: TLS handshake timeout"),
    ("RegistryUnavailable", "the registry is unavailable"),
    ("SignatureValidationFailed", "the policy is not there yet"),
    ("ImageInspectError", "Failed to inspect image: rpc error: code = Unavailable"),
    ("CreateContainerError", "context deadline exceeded"),
    ("CreateContainerError", 'failed to reserve container name "trainer_0": name is reserved for "9f"'),
    ("CreateContainerConfigError", 'secret "redis-auth" not found'),
    ("CreateContainerConfigError", "couldn't find key password in Secret tandem/redis-auth"),
    ("CreateContainerConfigError", "failed to sync configmap cache: timed out waiting for the condition"),
    ("RunContainerError", NO_DRIVER),
    ("PostStartHookError", "exit code 1"),
    ("AReasonOfATimeToCome", "whatever it is"),
]
DOES_NOT = [
    ("InvalidImageName", 'Failed to apply default image tag "r/Tandem": couldn\'t parse image name: must be lowercase'),
    ("ErrImageNeverPull", 'Container image "r/tandem:v9" is not present with pull policy of Never'),
    ("ErrImagePull", RESOLVE.format("NotFound") + "r/tandem:v9: not found"),
    ("ImagePullBackOff", AGAIN + RESOLVE.format("NotFound") + "r/tandem:v9: not found"),
    ("ErrImagePull", PULL.format("NotFound") + "failed to resolve image: r/tandem:v9: not found"),
    ("ErrImagePull", PULL.format("NotFound") + "no match for platform in manifest: not found"),
    ("ErrImagePull", "initializing source docker://r/tandem:v9: reading manifest v9 in r/tandem: manifest unknown"),
    ("ErrImagePull", "reading manifest v9 in r/tandem: name unknown: repository name not known to registry"),
    ("ErrImagePull", 'choosing an image from manifest list r: no image found in image index for architecture "arm64"'),
    ("ErrImagePull", "Error response from daemon: manifest for r/tandem:v9 not found: manifest unknown"),
    (
        "ErrImagePull",
        "Error response from daemon: no matching manifest for linux/arm64/v8 in the manifest list entries",
    ),
]


@pytest.mark.parametrize("statuses", ["containerStatuses", "initContainerStatuses"])
@pytest.mark.parametrize(
    ("reason", "message", "outlook"),
    [(*each, PodOutlook.COMING) for each in HEALS] + [(*each, PodOutlook.DEAD) for each in DOES_NOT],
)
def test_only_what_another_manifest_alone_can_cure_is_death(
    statuses: str, reason: str, message: str, outlook: PodOutlook
) -> None:
    of_trainer = waiting(reason, message)["containerStatuses"]
    pod = pod_of({"phase": "Pending", statuses: of_trainer})
    assert (pod.outlook, pod.trouble) == (outlook, f"container trainer: {reason}: {' '.join(message.split())}")


def test_a_container_that_can_never_start_is_told_before_one_that_may() -> None:
    """A native sidecar is among the init containers, which come first."""
    init, main = (waiting(*each)["containerStatuses"] for each in (HEALS[1], DOES_NOT[0]))
    pod = pod_of({"phase": "Pending", "initContainerStatuses": init, "containerStatuses": main})
    assert pod.outlook is PodOutlook.DEAD
    assert "InvalidImageName" in pod.trouble


LEFT = datetime(2026, 11, 20, 14, 0, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
@pytest.mark.parametrize(("after_s", "is_lost"), [(-30.0, False), (59.0, False), (60.0, True), (86400.0, True)])
def test_a_pod_that_leaves_for_too_long_is_on_a_node_that_does_not_answer(
    kind: str, after_s: float, is_lost: bool
) -> None:
    """Its deletionTimestamp is the end of its grace period."""
    spec = {"containers": [], "nodeName": "gpu-3"}
    gone = pod_of(READY, spec=spec, deletionTimestamp="2026-11-20T14:00:00Z", ownerReferences=[owner(kind, "t")])
    pod = seen_at(gone, LEFT + after_s)
    assert (pod.leaving, pod.ready, pod.outlook) == (True, False, PodOutlook.COMING)
    told = "should have left by 2026-11-20T14:00:00Z and is still there: its node gpu-3 does not answer"
    assert pod.trouble.startswith(told) == is_lost
    assert bool(pod.trouble) == is_lost
    assert told in trainer_outlook([pod])[1] or not is_lost
    assert seen_at(pod_of(READY), LEFT + after_s).trouble == ""


REFUSED = ["UnexpectedAdmissionError", "OutOfpods", "OutOfnvidia.com/gpu", "NodeAffinity", "TopologyAffinityError"]


@pytest.mark.parametrize("reason", [*REFUSED, "Evicted", "NodeShutdown", "Terminated", "Preempting", "NodeLost"])
@pytest.mark.parametrize("kind", ["StatefulSet", "Job"])
def test_a_pod_that_its_node_refused_or_ended_comes_again_where_it_has_an_owner(kind: str, reason: str) -> None:
    status = {"phase": "Failed", "reason": reason, "message": "said the kubelet"}
    pod = pod_of(status, ownerReferences=[owner(kind, "trainer")])
    told = f"ended ({reason}: said the kubelet), {kind} trainer may replace it"
    assert (pod.outlook, pod.trouble) == (PodOutlook.COMING, told)
    assert pod_of(status).outlook is PodOutlook.DEAD


def test_a_pod_whose_containers_are_unknown_after_a_lost_node_is_told() -> None:
    ended = container({"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}})
    pod = pod_of({**ended, "phase": "Failed"}, ownerReferences=[owner("Job", "trainer-hosts-0")])
    assert pod.outlook is PodOutlook.COMING
    assert "ContainerStatusUnknown (exit code 137)" in pod.trouble


def test_a_scheduling_gate_is_a_queue_and_is_named() -> None:
    gated = pod_of(
        {"phase": "Pending"}, spec={"containers": [], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    )
    assert gated.outlook is PodOutlook.QUEUED
    assert gated.trouble == "queued: held by the scheduling gate kueue.x-k8s.io/admission"
    assert trainer_outlook([gated]) == (PodOutlook.QUEUED, f"trainer-0: {gated.trouble}")


def crashed(restarts: int, **last: Any) -> Pod:
    return pod_of(waiting("CrashLoopBackOff", restarts=restarts, last={"terminated": {"exitCode": 1, **last}}))


def ready(restarts: int) -> Pod:
    return pod_of({**container({"running": {}}, restarts=restarts), **READY})


LONG = {"startedAt": "2026-11-20T14:00:00Z", "finishedAt": "2026-11-20T14:10:00Z"}
# containerd's, which has no time of a start.
NEVER_BEGAN = {"reason": "StartError", "exitCode": 128, "startedAt": "1970-01-01T00:00:00Z"}
NEVER_BEGAN |= {"finishedAt": "2026-11-20T14:00:00Z", "message": "nvml error: driver not loaded"}
SHORT = {"startedAt": "2026-11-20T14:00:00Z", "finishedAt": "2026-11-20T14:00:20Z"}


@pytest.mark.parametrize(
    ("seen", "is_dead"),
    [
        ([crashed(3)], False),
        ([crashed(4)], True),  # since when is not known: all count
        ([crashed(9, **SHORT)], True),
        ([crashed(9, **LONG)], False),  # ten minutes of work before it: the first in a row
        ([crashed(9, **LONG), crashed(11, **SHORT)], False),
        ([crashed(9, **LONG), crashed(12, **SHORT)], True),
        ([ready(8), crashed(9, **SHORT)], False),  # eight in a month
        ([ready(8), crashed(11, **SHORT)], False),
        ([ready(8), crashed(12, **SHORT)], True),
        ([ready(8), crashed(11, **SHORT), ready(11), crashed(14, **SHORT)], False),
        ([crashed(9, **NEVER_BEGAN)], False),  # a node whose driver is not loaded yet
        ([crashed(9, **{**NEVER_BEGAN, **SHORT})], False),
        ([crashed(9, **{**SHORT, "reason": "ContainerCannotRun"})], False),
        ([crashed(9, **NEVER_BEGAN), crashed(11, **SHORT)], False),
        ([crashed(9, **NEVER_BEGAN), crashed(12, **SHORT)], True),
    ],
)
def test_crashes_count_in_a_row(seen: list[Pod], is_dead: bool) -> None:
    crashes = Crashes()
    last = [crashes.judge(pod) for pod in seen][-1]
    assert (last.outlook is PodOutlook.DEAD) == is_dead
    assert (" of them in a row" in last.trouble) == is_dead
    crashes.keep([])
    assert crashes.judge(crashed(4)).outlook is PodOutlook.DEAD  # another pod


def test_a_container_that_its_runtime_could_not_start_says_why() -> None:
    found = crashed(3, **NEVER_BEGAN).trouble
    assert found == (
        "container trainer: CrashLoopBackOff: StartError (exit code 128): nvml error: driver not loaded, 3 restarts"
    )


def test_a_pod_that_has_ended_does_not_count_beside_its_successor() -> None:
    """A Job keeps its failed pods, under other names."""
    of_the_job: dict[str, Any] = {"annotations": {"batch.kubernetes.io/job-completion-index": "0"}}
    of_the_job["ownerReferences"] = [owner("Job", "trainer-hosts-0")]
    old = pod_of({"phase": "Failed"}, **of_the_job)
    new = pod_of(READY, **{**of_the_job, "name": "trainer-hosts-0-0-x2", "uid": "v"})
    assert trainer_outlook([old]) == (
        PodOutlook.COMING,
        "trainer-0: ended (failed), Job trainer-hosts-0 may replace it",
    )
    assert trainer_outlook([old, new]) == (PodOutlook.UP, "")
    bare = pod_of({"phase": "Failed"})
    assert trainer_outlook([bare, pod_of(READY, name="trainer-1", uid="v")])[0] is PodOutlook.DEAD


def a_pod(name: str, outlook: PodOutlook, trouble: str = "", component: str = "trainer") -> Pod:
    ready = outlook is PodOutlook.UP
    return Pod(
        name=name,
        uid=name,
        component=component,
        leaving=False,
        ready=ready,
        restarts=0,
        outlook=outlook,
        trouble=trouble,
    )


@pytest.mark.parametrize(
    ("pods", "outlook", "told"),
    [
        ([], PodOutlook.COMING, "no pod yet: the events of its set say why"),
        (
            [a_pod("rollout-0", PodOutlook.DEAD, component="rollout")],
            PodOutlook.COMING,
            "no pod yet: the events of its set say why",
        ),
        ([a_pod("trainer-0", PodOutlook.UP), a_pod("trainer-1", PodOutlook.UP)], PodOutlook.UP, ""),
        (
            [a_pod("trainer-0", PodOutlook.UP), a_pod("trainer-1", PodOutlook.COMING)],
            PodOutlook.COMING,
            "trainer-1: not ready",
        ),
        (
            [a_pod("trainer-0", PodOutlook.COMING), a_pod("trainer-1", PodOutlook.DEAD, "wrong image")],
            PodOutlook.DEAD,
            "trainer-1: wrong image",
        ),
    ],
)
def test_the_trainers_outlook_is_that_of_its_worst_pod(pods: list[Pod], outlook: PodOutlook, told: str) -> None:
    assert trainer_outlook(pods) == (outlook, told)


def test_a_run_id_that_is_no_label_is_refused_by_name() -> None:
    assert selector("run-1").endswith(",tandem.run/id=run-1")
    for run_id in ("x" * 64, "run-"):
        with pytest.raises(ConfigError, match="TANDEM_RUN_ID"):
            selector(run_id)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([False] * 4, ["", "", "", "no answer in 30 s"]),
        ([True] * 5, [""] * 5),
        ([False, False, True, False, False, False], [""] * 6),
    ],
)
def test_a_replica_is_stuck_when_it_does_not_answer_for_long(answers: list[bool], expected: list[str]) -> None:
    detector = StuckDetector(stuck_after_s=30.0)
    assert [detector.observe("r", answer, 10.0 * i) for i, answer in enumerate(answers)] == expected


def test_another_incarnation_is_not_blamed_for_the_last_one() -> None:
    detector = StuckDetector(stuck_after_s=30.0)
    detector.observe("old", False, 0.0)
    assert detector.observe("new", False, 40.0) == ""
    detector.keep({"new"})
    assert detector.observe("old", False, 50.0) == ""


def test_the_budget_is_of_any_hour() -> None:
    budget = HourlyBudget(2)
    assert [budget.spend(at_s) for at_s in (0.0, 10.0, 20.0, 3599.0, 3600.0, 3605.0, 3610.0)] == [
        1,
        2,
        0,
        0,
        2,
        0,
        2,
    ]
    budget.give_back()
    assert budget.spend(3611.0)
    assert not HourlyBudget(0).spend(0.0)


def answer(status: int, body: str = "", **headers: str) -> ApiException:
    error = ApiException(status=status, reason="said so")
    error.body, error.headers = body, headers
    return error


BUDGET_BODY = '{"message": "no", "details": {"causes": [{"reason": "DisruptionBudget"}]}}'


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(401), PermissionDenied),
        (answer(403), PermissionDenied),
        (answer(404), NotReady),
        (answer(409), Aborted),
        (answer(410), Expired),
        (answer(422), InvalidRequest),
        (answer(429), Throttled),
        (answer(429, BUDGET_BODY), NotReady),
        (answer(503, "<html>not JSON"), Unavailable),
        (answer(0), Unavailable),
    ],
)
def test_errors_name_verb_and_resource(error: ApiException, kind: type[Exception]) -> None:
    found = translate(error, "create pods/eviction rollout-1 in namespace tandem")
    assert type(found) is kind
    assert str(found).startswith("Kubernetes API, create pods/eviction rollout-1 in namespace tandem")


@pytest.mark.parametrize(
    ("header", "seconds"), [({"Retry-After": "7"}, 7.0), ({}, 0.0), ({"Retry-After": "9999"}, 30.0)]
)
def test_throttling_says_how_long(header: dict[str, str], seconds: float) -> None:
    found = translate(answer(429, **header), "list pods")
    assert isinstance(found, Throttled)
    assert found.retry_after_s == seconds


def a_worker(name: str, outlook: PodOutlook, trouble: str = "", *, leaving: bool = False) -> Pod:
    return dataclasses.replace(
        a_pod(name, outlook, trouble, "rollout-worker"), leader=name.rpartition("-")[0], leaving=leaving, restarts=2
    )


LEADER = a_pod("rollout-0", PodOutlook.UP, component="rollout")


@pytest.mark.parametrize(
    ("workers", "leaving", "ready", "outlook", "trouble"),
    [
        ([], False, True, PodOutlook.UP, ""),
        ([a_worker("rollout-0-1", PodOutlook.UP)], False, True, PodOutlook.UP, ""),
        ([a_worker("rollout-0-1", PodOutlook.COMING)], False, False, PodOutlook.COMING, ""),
        (
            [a_worker("rollout-0-1", PodOutlook.UP), a_worker("rollout-0-2", PodOutlook.DEAD, "oom")],
            True,
            False,
            PodOutlook.DEAD,
            "oom",
        ),
        ([a_worker("rollout-0-1", PodOutlook.COMING, leaving=True)], True, False, PodOutlook.COMING, ""),
        ([a_worker("rollout-1-1", PodOutlook.DEAD, "of another engine")], False, True, PodOutlook.UP, ""),
    ],
)
def test_an_engine_is_as_its_worst_pod(
    workers: list[Pod], leaving: bool, ready: bool, outlook: PodOutlook, trouble: str
) -> None:
    (engine,) = engines([LEADER, *workers, a_pod("trainer-0", PodOutlook.DEAD)])
    assert (engine.name, engine.uid) == ("rollout-0", "rollout-0")
    assert (engine.leaving, engine.ready, engine.outlook) == (leaving, ready, outlook)
    assert engine.trouble == (f"rollout-0-2: {trouble}" if trouble else "")
    assert engine.restarts == sum(2 for pod in workers if pod.leader == "rollout-0")


def test_a_worker_knows_its_leader() -> None:
    assert pod_of(READY, annotations={"leaderworkerset.sigs.k8s.io/leader-name": "rollout-3"}).leader == "rollout-3"
    assert pod_of(READY).leader == ""


class _Pods:
    """The pods that a watch has seen."""

    def __init__(self, *pods: Pod) -> None:
        self.pods, self.is_current = pods, True


def test_replicas_that_should_be_there_are_those_with_pods_even_pending_ones(tmp_path: Path) -> None:
    leaving = dataclasses.replace(a_pod("rollout-2", PodOutlook.UP, component="rollout"), leaving=True)
    pods: Any = _Pods(
        LEADER, a_pod("rollout-1", PodOutlook.COMING, component="rollout"), leaving, a_pod("trainer-0", PodOutlook.UP)
    )
    config = RunConfig.model_validate({"model": {"path": str(tmp_path)}, "data": {"train": str(tmp_path / "t.jsonl")}})
    api = KubeApi(client.ApiClient(), "ml", timeout_s=1.0)
    view = FleetView(Cluster(config, api, pods, Troubles(EventLog()), tmp_path), lambda: 4)
    assert view.expected() == 2
    stuck = dataclasses.replace(leaving, trouble="its node does not answer")
    pods.pods = (*pods.pods, dataclasses.replace(stuck, name="rollout-3"))
    assert view.expected() == 3
    pods.is_current = False  # the API is unreachable
    assert view.expected() == 4
    assert FleetView(None, lambda: 4).expected() == 4


@pytest.mark.parametrize("change", ["evict", "scale", "delete"])
def test_a_replaced_coordinator_changes_nothing_in_the_cluster(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call would fail with another error: there is no server."""
    api = KubeApi(client.ApiClient(), "tandem", timeout_s=0.1)
    monkeypatch.setattr(api, "replicas_of", lambda _: (5, "1"))

    def check() -> None:
        raise Fenced("coordinator b has taken over the run")

    api.before_change = check
    rollouts = PodSet(kind="StatefulSet", name="rollout")
    given: dict[str, tuple[Any, ...]] = {
        "evict": (a_pod("rollout-0", PodOutlook.UP),),
        "scale": (rollouts, 0),
        "delete": (rollouts,),
    }
    with pytest.raises(Fenced, match="coordinator b"):
        getattr(api, change)(*given[change])
