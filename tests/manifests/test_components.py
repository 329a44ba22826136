"""Components: each says what it is, each combination builds, and each does to the pods what it says."""

import itertools
import re
from pathlib import Path

import pytest

from reward_service.serve import DRAIN_S
from servicekit.environment import ServerEnvironment
from tests.house.repository import REPO
from tests.manifests.kustomize import (
    COMPONENTS,
    DEPLOY,
    OVERLAYS,
    Manifest,
    combine,
    environment,
    find,
    kinds,
    overlay,
    pod_template,
)
from tests.manifests.schemas import is_custom, problems

# single-node puts everything beside our Redis, which external-redis removes.
CONTRADICTING = [{"single-node", "external-redis"}]
PROMISED = {
    "autoscale-rollout",
    "external-redis",
    "gpu-nccl",
    "jobset-trainer",
    "kueue",
    "lws-rollout",
    "monitoring",
    "mtls",
    "reward-server",
    "single-node",
}
README = DEPLOY / "components/reward-server/README.md"
DOCKERFILE = DEPLOY / "images/coordinator.Dockerfile"
# In kustomize's order: what is changed, then what removes or copies it.
LAST = ("external-redis", "jobset-trainer", "lws-rollout", "kueue")


def test_the_promised_components_are_there() -> None:
    assert set(COMPONENTS) == PROMISED


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_has_a_readme(name: str) -> None:
    text = (DEPLOY / "components" / name / "README.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}\n")
    assert "**Does**" in text
    assert f"- ../../components/{name}\n" in text
    assert f"[{name}](components/{name}/README.md)" in (DEPLOY / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_builds_on_an_overlay(name: str, tmp_path: Path) -> None:
    base = "dev-cpu" if name == "single-node" else "cluster"
    manifests = combine(tmp_path, base, [name])
    assert name == "single-node" or manifests != overlay(base)
    assert not [problem for each in manifests if not is_custom(each) for problem in problems(each, "1.32")]


def combinations() -> list[tuple[str, ...]]:
    """An overlay and two components that go with it and with each other."""
    pairs = [pair for pair in itertools.combinations(COMPONENTS, 2) if set(pair) not in CONTRADICTING]
    ordered = [sorted(pair, key=lambda name: (LAST.index(name) if name in LAST else -1, name)) for pair in pairs]
    on_one_node = {name for name in OVERLAYS if name != "cluster"}
    return [
        (base, *pair) for base in OVERLAYS for pair in ordered if not (base in on_one_node and "external-redis" in pair)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("names", combinations(), ids="+".join)
def test_every_pair_builds_and_is_valid(names: tuple[str, ...], tmp_path: Path) -> None:
    base, *pair = names
    manifests = combine(tmp_path, base, pair)
    for version in ("1.29", "1.34"):
        assert not [problem for each in manifests if not is_custom(each) for problem in problems(each, version)]


def test_gpu_nccl_gives_both_sides_the_same_settings(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["gpu-nccl"])
    settings = find(manifests, "ConfigMap", "nccl")
    assert settings["data"]["NCCL_CUMEM_ENABLE"] in ("0", "1")
    for service in ("trainer", "rollout"):
        (container,) = pod_template(find(manifests, "StatefulSet", service))["spec"]["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]
        assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
        assert "nvidia.com/gpu" in container["resources"]["limits"]


def test_gpu_nccl_documents_its_settings() -> None:
    folder = DEPLOY / "components" / "gpu-nccl"
    values = dict(line.split("=") for line in (folder / "nccl.env").read_text().split())
    rows = re.findall(r"^\| (`.+`) \| `(\w+)` \|", (folder / "README.md").read_text(), flags=re.MULTILINE)
    assert {name: value for names, value in rows for name in re.findall(r"`(\w+)`", names)} == values


def test_single_node_follows_redis() -> None:
    for name in ("dev-cpu", "single-node-gpu"):
        manifests = overlay(name)
        claims = {
            each["metadata"]["name"]: each["spec"]["accessModes"] for each in kinds(manifests, "PersistentVolumeClaim")
        }
        assert set(map(tuple, claims.values())) == {("ReadWriteOnce",)}
        for kind, workload in (("StatefulSet", "trainer"), ("StatefulSet", "rollout"), ("Job", "coordinator")):
            (term,) = pod_template(find(manifests, kind, workload))["spec"]["affinity"]["podAffinity"][
                "requiredDuringSchedulingIgnoredDuringExecution"
            ]
            assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "redis"


def test_external_redis_leaves_nothing_of_ours(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["external-redis"])
    ours = [(each["kind"], each["metadata"]["name"]) for each in manifests if "redis" in each["metadata"]["name"]]
    assert ours == [("NetworkPolicy", "external-redis")]


def test_mtls_gives_every_service_its_own_certificate(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["mtls"])
    names = {each["spec"]["secretName"]: each["spec"].get("dnsNames") for each in kinds(manifests, "Certificate")}
    for kind, service in (("Job", "coordinator"), ("StatefulSet", "trainer"), ("StatefulSet", "rollout")):
        spec = pod_template(find(manifests, kind, service))["spec"]
        (volume,) = [each for each in spec["volumes"] if each["name"] == "tls"]
        secret = volume["secret"]["secretName"]
        assert names[secret] == [f"{service}.tandem"]
        (container,) = spec["containers"]
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "tls"]
        assert "subPath" not in mount  # Kubernetes would never renew it
        environ = environment(container)
        files = {name: environ[name]["value"] for name in ("TANDEM_TLS_CERT", "TANDEM_TLS_KEY", "TANDEM_TLS_CA")}
        assert {str(Path(path).parent) for path in files.values()} == {mount["mountPath"]}
    assert names["operator-tls"] == ["operator.tandem"]


def test_a_reward_server_is_found_where_its_readme_says(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["reward-server"])
    (address,) = re.findall(r'address: "([\w.-]+):(\d+)"', README.read_text(encoding="utf-8"))
    service, deployment = (find(manifests, kind, address[0]) for kind in ("Service", "Deployment"))
    template = pod_template(deployment)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (port,) = service["spec"]["ports"]
    (container,) = template["spec"]["containers"]
    ports = {each["name"]: str(each["containerPort"]) for each in container["ports"]}
    environ = {name: each["value"] for name, each in environment(container).items()}
    assert str(port["port"]) == address[1]
    assert (ports[port["targetPort"]], ports["health"]) == (environ["TANDEM_GRPC_PORT"], environ["TANDEM_HEALTH_PORT"])
    assert ServerEnvironment.from_env(environ).bind == f"0.0.0.0:{address[1]}"
    assert template["spec"]["terminationGracePeriodSeconds"] > DRAIN_S
    program = container["command"][1].removeprefix("/opt/tandem/")
    assert (REPO / program).is_file()
    assert f"COPY {Path(program).parent} /opt/tandem/{Path(program).parent}\n" in DOCKERFILE.read_text(encoding="utf-8")


def test_mtls_redis_differs_in_tls_alone(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["mtls"])
    plain = find(overlay("cluster"), "ConfigMap", "redis-config")["data"]["redis.conf"].splitlines()
    ciphered = find(manifests, "ConfigMap", "redis-config")["data"]["redis.conf"].splitlines()
    assert set(plain) - set(ciphered) == {"port 6379"}
    added = [line for line in ciphered if line not in plain and not line.startswith("#")]
    assert all(line == "port 0" or line.startswith("tls-") for line in added)


def test_jobset_has_the_trainers_pods(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["jobset-trainer"])
    assert not [each for each in kinds(manifests, "StatefulSet") if each["metadata"]["name"] == "trainer"]
    (jobset,) = kinds(manifests, "JobSet")
    template, original = pod_template(jobset), pod_template(find(overlay("cluster"), "StatefulSet", "trainer"))
    changed = environment(template["spec"]["containers"][0])
    kept = environment(original["spec"]["containers"][0])
    assert {name for name in changed if changed[name] != kept.get(name)} == {"MASTER_ADDR", "TANDEM_HOST_INDEX"}
    arguments = template["spec"]["containers"][0]["args"]
    # The Job takes 0 for the end of its work, so a drained trainer ends with another code.
    assert arguments[arguments.index("--interrupted-exit") + 1] == "143"
    network = jobset["spec"]["network"]
    first = f"{jobset['metadata']['name']}-{jobset['spec']['replicatedJobs'][0]['name']}-0-0.{network['subdomain']}"
    assert changed["MASTER_ADDR"]["value"] == first
    for part in ("volumes", "securityContext", "terminationGracePeriodSeconds"):
        assert template["spec"][part] == original["spec"][part]


def test_jobset_knows_the_generated_names(tmp_path: Path) -> None:
    """kustomize hashes names where it knows a kind's references only; ours are told to it."""
    manifests = combine(tmp_path, "dev-cpu", ["jobset-trainer"])
    (jobset,) = kinds(manifests, "JobSet")
    there = {each["metadata"]["name"] for kind in ("ConfigMap", "Secret") for each in kinds(manifests, kind)}
    spec = pod_template(jobset)["spec"]
    used = {volume["configMap"]["name"] for volume in spec["volumes"] if "configMap" in volume}
    used.add(environment(spec["containers"][0])["REDIS_URL"]["valueFrom"]["secretKeyRef"]["name"])
    assert used <= there


def test_kueue_has_quota_for_what_the_cluster_overlay_asks(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["kueue"])
    (queue,) = kinds(manifests, "ClusterQueue")
    (group,) = queue["spec"]["resourceGroups"]
    quota = {each["name"]: each["nominalQuota"] for each in group["flavors"][0]["resources"]}
    wanted = dict.fromkeys(quota, 0.0)
    for service in ("trainer", "rollout"):
        workload = find(manifests, "StatefulSet", service)
        assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
        (container,) = pod_template(workload)["spec"]["containers"]
        for name, amount in container["resources"]["requests"].items():
            wanted[name] += workload["spec"]["replicas"] * quantity(amount)
    assert {name: quantity(amount) for name, amount in quota.items()} == wanted


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number."""
    units = {"Gi": 2**30, "Ti": 2**40}
    return float(text[:-2]) * units[text[-2:]] if text[-2:] in units else float(text)


def test_the_autoscaler_keeps_to_the_run(tmp_path: Path) -> None:
    from prometheus_client import CollectorRegistry

    from rollout_service.metrics import RolloutMetrics
    from tandem_config.loading import load_config
    from tests.manifests.kustomize import run_yaml

    manifests = combine(tmp_path, "cluster", ["autoscale-rollout"])
    (scaler,) = kinds(manifests, "HorizontalPodAutoscaler")
    path = tmp_path / "run.yaml"
    path.write_text(run_yaml(manifests), encoding="utf-8")
    config = load_config(path)
    assert scaler["spec"]["minReplicas"] >= config.rollout.min_replicas
    assert scaler["spec"]["scaleTargetRef"]["name"] == config.fleet.rollout_set
    assert not config.fleet.scale
    registry = CollectorRegistry()
    RolloutMetrics(registry)
    (metric,) = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] in {family.name for family in registry.collect()}


def test_monitoring_labels_what_the_rules_select_by(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["monitoring"])
    (monitor,) = kinds(manifests, "PodMonitor")
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/component"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    drop, name = endpoint["relabelings"]
    followers = ("trainer-1", "trainer-12", "trainer-hosts-0-1-x7f2p")
    leaders = ("trainer-0", "trainer-hosts-0-0-x7f2p", "rollout-1", "coordinator-1abcd")
    assert all(re.fullmatch(drop["regex"], pod) for pod in followers)
    assert not any(re.fullmatch(drop["regex"], pod) for pod in leaders)
    found = re.fullmatch(name["regex"], "rollout;rollout-3")
    assert found is not None
    assert found[1] == "rollout-3"


@pytest.mark.runs("python -m tools.prometheus_rule")
def test_the_rules_object_is_the_rules_file() -> None:
    from tools.prometheus_rule import OBJECT, RULES, prometheus_rule

    made = prometheus_rule(RULES.read_text(encoding="utf-8"))
    assert OBJECT.read_text(encoding="utf-8") == made, "run python -m tools.prometheus_rule"


def test_every_dashboard_is_in_a_config_map(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["monitoring"])
    maps: list[Manifest] = [
        each for each in kinds(manifests, "ConfigMap") if "grafana_dashboard" in each["metadata"].get("labels", {})
    ]
    files = {path.name: path.read_text() for path in (REPO / "deploy" / "monitoring" / "dashboards").glob("*.json")}
    assert {name: text for each in maps for name, text in each["data"].items()} == files
