"""A run beside others: its set has a prefix by kustomize, which the environment says, and run.yaml does not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.fleet.kubernetes.cluster import reach_cluster
from coordinator.watch.events import EventLog
from servicekit.environment import ServiceEnvironment
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import with_settings
from tests.contract.kube_objects import NAMESPACE, role_rules, rollout_set
from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.fakes.cluster.kinds import CONTROLLERS
from tests.fakes.cluster.requests import COORDINATOR


@pytest.fixture
def api() -> Iterator[FakeCluster]:
    with FakeCluster(NAMESPACE, custom=CONTROLLERS) as api:
        api.bind([{**rule, "resourceNames": []} for rule in role_rules()])  # its Role has the prefix too
        yield api


async def test_the_set_of_the_environment_is_scaled_and_no_other_runs(
    api: FakeCluster, config: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    for name in ("rollout", "my-run-rollout"):
        made = rollout_set(1)
        made["metadata"]["name"] = name
        api.put(made)
    kubeconfig = api.write_kubeconfig(tmp_path / "kubeconfig", NAMESPACE, user=COORDINATOR)
    settings = with_settings(
        config,
        fleet={"kind": "kubernetes", "kubeconfig": kubeconfig, "scale": True},
        rollout={"replicas": 3},
    )
    own = environment.model_copy(update={"rollout_set": "my-run-rollout"})
    cluster = await asyncio.to_thread(reach_cluster, settings, own, EventLog())
    try:
        await cluster.start()
    finally:
        cluster.close()
    sizes = {
        name: api.get("StatefulSet", name, NAMESPACE)["spec"]["replicas"] for name in ("rollout", "my-run-rollout")
    }
    assert sizes == {"rollout": 1, "my-run-rollout": 3}
