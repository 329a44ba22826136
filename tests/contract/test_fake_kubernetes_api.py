"""The stand-in for the Kubernetes API refuses what an API server refuses, and what it does not know.

What it serves is used by the tests of the coordinator. What passes there has not run on Kubernetes.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tests.contract.kube_objects import NAMESPACE, leader_worker_set, pod, rollout_set
from tests.fakes.fake_kube_api import FakeKubeApi

TIMEOUT_S = 30
EVENT = {
    "metadata": {"name": "e", "namespace": NAMESPACE},
    "involvedObject": {"kind": "Pod", "name": "rollout-0"},
    "count": 1,
}


@pytest.fixture
def api() -> Iterator[FakeKubeApi]:
    with FakeKubeApi(NAMESPACE) as api:
        api.put("pods", pod("rollout-0"))
        api.put("statefulsets", rollout_set(2))
        api.put("leaderworkersets", leader_worker_set(2))
        yield api


@pytest.fixture
def api_client(api: FakeKubeApi, tmp_path: Path) -> client.ApiClient:
    return config.new_client_from_config(str(api.write_kubeconfig(tmp_path / "kubeconfig", NAMESPACE)))


def status_of(call: Callable[..., Any], *arguments: Any) -> int:
    """HTTP status of the refusal of a call."""
    with pytest.raises(ApiException) as caught:
        call(*arguments, _request_timeout=TIMEOUT_S)
    return int(caught.value.status)


def test_events_are_validated_and_made_once(api_client: client.ApiClient) -> None:
    core = client.CoreV1Api(api_client)
    assert status_of(core.create_namespaced_event, "nowhere", EVENT) == 404
    core.create_namespaced_event(NAMESPACE, EVENT, _request_timeout=TIMEOUT_S)
    assert status_of(core.create_namespaced_event, NAMESPACE, EVENT) == 409
    assert status_of(core.patch_namespaced_event, "e", NAMESPACE, {"count": "many"}) == 422
    assert status_of(core.patch_namespaced_event, "another", NAMESPACE, {"count": 2}) == 404


@pytest.mark.parametrize("wanted", [("apps", "statefulsets"), ("leaderworkerset.x-k8s.io", "leaderworkersets")])
def test_a_size_is_not_changed_by_who_has_read_an_older_one(
    wanted: tuple[str, str], api: FakeKubeApi, api_client: client.ApiClient
) -> None:
    group, plural = wanted
    custom = client.CustomObjectsApi(api_client)
    where = (group, "v1", NAMESPACE, plural, "rollout")
    scale = custom.get_namespaced_custom_object_scale(*where, _request_timeout=TIMEOUT_S)
    body = {"metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]}, "spec": {"replicas": 3}}
    custom.patch_namespaced_custom_object_scale(*where, body, _request_timeout=TIMEOUT_S)
    assert status_of(custom.patch_namespaced_custom_object_scale, *where, body) == 409
    assert api.get(plural, "rollout", NAMESPACE)["spec"]["replicas"] == 3


def test_the_successor_of_a_pod_is_not_evicted_in_its_place(api: FakeKubeApi, api_client: client.ApiClient) -> None:
    eviction = client.V1Eviction(
        metadata=client.V1ObjectMeta(name="rollout-0", namespace=NAMESPACE),
        delete_options=client.V1DeleteOptions(preconditions=client.V1Preconditions(uid="of another pod")),
    )
    core = client.CoreV1Api(api_client)
    assert status_of(core.create_namespaced_pod_eviction, "rollout-0", NAMESPACE, eviction) == 409
    assert "deletionTimestamp" not in api.get("pods", "rollout-0", NAMESPACE)["metadata"]


def test_what_the_coordinator_does_not_call_is_not_there(api_client: client.ApiClient) -> None:
    assert status_of(client.CoreV1Api(api_client).list_namespaced_secret, NAMESPACE) == 404
    assert status_of(client.CoreV1Api(api_client).delete_namespaced_pod, "rollout-0", NAMESPACE) == 501
    scale = client.AppsV1Api(api_client).patch_namespaced_stateful_set_scale
    assert status_of(scale, "rollout", NAMESPACE, {"spec": {"replicas": 1}}) == 415  # a strategic merge patch
