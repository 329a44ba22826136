"""Component lws-rollout: a group of pods is an engine, from the one pod template that there is."""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.fleet.kubernetes.api.pod_sets import PodSet
from coordinator.fleet.kubernetes.api.pods import COMPONENT_LABEL, LEADER_ANNOTATION, ROLLOUT, WORKER
from tandem_config.loading import load_config
from tandem_config.schema import RunConfig
from tests.fakes.cluster.controllers import pods_of
from tests.fakes.cluster.pods import pod_errors
from tests.manifests.kustomize import (
    DEPLOY,
    Manifest,
    build,
    combine,
    environment,
    find,
    kinds,
    overlay,
    pod_template,
    pod_templates,
    run_yaml,
    templates_of,
    worker_template,
    workloads,
)
from tests.manifests.test_network import flows
from tests.manifests.test_rbac import granted, used

README = (DEPLOY / "components" / "lws-rollout" / "README.md").read_text(encoding="utf-8")
ALL = "cluster + all"
# Labels and annotations that LeaderWorkerSet gives its pods (its API's own constants), leaders or all of them.
GIVEN_TO_ALL = {
    "leaderworkerset.sigs.k8s.io/name",
    "leaderworkerset.sigs.k8s.io/group-index",
    "leaderworkerset.sigs.k8s.io/group-key",
    "leaderworkerset.sigs.k8s.io/worker-index",
}
GIVEN_TO_WORKERS = {"leaderworkerset.sigs.k8s.io/leader-name"}


@pytest.fixture
def group() -> Manifest:
    return find(overlay(ALL), "LeaderWorkerSet", "rollout")


def both(group: Manifest) -> tuple[Manifest, Manifest]:
    """The templates of leaders and workers."""
    return pod_template(group), worker_template(group)


def test_nothing_is_left_of_the_stateful_set() -> None:
    left = {(each["kind"], each["metadata"]["name"]) for each in overlay(ALL)}
    assert not {("StatefulSet", "rollout"), ("Service", "rollout")} & left


def test_leaders_and_workers_differ_in_their_label_alone(group: Manifest) -> None:
    leader, worker = copy.deepcopy(both(group))
    assert leader["metadata"]["labels"].pop(COMPONENT_LABEL) == ROLLOUT
    assert worker["metadata"]["labels"].pop(COMPONENT_LABEL) == WORKER
    assert leader == worker


def test_their_pods_are_the_stateful_sets(tmp_path: Path) -> None:
    components = ["gpu-nccl", "mtls"]
    original = pod_template(find(combine(tmp_path, "cluster", components), "StatefulSet", "rollout"))
    template = pod_template(find(overlay(ALL), "LeaderWorkerSet", "rollout"))
    changed = {"affinity", "containers", "topologySpreadConstraints"}
    assert {key for key, value in template["spec"].items() if original["spec"].get(key) != value} == changed
    (container,), (before,) = template["spec"]["containers"], original["spec"]["containers"]
    assert {key for key, value in container.items() if before.get(key) != value} == {"args", "env"}
    given, kept = environment(container), environment(before)
    assert set(kept) - set(given) == {"POD_NAME"}
    assert {name for name in given if given[name] != kept.get(name)} == {
        "GROUP_INDEX",
        "SET_NAME",
        "TANDEM_HOST_INDEX",
    }


def test_pods_are_asked_for_nothing_that_leader_worker_set_does_not_give(group: Manifest) -> None:
    for template in both(group):
        paths = re.findall(r"leaderworkerset\.sigs\.k8s\.io/[a-z-]+", yaml.safe_dump(template))
        assert paths
        assert set(paths) <= GIVEN_TO_ALL
    assert {LEADER_ANNOTATION} == GIVEN_TO_WORKERS


def test_every_host_says_whose_it_is_and_which(group: Manifest) -> None:
    for template in both(group):
        (container,) = template["spec"]["containers"]
        assert container["args"][-2:] == ["--name", "$(SET_NAME)-$(GROUP_INDEX)"]
        names = ("SET_NAME", "GROUP_INDEX", "TANDEM_HOST_INDEX")
        paths = [environment(container)[name]["valueFrom"]["fieldRef"]["fieldPath"] for name in names]
        labels = [re.sub(r"metadata\.labels\['leaderworkerset\.sigs\.k8s\.io/(.*)'\]", r"\1", path) for path in paths]
        assert labels == ["name", "group-index", "worker-index"]


def test_an_engine_ends_and_starts_as_a_whole(group: Manifest) -> None:
    spec = group["spec"]
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    # The leader is ready when its workers are there: waiting for it would be for ever.
    assert spec["startupPolicy"] == "LeaderCreated"
    assert spec["rolloutStrategy"]["rollingUpdateConfiguration"] == {"maxUnavailable": 1, "maxSurge": 0}


def test_a_drain_takes_one_engine_at_a_time() -> None:
    budget = find(overlay(ALL), "PodDisruptionBudget", "rollout")["spec"]
    assert budget["maxUnavailable"] == 1
    (expression,) = budget["selector"]["matchExpressions"]
    assert (expression["operator"], set(expression["values"])) == ("In", {ROLLOUT, WORKER})


@pytest.mark.parametrize("name", [ALL, "cluster + external-redis"])
def test_the_role_is_what_the_code_uses_for_such_a_set(name: str) -> None:
    (role,) = kinds(overlay(name), "Role")
    trainer = PodSet(kind="JobSet" if kinds(overlay(name), "JobSet") else "StatefulSet", name="trainer")
    assert granted(role["rules"]) == used(PodSet(kind="LeaderWorkerSet", name="rollout"), trainer)
    named = [rule["resourceNames"] for rule in role["rules"] if "resourceNames" in rule]
    assert named == [["rollout"], ["trainer"], ["rollout"]]


def test_the_readme_lists_the_flows_that_are_added() -> None:
    rows = set(re.findall(r"^\| ([\w-]+) \| ([\w-]+) \| ([\d-]+) \|", README, flags=re.MULTILINE))
    assert rows == flows(overlay(ALL), "ingress") - flows(overlay("cluster"), "ingress")


def test_workers_are_where_their_leaders_are_with_other_components() -> None:
    manifests = overlay(ALL)
    scaled = find(manifests, "HorizontalPodAutoscaler", "rollout")["spec"]["scaleTargetRef"]
    group = find(manifests, "LeaderWorkerSet", "rollout")
    assert scaled == {"apiVersion": group["apiVersion"], "kind": group["kind"], "name": group["metadata"]["name"]}
    assert group["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tandem"
    (expression,) = find(manifests, "PodMonitor", "tandem")["spec"]["selector"]["matchExpressions"]
    assert {ROLLOUT, WORKER} <= set(expression["values"])
    secrets = {each["spec"]["secretName"]: each["spec"].get("dnsNames") for each in kinds(manifests, "Certificate")}
    for template in both(group):
        (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "tls"]
        assert secrets[volume["secret"]["secretName"]] == ["rollout.tandem"]
        (container,) = template["spec"]["containers"]
        assert "rdma/hca_shared_devices_a" in container["resources"]["limits"]
        assert container["envFrom"] == [
            {"configMapRef": {"name": find(manifests, "ConfigMap", "nccl")["metadata"]["name"]}}
        ]


def test_external_redis_is_open_to_workers() -> None:
    policy = find(overlay("cluster + external-redis"), "NetworkPolicy", "external-redis")
    assert WORKER in policy["spec"]["podSelector"]["matchExpressions"][0]["values"]


def test_generated_names_are_known(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "dev-cpu", ["lws-rollout"])
    there = {each["metadata"]["name"] for kind in ("ConfigMap", "Secret") for each in kinds(manifests, kind)}
    for template in both(find(manifests, "LeaderWorkerSet", "rollout")):
        spec = template["spec"]
        used = {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
        used.add(environment(spec["containers"][0])["REDIS_URL"]["valueFrom"]["secretKeyRef"]["name"])
        assert used <= there


# ---- the README's run ----


@pytest.fixture(scope="module")
def the_readmes_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, ...]:
    """Its files, beside the folders of deploy/."""
    folder = tmp_path_factory.mktemp("deploy")
    for each in DEPLOY.iterdir():
        (folder / each.name).symlink_to(each)
    for path, text in re.findall(r"^```yaml\n# deploy/(\S+?)(?:,[^\n]*)?\n(.*?)^```", README, re.MULTILINE | re.DOTALL):
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    run = folder / "my-run" / "run.yaml"
    cluster = yaml.safe_load((DEPLOY / "overlays" / "cluster" / "run.yaml").read_text(encoding="utf-8"))
    changes: Mapping[str, Any] = yaml.safe_load(run.read_text(encoding="utf-8"))
    run.write_text(yaml.safe_dump({key: cluster[key] | changes.get(key, {}) for key in cluster}), encoding="utf-8")
    return build(folder / "my-run-on-nodes")


@pytest.fixture
def config(the_readmes_run: tuple[Manifest, ...], tmp_path: Path) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(run_yaml(the_readmes_run), encoding="utf-8")
    return load_config(path)


def test_its_engines_are_those_of_its_configuration(the_readmes_run: tuple[Manifest, ...], config: RunConfig) -> None:
    group = find(the_readmes_run, "LeaderWorkerSet", f"my-run-{config.fleet.rollout_set}")
    (coordinator,) = templates_of(the_readmes_run, "coordinator")
    assert environment(coordinator["spec"]["containers"][0])["TANDEM_ROLLOUT_SET"]["value"] == group["metadata"]["name"]
    assert config.fleet.rollout_set_kind == group["kind"]
    assert group["spec"]["replicas"] == config.rollout.replicas
    assert group["spec"]["leaderWorkerTemplate"]["size"] == config.rollout.nodes > 1
    for template in both(group):
        (container,) = template["spec"]["containers"]
        gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
        assert gpus * config.rollout.nodes == config.rollout.tensor_parallel


def test_all_of_its_pods_are_of_its_run(the_readmes_run: tuple[Manifest, ...], config: RunConfig) -> None:
    """kustomize has to be told where a LeaderWorkerSet's templates are, for labels beside the component."""
    runs = {template["metadata"]["labels"]["tandem.run/id"] for template in pod_templates(the_readmes_run).values()}
    assert runs == {config.run.name}


def test_an_api_server_takes_its_pods(the_readmes_run: tuple[Manifest, ...]) -> None:
    """A key of a term that is in its labelSelector too, by `includeSelectors`, is refused of every pod."""
    for workload in workloads(the_readmes_run):
        for pod in pods_of(workload):
            assert list(pod_errors(pod)) == []
