"""The stand-in for a Kubernetes cluster refuses what an API server refuses, and what it does not know.

What it serves is used by the tests of the coordinator and of `tandem deploy`. What passes there has not run on
Kubernetes.
"""

import copy
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tests.contract.kube_objects import NAMESPACE, leader_worker_set, pod, role_rules, rollout_set
from tests.fakes.cluster.admission import violations
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.cluster.kinds import CONTROLLERS
from tests.fakes.cluster.merging import schema_of, server_side, strategic
from tests.fakes.cluster.pods import pod_errors
from tests.fakes.cluster.requests import COORDINATOR, OPERATOR, TOKENS
from tests.fakes.cluster.store import Refusal
from tests.house.repository import REPO
from tests.manifests.kustomize import DEPLOY, build, find, label, overlay, pod_template, workloads

TIMEOUT_S = 30
EVENT = {
    "metadata": {"name": "e", "namespace": NAMESPACE},
    "involvedObject": {"kind": "Pod", "name": "rollout-0"},
    "count": 1,
}


@pytest.fixture
def api() -> Iterator[FakeCluster]:
    with FakeCluster(NAMESPACE, custom=CONTROLLERS) as api:
        api.put(pod("rollout-0"))
        api.put(rollout_set(2))
        api.put(leader_worker_set(2))
        api.bind(role_rules())
        yield api


@pytest.fixture
def api_client(api: FakeCluster, tmp_path: Path) -> client.ApiClient:
    return config.new_client_from_config(
        str(api.write_kubeconfig(tmp_path / "kubeconfig", NAMESPACE, user=COORDINATOR))
    )


def status_of(call: Callable[..., Any], *arguments: Any, **options: Any) -> int:
    """HTTP status of the refusal of a call."""
    with pytest.raises(ApiException) as caught:
        call(*arguments, _request_timeout=TIMEOUT_S, **options)
    return int(caught.value.status)


def test_events_are_validated_and_made_once(api_client: client.ApiClient) -> None:
    core = client.CoreV1Api(api_client)
    assert status_of(core.create_namespaced_event, "nowhere", {**EVENT, "metadata": {"name": "e"}}) == 404
    assert status_of(core.create_namespaced_event, "nowhere", EVENT) == 400  # of another namespace
    core.create_namespaced_event(NAMESPACE, EVENT, _request_timeout=TIMEOUT_S)
    assert status_of(core.create_namespaced_event, NAMESPACE, EVENT) == 409
    assert status_of(core.patch_namespaced_event, "e", NAMESPACE, {"count": "many"}) == 422
    assert status_of(core.patch_namespaced_event, "another", NAMESPACE, {"count": 2}) == 404


@pytest.mark.parametrize("wanted", [("apps", "StatefulSet"), ("leaderworkerset.x-k8s.io", "LeaderWorkerSet")])
def test_a_size_is_not_changed_by_who_has_read_an_older_one(
    wanted: tuple[str, str], api: FakeCluster, api_client: client.ApiClient
) -> None:
    group, kind = wanted
    custom = client.CustomObjectsApi(api_client)
    where = (group, "v1", NAMESPACE, f"{kind.lower()}s", "rollout")
    scale = custom.get_namespaced_custom_object_scale(*where, _request_timeout=TIMEOUT_S)
    body = {"metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]}, "spec": {"replicas": 3}}
    custom.patch_namespaced_custom_object_scale(*where, body, _request_timeout=TIMEOUT_S)
    assert status_of(custom.patch_namespaced_custom_object_scale, *where, body) == 409
    assert api.get(kind, "rollout", NAMESPACE)["spec"]["replicas"] == 3


def test_the_successor_of_a_pod_is_not_evicted_in_its_place(api: FakeCluster, api_client: client.ApiClient) -> None:
    eviction = client.V1Eviction(
        metadata=client.V1ObjectMeta(name="rollout-0", namespace=NAMESPACE),
        delete_options=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="of another pod")),
    )
    core = client.CoreV1Api(api_client)
    assert status_of(core.create_namespaced_pod_eviction, "rollout-0", NAMESPACE, eviction) == 409
    assert "deletionTimestamp" not in api.get("Pod", "rollout-0", NAMESPACE)["metadata"]


NODE = "gpu-0"
OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
ANSWERS = {"conditions": [{"type": "Ready", "status": "True"}]}


@pytest.mark.parametrize("cure", ["taint", "delete the node", "force", "node answers"])
def test_pods_of_a_lost_node_stay_until_somebody_acts(cure: str, api: FakeCluster, tmp_path: Path) -> None:
    """As controllers of Kubernetes 1.36 did: deletion waits for the kubelet."""
    core = client.CoreV1Api(config.new_client_from_config(str(api.write_kubeconfig(tmp_path / "operator", NAMESPACE))))
    api.node(NODE, 8)
    for name in ("rollout-0", "rollout-1"):
        api.put(pod(name, node=NODE))
    api.put(pod("rollout-2", node="another"))
    api.lose_node(NODE)
    core.delete_namespaced_pod("rollout-2", NAMESPACE)
    before = api.get("Pod", "rollout-0", NAMESPACE)["metadata"]["deletionTimestamp"]
    core.delete_namespaced_pod("rollout-0", NAMESPACE)
    assert api.names("Pod") == ["rollout-0", "rollout-1"]
    assert api.get("Pod", "rollout-0", NAMESPACE)["metadata"]["deletionTimestamp"] == before
    if cure == "taint":
        core.patch_node(NODE, {"spec": {"taints": [OUT_OF_SERVICE]}})
    elif cure == "delete the node":
        core.delete_node(NODE)
    elif cure == "node answers":
        api.put({**api.get("Node", NODE, ""), "status": ANSWERS})
        core.patch_node(NODE, {"metadata": {"labels": {"a": "b"}}})
    else:
        core.delete_namespaced_pod("rollout-0", NAMESPACE, grace_period_seconds=0)
        assert api.names("Pod") == ["rollout-1"]
        return
    assert api.names("Pod") == []


def test_the_time_of_a_deletion_is_the_end_of_the_grace_period(api: FakeCluster, api_client: client.ApiClient) -> None:
    slow = pod("rollout-0")
    slow["spec"]["terminationGracePeriodSeconds"] = 3600
    api.put(slow)
    begun = datetime.now(UTC)
    eviction = client.V1Eviction(metadata=client.V1ObjectMeta(name="rollout-0", namespace=NAMESPACE))
    client.CoreV1Api(api_client).create_namespaced_pod_eviction("rollout-0", NAMESPACE, eviction)
    metadata = api.get("Pod", "rollout-0", NAMESPACE)["metadata"]
    left_s = (datetime.fromisoformat(metadata["deletionTimestamp"]) - begun).total_seconds()
    assert metadata["deletionGracePeriodSeconds"] == 3600
    assert 3500 < left_s < 3700


def test_what_the_coordinator_does_not_call_is_refused(api: FakeCluster, api_client: client.ApiClient) -> None:
    core = client.CoreV1Api(api_client)
    assert status_of(core.list_namespaced_secret, NAMESPACE) == 403
    assert status_of(core.delete_namespaced_pod, "rollout-0", NAMESPACE) == 403
    assert status_of(core.list_namespaced_pod_template, NAMESPACE) == 404  # of a kind that the fake does not have
    api.bind([])
    assert status_of(core.list_namespaced_pod, NAMESPACE) == 403
    api.bind(role_rules())
    scale = client.AppsV1Api(api_client).patch_namespaced_stateful_set_scale
    assert status_of(scale, "rollout", NAMESPACE, {"spec": {"replicas": 1}}) == 415  # a strategic merge patch


def test_without_a_token_nothing_is_answered(api: FakeCluster, tmp_path: Path) -> None:
    kubeconfig = api.write_kubeconfig(tmp_path / "nobody", NAMESPACE)
    kubeconfig.write_text(kubeconfig.read_text().replace(TOKENS[OPERATOR], "of nobody"))
    core = client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))
    assert status_of(core.list_namespaced_pod, NAMESPACE) == 401


def test_a_pods_client_writes_the_scheme_of_its_token_in_small_letters(api: FakeCluster) -> None:
    """`load_incluster_config` does; refused, a coordinator in a container had run without the API."""
    api.bind(role_rules())
    configuration = client.Configuration(host=f"http://127.0.0.1:{api.port}")
    configuration.api_key["authorization"] = f"bearer {TOKENS[COORDINATOR]}"
    assert client.CoreV1Api(client.ApiClient(configuration)).list_namespaced_pod(NAMESPACE).items != []


def test_an_operator_has_no_role_and_is_refused_what_anyone_is(api: FakeCluster, tmp_path: Path) -> None:
    of_operator = config.new_client_from_config(str(api.write_kubeconfig(tmp_path / "operator", NAMESPACE)))
    core, apps = client.CoreV1Api(of_operator), client.AppsV1Api(of_operator)
    api.bind([])
    assert len(core.list_namespaced_pod(NAMESPACE, _request_timeout=TIMEOUT_S).items) == 1
    assert status_of(apps.patch_namespaced_stateful_set_scale, "rollout", NAMESPACE, {"spec": {"replicas": 1}}) == 415
    read = apps.read_namespaced_stateful_set("rollout", NAMESPACE, _request_timeout=TIMEOUT_S)
    api.put(rollout_set(3))
    assert status_of(apps.replace_namespaced_stateful_set, "rollout", NAMESPACE, read) == 409  # of an older version
    new = rollout_set(3)
    new["spec"]["serviceName"] = "another"
    assert status_of(apps.replace_namespaced_stateful_set, "rollout", NAMESPACE, new) == 422
    other = {**new, "metadata": {"name": "rollout", "namespace": "elsewhere"}}
    assert status_of(apps.replace_namespaced_stateful_set, "rollout", NAMESPACE, other) == 400
    assert status_of(core.list_namespaced_pod, NAMESPACE, label_selector="a notin (b)") == 400
    api.put(RESTRICTED)
    assert status_of(core.create_namespaced_pod, NAMESPACE, NAKED) == 403


POD_OF_TWO: dict[str, Any] = {
    "containers": [{"name": "a", "image": "1", "env": [{"name": "X", "value": "1"}]}, {"name": "b", "image": "1"}],
    "nodeSelector": {"pool": "gpu", "zone": "z"},
    "tolerations": [{"key": "t"}],
}


@pytest.mark.parametrize(
    ("patch", "path", "value"),
    [
        ({"containers": [{"name": "b", "image": "2"}]}, "containers.1", {"name": "b", "image": "2"}),
        ({"containers": [{"name": "b", "image": "2"}]}, "containers.0", POD_OF_TWO["containers"][0]),
        ({"containers": [{"name": "b", "$patch": "delete"}]}, "containers", POD_OF_TWO["containers"][:1]),
        ({"$setElementOrder/containers": [{"name": "b"}, {"name": "a"}]}, "containers.0.name", "b"),
        ({"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}]}]}, "containers.0.env.0.name", "X"),
        ({"nodeSelector": {"zone": None}}, "nodeSelector", {"pool": "gpu"}),
        ({"tolerations": []}, "tolerations", []),  # has no merge key
        ({"securityContext": {"supplementalGroups": [1]}}, "securityContext.supplementalGroups", [1]),
    ],
)
def test_a_strategic_merge_patch(patch: dict[str, Any], path: str, value: Any) -> None:
    found: Any = strategic({"spec": copy.deepcopy(POD_OF_TWO)}, {"spec": patch}, schema_of("v1", "Pod"))["spec"]
    for key in path.split("."):
        found = found[int(key) if key.isdigit() else key]
    assert found == value


def test_server_side_apply_removes_what_its_manager_no_longer_applies_and_nothing_of_others() -> None:
    schema, before = schema_of("v1", "Pod"), {"metadata": {"labels": {"a": "1", "b": "1"}}, "spec": POD_OF_TWO}
    live = copy.deepcopy(before) | {"status": {"phase": "Running"}}
    live["metadata"]["labels"]["of"] = "another"
    live["spec"]["nodeSelector"]["of"] = "another"
    live["spec"]["containers"][0]["imagePullPolicy"] = "Always"
    spec = {"containers": [{"name": "a", "image": "2"}], "nodeSelector": {"pool": "cpu"}}
    assert server_side(live, {"metadata": {"labels": {"a": "2"}}, "spec": spec}, before, schema) == {
        "metadata": {"labels": {"a": "2", "of": "another"}},
        "spec": {
            "containers": [{"name": "a", "image": "2", "imagePullPolicy": "Always"}],
            "nodeSelector": {"pool": "cpu"},  # which is one value
        },
        "status": {"phase": "Running"},
    }
    before = {**before, "spec": {**POD_OF_TWO, "nodeSelector": live["spec"]["nodeSelector"]}}
    assert server_side(live, before, before, schema) == live


def refused(api: FakeCluster, obj: dict[str, Any]) -> tuple[int, str]:
    """Code and message of the refusal of an apply."""
    with pytest.raises(Refusal) as caught:
        api.apply(obj)
    return caught.value.code, str(caught.value.body["message"])


def base(file: str) -> list[dict[str, Any]]:
    """The objects of a file of deploy/base, in the namespace."""
    found = [each for each in yaml.safe_load_all((REPO / "deploy" / "base" / file).read_text()) if each]
    for each in found:
        each["metadata"]["namespace"] = NAMESPACE
    return found


def changed(obj: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy with another value at a.b.c."""
    new = copy.deepcopy(obj)
    *parents, last = path.split(".")
    at = new
    for key in parents:
        at = at[key]
    at[last] = value
    return new


@pytest.mark.parametrize(
    ("file", "kind", "path", "value", "said"),
    [
        ("coordinator.yaml", "Job", "spec.backoffLimitPerIndex", 3, "spec.backoffLimitPerIndex: Invalid value"),
        (
            "coordinator.yaml",
            "Job",
            "spec.template.spec.serviceAccountName",
            "x",
            "spec.template: Invalid value",
        ),
        ("coordinator.yaml", "Job", "spec.podFailurePolicy", {"rules": []}, "spec.podFailurePolicy"),
        ("coordinator.yaml", "Job", "spec.backoffLimit", 3, None),
        ("trainer.yaml", "StatefulSet", "spec.serviceName", "x", "updates to statefulset spec for fields other than"),
        ("trainer.yaml", "StatefulSet", "spec.podManagementPolicy", "OrderedReady", "changed: podManagementPolicy"),
        ("trainer.yaml", "StatefulSet", "spec.selector", {"matchLabels": {"a": "b"}}, "changed: selector"),
        ("trainer.yaml", "StatefulSet", "spec.template.spec.serviceAccountName", "x", None),
        ("trainer.yaml", "StatefulSet", "spec.replicas", 4, None),
        ("coordinator-rbac.yaml", "RoleBinding", "roleRef.name", "x", "roleRef: Invalid value: field is immutable"),
        ("coordinator-rbac.yaml", "Role", "rules", [], None),
    ],
)
def test_fields_that_cannot_be_changed(
    api: FakeCluster, file: str, kind: str, path: str, value: Any, said: str | None
) -> None:
    (obj,) = [each for each in base(file) if each["kind"] == kind]
    assert api.apply(obj) == "created"
    assert api.apply(obj) == "unchanged"
    new = changed(obj, path, value)
    if said is None:
        assert api.apply(new) == "configured"
        return
    code, message = refused(api, new)
    assert code == 422
    assert said in message
    assert api.apply(obj) == "unchanged"  # as before


def test_a_claim_may_grow_and_nothing_else(api: FakeCluster) -> None:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    metadata = {"name": "run", "namespace": NAMESPACE}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}
    api.apply(claim)
    assert api.apply(changed(claim, "spec.resources.requests.storage", "2Gi")) == "configured"
    code, message = refused(api, changed(claim, "spec.storageClassName", "fast"))
    assert (code, "changed: storageClassName" in message) == (422, True)


def test_what_is_no_object_of_this_server_is_refused(api: FakeCluster) -> None:
    (job,) = [each for each in base("coordinator.yaml") if each["kind"] == "Job"]
    assert refused(api, changed(job, "apiVersion", "batch/v1beta1"))[0] == 404
    assert refused(api, changed(job, "metadata.namespace", "nowhere"))[0] == 404
    assert refused(api, changed(job, "spec.backoffLimits", 3))[0] == 400
    assert refused(api, changed(job, "spec.backoffLimit", "three"))[0] == 422


RESTRICTED = {
    "apiVersion": "v1",
    "kind": "Namespace",
    "metadata": {"name": NAMESPACE, "labels": {"pod-security.kubernetes.io/enforce": "restricted"}},
}
NAKED = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "naked", "namespace": NAMESPACE},
    "spec": {"containers": [{"name": "c", "image": "i"}]},
}


def test_a_restricted_namespace_admits_our_pods_and_no_others(api: FakeCluster) -> None:
    assert api.apply(NAKED) == "created"  # the namespace enforces nothing yet
    api.apply(RESTRICTED)
    code, message = refused(api, changed(NAKED, "metadata.name", "another"))
    assert code == 403
    for what in ("allowPrivilegeEscalation != false", "unrestricted capabilities", "runAsNonRoot", "seccompProfile"):
        assert what in message
    templates = {each["metadata"]["name"]: pod_template(each) for each in workloads(overlay("cluster"))}
    assert len(templates) == 4
    for name, template in templates.items():
        api.make_pod(NAMESPACE, f"{name}-0", template)
        assert api.get("Pod", f"{name}-0", NAMESPACE)["status"]["phase"] == "Pending"


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("hostNetwork", True, "host namespaces"),
        ("volumes", [{"name": "v", "hostPath": {"path": "/"}}], 'restricted volume type "hostPath"'),
        ("securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}], "forbidden sysctls (kernel.msgmax)"),
        ("securityContext.runAsUser", 0, "runAsUser=0"),
        ("securityContext.runAsNonRoot", False, "runAsNonRoot != true"),
        ("securityContext.seccompProfile", {"type": "Unconfined"}, "seccompProfile"),
    ],
)
def test_each_rule_of_restricted_is_one_that_our_trainer_keeps(path: str, value: Any, said: str) -> None:
    spec = pod_template(find(overlay("cluster"), "StatefulSet", "trainer"))["spec"]
    assert list(violations(spec)) == []
    (found,) = violations(changed(spec, path, value))
    assert said in found


@pytest.mark.parametrize(
    ("context", "said"),
    [
        ({"privileged": True}, "privileged"),
        ({"allowPrivilegeEscalation": True}, "allowPrivilegeEscalation != false"),
        ({"capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}, "unrestricted capabilities"),
    ],
)
def test_each_rule_for_containers(context: dict[str, Any], said: str) -> None:
    spec = copy.deepcopy(pod_template(find(overlay("cluster"), "StatefulSet", "trainer"))["spec"])
    spec["containers"][0]["securityContext"] |= context
    (found,) = violations(spec)
    assert found.startswith(said)


def term(matched: str, *keys: str, **more: Any) -> dict[str, Any]:
    """A term of podAffinity: pods with a label, and with the pod's own values of these keys."""
    return {"topologyKey": "zone", "labelSelector": {"matchLabels": {matched: "x"}}, "matchLabelKeys": [*keys], **more}


BOTH = "exists in both matchLabelKeys and labelSelector"
REQUIRED, PREFERRED = (
    "requiredDuringSchedulingIgnoredDuringExecution",
    "preferredDuringSchedulingIgnoredDuringExecution",
)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        # As a real 1.36 said it of lws-rollout's pods.
        (
            f"spec.affinity.podAffinity.{PREFERRED}",
            [{"weight": 100, "podAffinityTerm": term("tandem.run/id", "tandem.run/id")}],
            f"{PREFERRED}[0].podAffinityTerm[0]: Invalid value: 'tandem.run/id': {BOTH}",
        ),
        (f"spec.affinity.podAffinity.{REQUIRED}", [term("tandem.run/id", "tandem.run/id")], BOTH),
        ("spec.affinity.podAntiAffinity", {REQUIRED: [term("tandem.run/id", "tandem.run/id")]}, BOTH),
        (f"spec.affinity.podAffinity.{REQUIRED}", [term("tandem.run/id", mismatchLabelKeys=["tandem.run/id"])], BOTH),
        (f"spec.affinity.podAffinity.{REQUIRED}", [term("a", "b", mismatchLabelKeys=["b"])], "and mismatchLabelKeys"),
        # Without the label there is no value to add, and nothing twice.
        (f"spec.affinity.podAffinity.{REQUIRED}", [term("of-nobody", "of-nobody")], None),
        (f"spec.affinity.podAffinity.{REQUIRED}", [term("a", "tandem.run/id")], None),
        (
            "spec.topologySpreadConstraints",
            [{**term("of-nobody", "of-nobody"), "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}],
            BOTH,
        ),
        ("spec.topologySpreadConstraints", [{"maxSkew": 0, "topologyKey": "z", "whenUnsatisfiable": "a"}], "maxSkew"),
        (f"spec.affinity.podAffinity.{PREFERRED}", [{"weight": 101, "podAffinityTerm": term("a")}], "range 1-100"),
        (f"spec.affinity.podAffinity.{REQUIRED}", [{**term("a"), "topologyKey": ""}], "topologyKey: Required value"),
        ("metadata.name", "t_0", "metadata.name: Invalid value"),
        ("metadata.labels.run", "r" * 64, "must be no more than 63 characters"),
        ("metadata.labels", {"a/b/c": "x"}, "metadata.labels: Invalid value: 'a/b/c'"),
        ("spec.hostname", "h" * 64, "spec.hostname: Invalid value"),
        ("spec.nodeSelector", {"pool": "gpu nodes"}, "spec.nodeSelector: Invalid value: 'gpu nodes'"),
        ("spec.tolerations", [{"operator": "Exists", "key": "a", "value": "b"}], "value must be empty"),
        ("spec.tolerations", [{"value": "b"}], "must be Exists when `key` is empty"),
        ("spec.containers.0.volumeMounts.0.name", "none", "volumeMounts.name: Not found: 'none'"),
        ("spec.containers.0.volumeMounts.0.mountPath", "/models", "'/models': must be unique"),
        ("spec.volumes.0.name", "tmp", "spec.volumes.name: Duplicate value: 'tmp'"),
        ("spec.volumes.0.emptyDir", {}, "must specify exactly one volume type"),
        ("spec.containers.0.ports.0.name", "a-name-of-many-letters", "no more than 15 characters"),
        ("spec.containers.0.ports.0.name", "metrics", "ports.name: Duplicate value: 'metrics'"),
        ("spec.containers.0.env.0.name", "A=B", "env.name: Invalid value"),
        ("spec.containers.0.env.1.valueFrom.fieldRef.fieldPath", "status.labels", "fieldPath: Invalid value"),
        ("spec.containers.0.resources.requests.memory", "65Gi", "must be less than or equal to memory limit"),
        ("spec.containers.0.resources.limits", {"cpu": "8", "memory": "64Gi"}, "over-commit is not allowed"),
        ("spec.containers.0.resources.requests.gpus", "1", "must be a standard resource type or fully qualified"),
        ("spec.containers.0.livenessProbe.exec", {"command": ["true"]}, "exactly one handler type"),
        ("spec.containers.0.image", "", "image: Required value"),
    ],
)
def test_a_pod_that_schemas_let_pass_and_an_api_server_does_not(
    api: FakeCluster, path: str, value: Any, said: str | None
) -> None:
    template = pod_template(find(overlay("single-node-gpu"), "StatefulSet", "trainer"))
    pod = {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"]}
    pod["metadata"] = {"name": "t-0", "namespace": NAMESPACE, "labels": template["metadata"]["labels"]}
    assert list(pod_errors(pod)) == []
    *parents, last = path.split(".")
    new = copy.deepcopy(pod)
    at: Any = new
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
    at[last] = value
    if said is None:
        assert api.apply(new) == "created"
        return
    code, message = refused(api, new)
    assert (code, said in message) == (422, True), message


def test_the_coordinators_role_allows_what_it_says(api: FakeCluster, api_client: client.ApiClient) -> None:
    (role,) = [each for each in base("coordinator-rbac.yaml") if each["kind"] == "Role"]
    api.bind(role["rules"])
    custom = client.CustomObjectsApi(api_client)
    where = ("apps", "v1", NAMESPACE, "statefulsets")
    custom.get_namespaced_custom_object_scale(*where, "rollout", _request_timeout=TIMEOUT_S)
    assert status_of(custom.get_namespaced_custom_object_scale, *where, "redis") == 403
    core = client.CoreV1Api(api_client)
    core.create_namespaced_event(NAMESPACE, EVENT, _request_timeout=TIMEOUT_S)
    api.bind([])
    assert status_of(core.create_namespaced_event, NAMESPACE, EVENT) == 403


def test_a_changed_configuration_is_taken_by_all_but_the_job(api: FakeCluster, tmp_path: Path) -> None:
    """As seen on a real server: `kubectl apply -k` of another run.yaml over a running run."""
    api.delete("StatefulSet", "rollout", NAMESPACE)
    before = overlay("cluster")
    for obj in sorted(before, key=lambda obj: obj["kind"] != "Namespace"):
        assert api.apply(obj) == "created"
    assert {api.apply(obj) for obj in before} == {"unchanged"}

    shutil.copytree(DEPLOY, tmp_path / "deploy")
    folder = tmp_path / "deploy" / "overlays" / "cluster"
    file = folder / "run.yaml"
    file.write_text(file.read_text() + "\n# another\n")
    said: dict[str, str] = {}
    for obj in build(folder):
        try:
            said[label(obj)] = api.apply(obj)
        except Refusal as refusal:
            said[label(obj)] = f"{refusal.code} {refusal.body['message']}"
    not_unchanged = {name: word for name, word in said.items() if word != "unchanged"}
    (config_map,) = [name for name, word in not_unchanged.items() if word == "created"]
    assert config_map.startswith("ConfigMap/run-config")
    taken = {name for name, word in not_unchanged.items() if word == "configured"}
    assert taken == {"StatefulSet/trainer", "StatefulSet/rollout"}
    assert not_unchanged["Job/coordinator"].startswith('422 Job "coordinator" is invalid: spec.template: Invalid value')
    assert len(not_unchanged) == 4
