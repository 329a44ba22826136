"""The API stand-in behaves as real clients expect of an API server: kubectl and the official Python client.

What passes here has not run on Kubernetes: tests/fakes/fake_kube_api is a fake, and says so.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException

from tests.contract.kube_objects import NAMESPACE, leader_worker_set, pod, rollout_set
from tests.fakes.fake_kube_api import FakeKubeApi

TIMEOUT_S = 30
REPOSITORY = Path(__file__).parents[2]
needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is not on PATH: nothing was checked with the real one"
)
Kubectl = Callable[..., "subprocess.CompletedProcess[str]"]

CONFIG_MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "c", "namespace": NAMESPACE},
    "data": {"a": "1"},
}


@pytest.fixture
def api() -> Iterator[FakeKubeApi]:
    with FakeKubeApi(NAMESPACE) as api:
        yield api


@pytest.fixture
def kubeconfig(api: FakeKubeApi, tmp_path: Path) -> Path:
    return api.write_kubeconfig(tmp_path / "kubeconfig", NAMESPACE)


@pytest.fixture
def core(kubeconfig: Path) -> client.CoreV1Api:
    return client.CoreV1Api(config.new_client_from_config(str(kubeconfig)))


@pytest.fixture
def kubectl(kubeconfig: Path, tmp_path: Path) -> Kubectl:
    environment = {**os.environ, "KUBECONFIG": str(kubeconfig), "HOME": str(tmp_path)}

    def run(*arguments: str, stdin: Any = None) -> "subprocess.CompletedProcess[str]":
        text = None if stdin is None else json.dumps(stdin)
        command = ["kubectl", *arguments]
        return subprocess.run(
            command, env=environment, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )

    return run


def serve(api: FakeKubeApi, *pods: dict[str, Any]) -> None:
    for each in pods:
        api.put("pods", each)


# ---- kubectl ----


@needs_kubectl
def test_kubectl_dry_runs_an_overlay_and_leaves_nothing(kubectl: Kubectl, api: FakeKubeApi) -> None:
    done = kubectl("apply", "--server-side", "--dry-run=server", "-k", str(REPOSITORY / "deploy/overlays/dev-cpu"))
    assert done.returncode == 0, done.stderr
    assert "statefulset.apps/rollout serverside-applied (server dry run)" in done.stdout
    assert api.list("statefulsets") == []


@needs_kubectl
def test_kubectl_is_refused_what_no_schema_has(kubectl: Kubectl) -> None:
    wrong = {**rollout_set(2), "apiVersion": "apps/v1", "kind": "StatefulSet"}
    wrong["spec"] |= {"replicsa": 3}
    done = kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=wrong)
    assert done.returncode == 1
    assert "replicsa" in done.stderr
    wrong["spec"] = {**wrong["spec"], "replicas": "two"}
    del wrong["spec"]["replicsa"]
    done = kubectl("apply", "--server-side", "--dry-run=server", "-f", "-", stdin=wrong)
    assert done.returncode == 1
    assert "spec.replicas: 'two' is not of type" in done.stderr


@needs_kubectl
def test_kubectl_apply_keeps_to_its_own_fields(kubectl: Kubectl, api: FakeKubeApi) -> None:
    def apply(manager: str, data: dict[str, str], *more: str) -> "subprocess.CompletedProcess[str]":
        manifest = {**CONFIG_MAP, "data": data}
        return kubectl("apply", "--server-side", f"--field-manager={manager}", *more, "-f", "-", stdin=manifest)

    assert apply("ann", {"a": "1", "b": "1"}).returncode == 0
    refused = apply("bob", {"a": "2"})
    assert refused.returncode == 1
    assert 'conflict with "ann": .data.a' in refused.stderr
    assert apply("bob", {"a": "2", "c": "3"}, "--force-conflicts").returncode == 0
    assert apply("ann", {}).returncode == 0  # what ann no longer wants goes; bob's stays
    assert api.get("configmaps", "c", NAMESPACE)["data"] == {"a": "2", "c": "3"}


@needs_kubectl
def test_kubectl_gets_scales_patches_deletes_and_watches(kubectl: Kubectl, api: FakeKubeApi) -> None:
    api.put("statefulsets", rollout_set(2))
    assert kubectl("scale", "statefulset/rollout", "--replicas=5").returncode == 0
    assert kubectl("get", "sts", "rollout", "-o", "jsonpath={.spec.replicas}").stdout == "5"
    api.put("leaderworkersets", leader_worker_set(2))
    done = kubectl("scale", "leaderworkerset/rollout", "--replicas=3")
    assert "leaderworkerset.leaderworkerset.x-k8s.io/rollout scaled" in done.stdout, done.stderr
    assert api.get("leaderworkersets", "rollout", NAMESPACE)["spec"]["replicas"] == 3
    refused = kubectl("patch", "lws", "rollout", "--type=strategic", "-p", '{"spec": {"replicas": 4}}')
    assert refused.returncode == 1  # a custom resource has no merge keys
    assert kubectl("create", "-f", "-", stdin=CONFIG_MAP).returncode == 0
    for kind, patch in (("merge", {"data": {"a": None, "b": "2"}}), ("json", [{"op": "remove", "path": "/data/b"}])):
        assert kubectl("patch", "cm", "c", f"--type={kind}", "-p", json.dumps(patch)).returncode == 0
    assert not api.get("configmaps", "c", NAMESPACE)["data"]
    serve(api, pod("rollout-0"), pod("trainer-0", component="trainer"))
    found = kubectl("get", "pods", "-l", "app.kubernetes.io/component=rollout", "-o", "name").stdout
    assert found == "pod/rollout-0\n"
    deleting = threading.Timer(0.5, lambda: api.delete("pods", "rollout-0", NAMESPACE))
    deleting.start()
    done = kubectl("wait", "--for=delete", "pod/rollout-0", f"--timeout={TIMEOUT_S}s")
    assert done.returncode == 0, done.stderr
    assert kubectl("delete", "cm", "c").returncode == 0
    assert "NotFound" in kubectl("get", "cm", "c").stderr


@needs_kubectl
def test_kubectl_sees_refusals_as_an_api_server_words_them(kubectl: Kubectl, api: FakeKubeApi) -> None:
    api.refuse("list secrets")
    done = kubectl("get", "secrets")
    assert done.returncode == 1
    assert "Error from server (Forbidden): secrets" in done.stderr
    api.refuse("patch configmaps")
    done = kubectl("apply", "--server-side", "-f", "-", stdin=CONFIG_MAP)
    assert 'cannot patch resource "configmaps"' in done.stderr


# ---- the Python client ----


def test_the_client_lists_by_label_and_watches_from_there(core: client.CoreV1Api, api: FakeKubeApi) -> None:
    serve(api, pod("rollout-0"), pod("trainer-0", component="trainer"), pod("other", run_id="u"))
    wanted = "app.kubernetes.io/component in (rollout,trainer),tandem.run/id=t"
    found = core.list_namespaced_pod(NAMESPACE, label_selector=wanted, _request_timeout=TIMEOUT_S)
    assert [each.metadata.name for each in found.items] == ["rollout-0", "trainer-0"]
    serve(api, pod("rollout-1"))
    api.delete("pods", "rollout-0", NAMESPACE)
    api.delete("pods", "other", NAMESPACE)
    events = watch.Watch().stream(
        core.list_namespaced_pod,
        NAMESPACE,
        label_selector=wanted,
        resource_version=found.metadata.resource_version,
        timeout_seconds=1,
        _request_timeout=TIMEOUT_S,
    )
    seen = [(event["type"], event["object"].metadata.name) for event in events]
    assert seen == [("ADDED", "rollout-1"), ("DELETED", "rollout-0")]


def test_a_watch_from_a_version_that_is_too_old_ends_with_410(core: client.CoreV1Api, api: FakeKubeApi) -> None:
    found = core.list_namespaced_pod(NAMESPACE, _request_timeout=TIMEOUT_S)
    api.store.expire()
    events = watch.Watch().stream(
        core.list_namespaced_pod,
        NAMESPACE,
        resource_version=found.metadata.resource_version,
        timeout_seconds=1,
        _request_timeout=TIMEOUT_S,
    )
    with pytest.raises(ApiException) as caught:
        list(events)
    assert caught.value.status == 410


def test_a_change_of_something_older_is_a_conflict(core: client.CoreV1Api) -> None:
    core.create_namespaced_config_map(NAMESPACE, CONFIG_MAP, _request_timeout=TIMEOUT_S)
    with pytest.raises(ApiException) as exists:
        core.create_namespaced_config_map(NAMESPACE, CONFIG_MAP, _request_timeout=TIMEOUT_S)
    old = core.read_namespaced_config_map("c", NAMESPACE, _request_timeout=TIMEOUT_S)
    core.patch_namespaced_config_map("c", NAMESPACE, {"data": {"a": "2"}}, _request_timeout=TIMEOUT_S)
    old.data = {"a": "3"}
    with pytest.raises(ApiException) as late:
        core.replace_namespaced_config_map("c", NAMESPACE, old, _request_timeout=TIMEOUT_S)
    assert [exists.value.status, late.value.status] == [409, 409]
    assert core.read_namespaced_config_map("c", NAMESPACE, _request_timeout=TIMEOUT_S).data == {"a": "2"}


def test_an_eviction_tells_a_pod_to_end_unless_its_budget_is_spent(core: client.CoreV1Api, api: FakeKubeApi) -> None:
    serve(api, pod("rollout-0"))
    budget = {"selector": {"matchLabels": {"app.kubernetes.io/component": "rollout"}}, "maxUnavailable": 0}
    names = {"name": "rollout", "namespace": NAMESPACE}
    api.put("poddisruptionbudgets", {"metadata": names, "spec": budget, "status": {"disruptionsAllowed": 0}})
    eviction = client.V1Eviction(metadata=client.V1ObjectMeta(name="rollout-0", namespace=NAMESPACE))
    with pytest.raises(ApiException) as caught:
        core.create_namespaced_pod_eviction("rollout-0", NAMESPACE, eviction, _request_timeout=TIMEOUT_S)
    assert caught.value.status == 429
    assert "DisruptionBudget" in str(caught.value.body)
    api.delete("poddisruptionbudgets", "rollout", NAMESPACE)
    core.create_namespaced_pod_eviction("rollout-0", NAMESPACE, eviction, _request_timeout=TIMEOUT_S)
    left = core.read_namespaced_pod("rollout-0", NAMESPACE, _request_timeout=TIMEOUT_S)
    assert left.metadata.deletion_timestamp is not None


def test_the_stand_in_is_also_a_process_that_ends_when_told_to(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fakes.fake_kube_api", str(tmp_path / "kubeconfig"), NAMESPACE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        core = client.CoreV1Api(config.new_client_from_config(str(tmp_path / "kubeconfig")))
        found = core.list_namespace(_request_timeout=TIMEOUT_S)
        assert [each.metadata.name for each in found.items] == ["default", NAMESPACE]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=TIMEOUT_S) == 0
