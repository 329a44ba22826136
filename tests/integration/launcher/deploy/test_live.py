"""`tandem deploy status`, `logs`, `diff`, `delete`: a run that a real kubectl has created in a fake cluster."""

import json
import subprocess
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from launcher.deploy.running.diff import LAST_APPLIED
from launcher.deploy.running.kinds import KINDS
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc as pb_grpc
from tests.fakes.cluster.controllers import pods_of as pods_of_workload
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.cluster.kinds import CONTROLLERS
from tests.fakes.cluster.store import Object
from tests.integration.launcher.deploy.conftest import ANSWERS, Deploy, write_run
from tests.manifests.kustomize import build, component_of, kubectl, pod_template, workloads

pytestmark = pytest.mark.integration


def apply(folder: Path) -> None:
    """`kubectl apply -k`."""
    _kubectl("apply", "-k", str(folder))


def apply_file(file: Path) -> None:
    """`kubectl apply -f`."""
    _kubectl("apply", "-f", str(file))


def _kubectl(*arguments: str) -> None:
    command = [kubectl(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def pods_of(cluster: FakeCluster, folder: Path, **status: Any) -> dict[str, str]:
    """Let a pod of each workload run, as controllers would. Returns: its name by component."""
    names = {}
    for each in workloads(build(folder)):
        component = component_of(pod_template(each))
        names[component] = f"{each['metadata']['name']}-{'x7k2p' if component == 'coordinator' else 0}"
        cluster.pod_of(names[component], "team", pod_template(each), **status)
    return names


@pytest.fixture
def applied(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> Path:
    """The run `math`, applied."""
    done = deploy("new", "math", "-c", str(write_run(tmp_path)), *ANSWERS)
    assert done.code == 0, done.text
    apply(tmp_path / "math")
    return tmp_path / "math"


class Coordinator(pb_grpc.CoordinatorServiceServicer):
    """A coordinator in its second iteration."""

    def GetStatus(self, request: Any, context: Any) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(
            state=pb.RUN_STATE_RUNNING,
            iteration=2,
            total_iterations=3,
            policy_version=2,
            serving_replicas=["rollout-0"],
        )


@pytest.fixture
def coordinator() -> Iterator[tuple[str, int]]:
    """Address of a coordinator that only answers."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_CoordinatorServiceServicer_to_server(Coordinator(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield "127.0.0.1", port
    server.stop(None)


def test_every_object_of_an_overlay_has_a_kind_that_is_known_here(deploy: Deploy, tmp_path: Path) -> None:
    components = ["--component", "mtls", "--component", "monitoring", "--component", "autoscale-rollout"]
    done = deploy("new", "math", "-c", str(write_run(tmp_path)), *ANSWERS, *components)
    assert done.code == 0, done.text
    known = {(each.api_version, each.name) for each in KINDS}
    assert {(each["apiVersion"], each["kind"]) for each in build(tmp_path / "math")} <= known


def test_the_coordinator_answers_through_the_api_server(
    deploy: Deploy, cluster: FakeCluster, applied: Path, coordinator: tuple[str, int]
) -> None:
    names = pods_of(cluster, applied)
    cluster.ports[names["coordinator"], 50051] = coordinator
    done = deploy("status", "math")
    assert done.code == 0, done.text
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.text.splitlines() if len(line.split()) > 1}
    assert lines["run"] == "math in namespace team (context fake)"
    assert lines["state"] == "running"
    assert lines["iteration"] == "2 of 3"
    assert lines["serving"] == "rollout-0"
    assert lines["coordinator"] == names["coordinator"]
    assert lines["trainer"] == "0 of 2 ready"


def test_a_run_is_found_in_another_namespace(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    context = json.loads(Path("kubeconfig").read_text())
    context["contexts"][0]["context"]["namespace"] = "default"
    Path("kubeconfig").write_text(json.dumps(context))
    assert "math in namespace team" in deploy("status", "math").text
    done = deploy("status", "math", "-n", "default")
    assert done.code == 2
    assert "no run math in namespace default" in done.text
    assert "there are: math in team" in done.text


def test_a_coordinator_that_does_not_answer_is_said(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    pods_of(cluster, applied)  # whose ports nothing listens on
    done = deploy("status", "math")
    assert done.code == 0, done.text
    assert "does not answer" in done.text


def test_a_run_that_failed_says_why(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    (job,) = (each for (kind, _, _), each in cluster.objects.items() if kind == "Job")
    condition = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 2"}
    cluster.put({**job, "status": {"failed": 1, "conditions": [condition]}})
    message = "a line\nbad configuration: model.path=/models/none does not exist\n"
    ended = {"name": "coordinator", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    ended |= {"state": {"terminated": {"exitCode": 2, "reason": "Error", "message": message}}}
    names = pods_of(cluster, applied, phase="Failed", containerStatuses=[ended])
    for component in ("trainer", "rollout", "redis"):
        del cluster.objects["Pod", "team", names[component]]
    done = deploy("status", "math")
    assert "PodFailurePolicy: exit code 2" in done.text
    assert "bad configuration: model.path=/models/none does not exist" in done.text


def test_pods_in_trouble_are_named_with_their_reason(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    waiting = {"name": "trainer", "image": "x", "imageID": "", "ready": False, "restartCount": 3}
    waiting |= {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}}}
    names = pods_of(cluster, applied, phase="Pending", containerStatuses=[waiting])
    done = deploy("status", "math")
    assert f"pod {names['trainer']}: container trainer: ImagePullBackOff: Back-off pulling image" in done.text


def test_pods_of_a_node_that_does_not_answer_are_not_ready(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    """A set counts them still, and makes no others; the coordinator's Job neither."""
    ready = [{"type": "Ready", "status": "True"}]
    names = pods_of(cluster, applied, conditions=ready)
    for kind, namespace, name in [key for key in cluster.objects if key[0] == "StatefulSet"]:
        cluster.put({**cluster.get(kind, name, namespace), "status": {"readyReplicas": 1}})
    lines = deploy("status", "math").text.splitlines()
    assert [line.split() for line in lines if line.startswith("trainer")] == [["trainer", "1", "of", "2", "ready"]]
    cluster.node("gpu-0", 8)
    for name in names.values():
        pod = cluster.get("Pod", name, "team")
        cluster.put({**pod, "spec": {**pod["spec"], "nodeName": "gpu-0"}})
    cluster.lose_node("gpu-0", ago_s=600.0)
    done = deploy("status", "math")
    sizes = {line.split()[0]: line.split()[1] for line in done.text.splitlines() if line.endswith(" ready")}
    assert {sizes[name] for name in ("trainer", "rollout", "redis")} == {"0"}
    for name in names.values():
        assert f"pod {name}: should have left by " in done.text
    assert "its node gpu-0 does not answer" in done.text


def test_logs_of_all_pods_by_time(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    names = pods_of(cluster, applied)
    record = {"time": "2026-01-01T00:00:00.5Z", "level": "warning", "message": "lease lost", "slot": 3}
    cluster.logs[names["coordinator"]] = ["plain text", json.dumps({**record, "time": "2026-01-01T00:00:07Z"})]
    cluster.logs[names["trainer"]] = [json.dumps(record)]
    lines = deploy("logs", "math").text.splitlines()
    assert [names["trainer"] in line for line in lines if "lease lost" in line] == [True, False]
    assert all("slot=3" in line and "warning" in line for line in lines if "lease lost" in line)
    assert len(deploy("logs", "math", "trainer").text.splitlines()) == 1
    assert len(deploy("logs", "math", "--level", "warning").text.splitlines()) == 2
    assert "of judge" in deploy("logs", "math", "judge").text


def test_logs_are_followed_until_the_run_is_over(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    names = pods_of(cluster, applied)
    cluster.logs[names["coordinator"]] = ["first"]
    real = cluster.log

    def growing(name: str, query: dict[str, str]) -> str:
        text = real(name, query)
        if name == names["coordinator"] and len(cluster.logs[name]) < 4:
            cluster.logs[name].append(f"line {len(cluster.logs[name])}")
        elif name == names["coordinator"]:
            (job,) = (each for (kind, _, _), each in cluster.objects.items() if kind == "Job")
            cluster.put({**job, "status": {"conditions": [{"type": "Complete", "status": "True"}]}})
        return text

    cluster.log = growing  # type: ignore[method-assign]
    done = deploy("logs", "math", "coordinator", "--follow")
    assert [line.rsplit("  ", 1)[-1] for line in done.text.splitlines()] == ["first", "line 1", "line 2", "line 3"]


def test_nothing_differs_after_applying(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    for key, each in list(cluster.objects.items()):  # defaults of the server, status of controllers
        if key[0] == "StatefulSet":
            spec = {**each["spec"], "revisionHistoryLimit": 10}
            cluster.put({**each, "spec": spec, "status": {"replicas": 1}})
    done = deploy("diff", "math")
    assert done.code == 0, done.text
    assert f"0 new, 0 changed, {len(build(applied))} same" in done.text


def test_all_is_new_before(deploy: Deploy, tmp_path: Path) -> None:
    assert deploy("new", "math", "-c", str(write_run(tmp_path)), *ANSWERS).code == 0
    done = deploy("diff", "math")
    assert done.code == 0, done.text
    assert f"{len(build(tmp_path / 'math'))} new, 0 changed, 0 same" in done.text


def change(applied: Path, old: str, new: str, file: str = "run.yaml") -> list[Object]:
    """Change a file of an overlay. Returns: what it builds now."""
    text = (applied / file).read_text()
    assert old in text
    (applied / file).write_text(text.replace(old, new))
    build.cache_clear()
    return list(build(applied))


def test_a_changed_configuration_shows_what_cannot_change_in_place(
    deploy: Deploy, cluster: FakeCluster, applied: Path
) -> None:
    before = {(each["kind"], each["metadata"]["name"]) for each in build(applied)}
    built = change(applied, "iterations: 3", "iterations: 4")
    done = deploy("diff", "math")
    assert done.code == 0, done.text
    (job,) = (each["metadata"]["name"] for each in built if each["kind"] == "Job")
    assert f"! Job/{job}: cannot be changed in place (spec.template)" in done.text
    for name in ("trainer", "rollout"):
        assert f"! StatefulSet/math-{name}: its pods stay as they are until they are deleted (OnDelete)" in done.text
    assert "replaced one by one" not in done.text
    assert "kubectl delete --namespace team --cascade=foreground job/" in done.text
    renamed = {(each["kind"], each["metadata"]["name"]) for each in built} - before
    assert len(renamed) == 1  # the ConfigMap, by its digest
    for kind, name in renamed:
        assert f"new      {kind}/{name}" in done.text
    assert "no longer in the overlay" in done.text


def test_the_api_server_refuses_exactly_what_diff_says_it_does(
    deploy: Deploy, cluster: FakeCluster, applied: Path
) -> None:
    """Each changed object is put as it would be after applying; the warnings are compared with the answers."""
    from launcher.deploy.running.api import OperatorApi
    from launcher.deploy.running.diff import changes
    from launcher.deploy.running.kinds import kind_of
    from servicekit.errors import InvalidRequest

    change(applied, "iterations: 3", "iterations: 4")
    built = change(applied, "count: 3", "count: 5", "kustomization.yaml")
    stateful = next(
        each for each in built if each["kind"] == "StatefulSet" and component_of(pod_template(each)) == "redis"
    )
    stateful["spec"]["podManagementPolicy"] = "Parallel"
    api = OperatorApi()
    outcomes = {}
    for found in [each for each in changes(api, built) if each.what == "changed"]:
        body = next(each for each in built if (each["kind"], each["metadata"]["name"]) == (found.kind, found.name))
        kind = kind_of(body)
        assert kind is not None
        predicted = any("cannot be changed in place" in text for text in found.warnings)
        try:
            api.request("PUT", kind.path("team", found.name), "update", body=body)
            refused = False
        except InvalidRequest:
            refused = True
        outcomes[f"{found.kind} {component_of(pod_template(body))}"] = (predicted, refused)
    assert outcomes["Job coordinator"] == outcomes["StatefulSet redis"] == (True, True)
    assert outcomes["StatefulSet trainer"] == outcomes["StatefulSet rollout"] == (False, False)


def test_what_someone_changed_by_hand_is_a_difference(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    key = next(key for key in cluster.objects if key[0] == "StatefulSet" and key[2].endswith("rollout"))
    live = cluster.objects[key]
    live["spec"]["replicas"] = 7
    done = deploy("diff", "math")
    assert "-  replicas: 7" in done.text
    assert "+  replicas: 3" in done.text
    assert LAST_APPLIED in live["metadata"]["annotations"]  # as a real kubectl wrote it
    assert LAST_APPLIED not in done.text


def test_delete_removes_the_run_and_nothing_else(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    pods_of(cluster, applied)
    assert deploy("new", "other", "-c", "my.yaml", *ANSWERS, "--offline").code == 0
    others = build(applied.parent / "other")
    for each in others:
        if each["kind"] == "Job":
            cluster.put({**each, "metadata": {**each["metadata"], "name": "other-job"}})
    done = deploy("delete", "math", "--yes", "-n", "team")
    assert done.code == 0, done.text
    left = [
        (kind, name)
        for (kind, _, name), each in cluster.objects.items()
        if (each["metadata"].get("labels") or {}).get("tandem.run/id") == "math"
    ]
    assert {kind for kind, _ in left} <= {"PersistentVolumeClaim"}
    assert "kept: claim" in done.text
    assert cluster.names("Job") == ["other-job"]
    assert {"run", "models"} <= set(cluster.names("PersistentVolumeClaim"))
    assert cluster.names("Secret") == ["redis-auth"]
    assert cluster.names("Namespace") == ["default", "team"]
    assert deploy("delete", "math", "--yes", "--claims", "-n", "team").code == 0
    assert cluster.names("PersistentVolumeClaim") == ["models", "run"]
    assert deploy("delete", "math", "--yes", "-n", "team").code == 2


@pytest.fixture
def groups(deploy: Deploy, cluster: FakeCluster, tmp_path: Path) -> Path:
    """The run `math` as a JobSet and a LeaderWorkerSet, applied, beside such a run `other`; all pods ready."""
    cluster.installed |= set(CONTROLLERS)
    sections: Any = {
        "rollout": {"replicas": 2, "tensor_parallel": 16, "nodes": 2},
        "fleet": {"rollout_set_kind": "LeaderWorkerSet", "trainer_set_kind": "JobSet"},
    }
    config = str(write_run(tmp_path, **sections))
    components = ["--component", "lws-rollout", "--component", "jobset-trainer"]
    for run in ("math", "other"):
        done = deploy("new", run, "-c", config, *ANSWERS, *components)
        assert done.code == 0, done.text
        apply(tmp_path / run)
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        for each in workloads(build(tmp_path / run)):
            for pod in pods_of_workload(each):
                cluster.put({**pod, "status": ready})
    return tmp_path / "math"


def test_status_lists_groups_with_their_sizes_and_troubles(deploy: Deploy, cluster: FakeCluster, groups: Path) -> None:
    sizes = {"trainer": "2 of 2 ready", "rollout": "2 of 2 ready", "rollout-worker": "2 of 2 ready"}
    assert sizes.items() <= lines_of(deploy("status", "math").text).items()
    (trainer,) = [name for name in cluster.names("Pod") if name.startswith("math-trainer-hosts-0-1-")]
    cluster.delete("Pod", trainer, "team")
    worker = cluster.get("Pod", "math-rollout-1-1", "team")
    waiting = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "name": "rollout", "restartCount": 3}
    status = {"phase": "Running", "containerStatuses": [{**waiting, "image": "i", "imageID": "", "ready": False}]}
    cluster.put({**worker, "status": status})
    jobs = cluster.get("JobSet", "math-trainer", "team")
    failed = {"type": "Failed", "status": "True", "reason": "FailedJobs", "message": "20 restarts"}
    cluster.put({**jobs, "status": {"conditions": [failed]}})
    done = deploy("status", "math")
    lines = lines_of(done.text)
    assert lines["trainer"] == "1 of 2 ready, Failed since ? (FailedJobs: 20 restarts)"
    assert lines["rollout"] == "2 of 2 ready"
    assert lines["rollout-worker"] == "1 of 2 ready"
    assert "pod math-rollout-1-1: container rollout: CrashLoopBackOff" in done.text


def failed_create(cluster: FakeCluster, kind: str, name: str, message: str, last: str, reason: str = "") -> None:
    head = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{name}.{last}", "namespace": "team"}}
    about = {"kind": kind, "name": name, "namespace": "team"}
    event = {"reason": reason or "FailedCreate", "message": message, "lastTimestamp": f"2026-11-26T{last}Z"}
    cluster.put({**head, "involvedObject": about, **event})


def test_status_says_why_a_set_lacks_pods(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    pods_of(cluster, applied)
    lacking = "StatefulSet/math-trainer lacks pods: "
    assert lacking not in deploy("status", "math").text
    failed_create(cluster, "StatefulSet", "math-trainer", "exceeded quota: old", "09:00:00")
    failed_create(cluster, "StatefulSet", "math-trainer", "exceeded quota: gpus, limited: 8", "10:00:00")
    failed_create(cluster, "StatefulSet", "math-trainer", "create Pod math-trainer-0", "11:00:00", "SuccessfulCreate")
    failed_create(cluster, "StatefulSet", "other-trainer", "exceeded quota: theirs", "12:00:00")
    text = deploy("status", "math").text
    assert f"{lacking}exceeded quota: gpus, limited: 8 (FailedCreate, 2026-11-26T10:00:00Z)" in text
    assert "old" not in text
    assert "theirs" not in text
    cluster.refuse("list events")
    assert "events, which say why pods are missing" in deploy("status", "math").text


def test_status_says_why_what_a_group_makes_lacks_pods(deploy: Deploy, cluster: FakeCluster, groups: Path) -> None:
    for name in [name for name in cluster.names("Pod") if "rollout" in name or "trainer" in name]:
        cluster.delete("Pod", name, "team")
    failed_create(cluster, "StatefulSet", "math-rollout-1", "exceeded quota: workers", "10:00:00")
    failed_create(cluster, "Job", "math-trainer-hosts-0", "exceeded quota: hosts", "10:00:00")
    failed_create(cluster, "Job", "math-trainer-7-trainer-hosts-0", "exceeded quota: theirs", "10:00:00")
    text = deploy("status", "math").text
    assert "LeaderWorkerSet/math-rollout lacks pods: exceeded quota: workers" in text
    assert "JobSet/math-trainer lacks pods: exceeded quota: hosts" in text
    assert "theirs" not in text


def test_delete_takes_groups_their_policies_and_waits_for_their_pods(
    deploy: Deploy, cluster: FakeCluster, groups: Path
) -> None:
    others = {key for key, each in cluster.objects.items() if each["metadata"].get("labels", {}).get(RUN) == "other"}
    done = deploy("delete", "math", "--yes")
    assert done.code == 0, done.text
    left = {key for key, each in cluster.objects.items() if each["metadata"].get("labels", {}).get(RUN) == "math"}
    assert {kind for kind, _, _ in left} <= {"PersistentVolumeClaim"}
    assert not [key for key in cluster.objects if key[2].startswith("math-") and key not in left]
    for name in ("JobSet/math-trainer", "LeaderWorkerSet/math-rollout", "NetworkPolicy/math-rollout-worker"):
        assert f"{name} deleted" in done.text
    assert others <= set(cluster.objects)


def test_autoscalers_that_may_not_be_listed_hold_no_gpus(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    cluster.refuse("list horizontalpodautoscalers")
    assert "not read" not in deploy("status", "math").text
    done = deploy("delete", "math", "--yes")
    assert done.code == 0, done.text
    assert "not looked for: horizontalpodautoscalers" in done.text


def test_groups_that_may_not_be_listed_are_not_left_behind_silently(
    deploy: Deploy, cluster: FakeCluster, groups: Path
) -> None:
    cluster.refuse("list jobsets", "list secrets")
    assert "jobsets: " in lines_of(deploy("status", "math").text)["not read"]
    for name in [name for name in cluster.names("Pod") if name.startswith("math-trainer-")]:
        cluster.delete("Pod", name, "team")
    done = deploy("delete", "math", "--yes")
    assert done.code == 1, done.text
    assert "list jobsets" in done.text
    assert "not looked for: secrets" in done.text
    assert "math-trainer" in cluster.names("JobSet")


RUN = "tandem.run/id"


def lines_of(text: str) -> dict[str, str]:
    """What status prints, by name."""
    pairs = [line.strip().split("  ", 1) for line in text.splitlines()]
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def test_delete_asks_where_there_is_no_yes(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    before = dict(cluster.objects)
    done = deploy("delete", "math")
    assert done.code == 2
    assert "--yes" in done.text
    assert cluster.objects == before


def test_pods_that_do_not_end_are_named(deploy: Deploy, cluster: FakeCluster, applied: Path) -> None:
    names = pods_of(cluster, applied)
    pod = cluster.objects["Pod", "team", names["trainer"]]
    cluster.put({**pod, "metadata": {**pod["metadata"], "name": "stays"}})  # of no set that is deleted
    needed = {kind: cluster.names(kind) for kind in ("ConfigMap", "Service", "ServiceAccount")}
    done = deploy("delete", "math", "--yes", "--timeout-s", "1")
    assert done.code == 1
    assert "stays" in done.text
    assert cluster.names("StatefulSet") == []
    assert {kind: cluster.names(kind) for kind in needed} == needed  # pods that end may still want them


def test_without_a_cluster_the_context_is_named(
    deploy: Deploy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = json.loads(Path("kubeconfig").read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    Path("kubeconfig").write_text(json.dumps(config))
    done = deploy("status", "math")
    assert done.code == 1
    assert "http://127.0.0.1:1 (context fake)" in done.text
