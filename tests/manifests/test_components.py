"""Components: each says what it is, each combination builds, and each does to the pods what it says."""

import itertools
import os
import re
from pathlib import Path

import pytest
import yaml

from launcher.deploy.answers import LONGEST_RUN_ID
from reward_service.serve import DRAIN_S
from servicekit.addresses import any_host, join_address
from servicekit.environment import ServerEnvironment
from servicekit.tracing import ENDPOINT
from tests.fakes.cluster.admission import check_pod
from tests.fakes.cluster.controllers import HASH, pods_of
from tests.fakes.cluster.store import Refusal
from tests.house.repository import REPO
from tests.manifests.kustomize import (
    COMPONENTS,
    DEPLOY,
    OVERLAYS,
    Manifest,
    build,
    combine,
    component_of,
    environment,
    find,
    kinds,
    matches,
    overlay,
    pod_template,
    pod_templates,
    workloads,
)
from tests.manifests.schemas import is_custom, problems

PROMISED = {
    "autoscale-rollout",
    "disk-transport",
    "environment-server",
    "external-redis",
    "gpu-nccl",
    "gpu-nodes",
    "jobset-trainer",
    "kueue",
    "lws-rollout",
    "monitoring",
    "mtls",
    "names",
    "openshift",
    "pull-secret",
    "reward-server",
    "single-node",
    "standby-coordinator",
    "tracing",
}
# Below another component: a part of it that not every cluster wants.
PARTS = {
    "autoscale-rollout": ["unset-size"],
    "gpu-nccl": ["ipc-lock"],
    "gpu-nodes": ["priority", "runtime-class", "selector"],
}
DOCKERFILE = DEPLOY / "images/coordinator.Dockerfile"
# In kustomize's order: what others change again, what is changed, then what removes or copies it.
FIRST = ("names",)
LAST = ("openshift", "external-redis", "jobset-trainer", "lws-rollout", "kueue")


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


def place(name: str) -> tuple[int, str]:
    """Where a component stands among others."""
    return (LAST.index(name) + 1 if name in LAST else -1 if name in FIRST else 0), name


def combinations() -> list[tuple[str, ...]]:
    """An overlay and two components that go with it and with each other."""
    ordered = [sorted(pair, key=place) for pair in itertools.combinations(COMPONENTS, 2)]
    return [(base, *pair) for base in OVERLAYS for pair in ordered]


@pytest.mark.slow
@pytest.mark.parametrize("names", combinations(), ids="+".join)
def test_every_pair_builds_and_is_valid(names: tuple[str, ...], tmp_path: Path) -> None:
    base, *pair = names
    manifests = combine(tmp_path, base, pair)
    for version in ("1.29", "1.37"):
        assert not [problem for each in manifests if not is_custom(each) for problem in problems(each, version)]


@pytest.mark.parametrize("base", OVERLAYS)
@pytest.mark.parametrize(
    "more", [("reward-server", "environment-server"), ("mtls", "jobset-trainer", "lws-rollout")], ids="+".join
)
def test_openshift_admits_all_pods_with_its_component_and_none_without(
    base: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    project = {"metadata": {"name": "tandem", "annotations": {"openshift.io/sa.scc.uid-range": "1000680000/10000"}}}
    for components in (more, sorted(("openshift", *more), key=place)):
        (tmp_path / str(len(components))).mkdir()
        for workload in workloads(combine(tmp_path / str(len(components)), base, components)):
            for pod in pods_of(workload):
                if "openshift" in components:
                    check_pod(project, pod, pod["metadata"]["name"])
                    continue
                with pytest.raises(Refusal) as caught:
                    check_pod(project, pod, pod["metadata"]["name"])
                assert "must be in the ranges: [1000680000, 1000689999]" in caught.value.body["message"]


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


@pytest.mark.parametrize("name", ["dev-cpu", "single-node-gpu"])
def test_single_node_is_where_the_trainer_is(name: str) -> None:
    """Its GPUs are what few nodes have: what followed a pod without GPUs could be drawn to a node that has none."""
    manifests = overlay(name)
    claims = [*kinds(manifests, "PersistentVolumeClaim"), *kinds(overlay("storage-one-node"), "PersistentVolumeClaim")]
    assert {tuple(each["spec"]["accessModes"]) for each in claims} == {("ReadWriteOnce",)}
    trainer = pod_template(find(manifests, "StatefulSet", "trainer"))["metadata"]["labels"]
    workers = ("trainer", "rollout", "redis")
    for kind, workload in (*(("StatefulSet", each) for each in workers), ("Job", "coordinator")):
        (term,) = pod_template(find(manifests, kind, workload))["spec"]["affinity"]["podAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert term["labelSelector"]["matchLabels"].items() <= trainer.items()
        assert term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "trainer"


def test_pods_without_gpus_may_stand_on_a_gpu_node_where_there_is_one_node() -> None:
    """GPU nodes are tainted on most clusters: what must stand beside the trainer must tolerate it."""
    for workload in workloads(overlay("single-node-gpu")):
        assert pod_template(workload)["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


def test_gpu_nodes_are_tolerated_by_what_has_gpus(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["gpu-nodes", "jobset-trainer", "lws-rollout"])
    for owner, template in pod_templates(manifests).items():
        has_gpu = "nvidia.com/gpu" in template["spec"]["containers"][0]["resources"]["limits"]
        # The taint that providers and NVIDIA's operator put on GPU nodes, whatever its value and effect.
        wanted = [{"key": "nvidia.com/gpu", "operator": "Exists"}] if has_gpu else []
        assert template["spec"].get("tolerations", []) == wanted, owner


@pytest.mark.parametrize("name", [f"{whole}/{part}" for whole, parts in PARTS.items() for part in parts])
def test_a_part_of_a_component_builds_after_it_and_is_named(name: str, tmp_path: Path) -> None:
    whole = name.partition("/")[0]
    manifests = combine(tmp_path, "cluster", [whole, name])
    (tmp_path / "without").mkdir()
    assert manifests != combine(tmp_path / "without", "cluster", [whole])
    assert not [problem for each in manifests if not is_custom(each) for problem in problems(each, "1.32")]
    assert f"`{name}`" in (DEPLOY / "components" / whole / "README.md").read_text(encoding="utf-8")


def test_the_parts_are_all(tmp_path: Path) -> None:
    found = sorted(path.parent for path in DEPLOY.glob("components/*/*/kustomization.yaml"))
    assert [f"{each.parent.name}/{each.name}" for each in found if each.name != "copy"] == sorted(
        f"{whole}/{part}" for whole, parts in PARTS.items() for part in parts
    )


def test_the_priority_class_is_the_one_that_the_cluster_has(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["gpu-nodes/priority"])
    (known,) = kinds(overlay("queues"), "PriorityClass")
    for template in pod_templates(manifests).values():
        is_rollout = component_of(template) == "rollout"
        assert template["spec"].get("priorityClassName") == (known["metadata"]["name"] if is_rollout else None)
    # Below pods without a class, for which node autoscalers still make nodes; they displace nobody.
    assert -10 <= known["value"] < 0
    assert known["preemptionPolicy"] == "Never"


def test_locked_memory_is_asked_for_with_the_namespace_that_admits_it(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["gpu-nccl", "gpu-nccl/ipc-lock"])
    for service in ("trainer", "rollout"):
        (container,) = pod_template(find(manifests, "StatefulSet", service))["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_a_pull_secret_is_in_every_account_of_ours(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["pull-secret"])
    accounts = {each["metadata"]["name"]: each.get("imagePullSecrets") for each in kinds(manifests, "ServiceAccount")}
    assert accounts == {key: [{"name": "registry"}] for key in ("coordinator", "trainer", "rollout")}
    for template in pod_templates(manifests).values():
        ours = template["spec"]["containers"][0]["image"] != "redis:7.4.2-bookworm"
        assert (template["spec"].get("serviceAccountName") in accounts) is ours


def test_the_disk_transport_has_one_folder(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["disk-transport"])
    mounts = set()
    for service in ("trainer", "rollout"):
        spec = pod_template(find(manifests, "StatefulSet", service))["spec"]
        (volume,) = [each for each in spec["volumes"] if each["name"] == "run"]
        assert volume == {"name": "run", "persistentVolumeClaim": {"claimName": "run"}}
        mounts |= {m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "run"}
    assert len(mounts) == 1


def test_spans_reach_the_collector(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["tracing"])
    settings = find(manifests, "ConfigMap", "tracing")
    (rule,) = find(manifests, "NetworkPolicy", "tracing")["spec"]["egress"]
    port = int(settings["data"]["endpoint"].rpartition(":")[2])
    assert port in {each["port"] for each in rule["ports"]}
    for kind, service in (("Job", "coordinator"), ("StatefulSet", "trainer"), ("StatefulSet", "rollout")):
        source = environment(pod_template(find(manifests, kind, service))["spec"]["containers"][0])[ENDPOINT]
        assert source["valueFrom"]["configMapKeyRef"] == {"name": settings["metadata"]["name"], "key": "endpoint"}


def test_external_redis_leaves_nothing_of_ours(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["external-redis"])
    ours = [(each["kind"], each["metadata"]["name"]) for each in manifests if "redis" in each["metadata"]["name"]]
    assert ours == [("NetworkPolicy", "external-redis")]


def test_external_redis_is_the_one_of_the_secret_beside_other_runs(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["names", "external-redis"], run="mine")
    for kind, service in (("Job", "coordinator"), ("StatefulSet", "trainer"), ("StatefulSet", "rollout")):
        environ = environment(pod_template(find(manifests, kind, f"mine-{service}"))["spec"]["containers"][0])
        assert environ["REDIS_URL"]["valueFrom"]["secretKeyRef"] == {"name": "redis-auth", "key": "url"}
        assert "value" not in environ["REDIS_URL"]
        assert not {"REDIS_HOST", "REDIS_PASSWORD", "REDIS_SCHEME"} & set(environ)


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


@pytest.mark.parametrize("name", ["reward-server", "environment-server"])
def test_a_server_of_the_users_is_found_where_its_readme_says(name: str, tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", [name])
    readme = (DEPLOY / "components" / name / "README.md").read_text(encoding="utf-8")
    (address,) = re.findall(r'address: "([\w.-]+):(\d+)"', readme)
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
    assert ServerEnvironment.from_env(environ).bind == join_address(any_host(), address[1])
    assert template["spec"]["terminationGracePeriodSeconds"] > DRAIN_S
    (program,) = re.findall(r"/opt/tandem/([\w/]+\.py)", " ".join([*container["command"], *container.get("args", [])]))
    assert (REPO / program).is_file()
    copied = re.findall(r"^COPY (\S+) /opt/tandem/\1$", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert {program, str(Path(program).parent)} & set(copied)


def test_an_environment_server_takes_code_as_its_readme_says(tmp_path: Path) -> None:
    readme = (DEPLOY / "components/environment-server/README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(\w+Generator:.*?|components:.*?)```", readme, flags=re.DOTALL)
    own, components = map(yaml.safe_load, blocks)
    (tmp_path / "my_env.py").write_text("class Guess: ...")
    base = {"namespace": "tandem", "resources": [os.path.relpath(DEPLOY / "overlays/cluster", tmp_path)]}
    places = [os.path.relpath(DEPLOY / "overlays/cluster" / place, tmp_path) for place in components["components"]]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(base | own | {"components": places}))
    manifests = build(tmp_path)
    template = pod_template(find(manifests, "Deployment", "environment-server"))["spec"]
    (code,) = (volume for volume in template["volumes"] if volume["name"] == "code")
    files = find(manifests, "ConfigMap", "environment-code")
    assert (files["data"], files["metadata"]["name"]) == ({"my_env.py": "class Guess: ..."}, code["configMap"]["name"])
    (container,) = template["containers"]
    assert container["args"][1].startswith(f"{container['volumeMounts'][-1]['mountPath']}/my_env.py:")


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
    assert changed["MASTER_ADDR"]["value"].replace("$(TRAINER_SET)", changed["TRAINER_SET"]["value"]) == first
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
    """With RDMA cards: Kueue never admits a pod that asks for what the queue does not cover."""
    manifests = combine(tmp_path, "cluster", ["gpu-nccl", "kueue"])
    (queue,) = kinds(overlay("queues"), "ClusterQueue")
    (group,) = queue["spec"]["resourceGroups"]
    quota = {each["name"]: each["nominalQuota"] for each in group["flavors"][0]["resources"]}
    assert list(quota) == group["coveredResources"], "Kueue wants the same resources in the same order"
    (local,) = kinds(overlay("queues"), "LocalQueue")
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    (namespace,) = kinds(overlay("namespace"), "Namespace")
    wanted_labels = queue["spec"]["namespaceSelector"]["matchLabels"]
    assert wanted_labels.items() <= namespace["metadata"]["labels"].items()
    assert not kinds(manifests, "ClusterQueue"), "a run that is removed would take the queue of others along"
    wanted = dict.fromkeys(quota, 0.0)
    for service in ("trainer", "rollout"):
        workload = find(manifests, "StatefulSet", service)
        assert workload["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
        (container,) = pod_template(workload)["spec"]["containers"]
        for name, amount in container["resources"]["requests"].items():
            wanted[name] += workload["spec"]["replicas"] * quantity(amount)
    assert {name: quantity(amount) for name, amount in quota.items()} == wanted


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number."""
    units = {"Gi": 2**30, "Ti": 2**40}
    return float(text[:-2]) * units[text[-2:]] if text[-2:] in units else float(text)


def test_the_autoscaler_keeps_to_the_run(tmp_path: Path) -> None:
    from coordinator.watch import metrics
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
    (metric,) = scaler["spec"]["metrics"]
    asked = metric["object"]
    assert asked["metric"]["name"] == metrics.REPLICAS_WANTED._gauge._name
    # As many replicas as the metric says: it is divided by their number, and compared with 1.
    assert asked["target"] == {"type": "AverageValue", "averageValue": "1"}
    about = asked["describedObject"]
    job = find(manifests, about["kind"], about["name"])
    assert job["apiVersion"] == about["apiVersion"]


@pytest.mark.parametrize("before", [[], ["lws-rollout"]])
def test_a_set_of_an_autoscaler_has_no_size_in_its_manifest(tmp_path: Path, before: list[str]) -> None:
    manifests = combine(tmp_path, "cluster", ["autoscale-rollout", *before, "autoscale-rollout/unset-size"])
    (scaler,) = kinds(manifests, "HorizontalPodAutoscaler")
    scaled = find(manifests, scaler["spec"]["scaleTargetRef"]["kind"], "rollout")
    assert "replicas" not in scaled["spec"]


def test_monitoring_labels_what_the_rules_select_by(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["monitoring"])
    (monitor,) = kinds(manifests, "PodMonitor")
    assert monitor["spec"]["jobLabel"] == "app.kubernetes.io/component"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert len(endpoint["relabelings"]) == 3


# Ids that look like names of pods, and the longest one.
RUN_IDS = (
    "",
    "my-run",
    "trainer-7b",
    "exp-trainer-14b-v2",
    "x-trainer-1",
    "trainer-hosts-0-1",
    "rollout-1",
    "r" * LONGEST_RUN_ID,
)


@pytest.mark.parametrize("run", RUN_IDS)
@pytest.mark.parametrize("sets", [(), ("jobset-trainer", "lws-rollout")], ids=["sets", "groups"])
def test_all_pods_with_metrics_are_scraped_whatever_a_run_is_called(
    run: str, sets: tuple[str, ...], tmp_path: Path
) -> None:
    manifests = combine(tmp_path, "cluster", ["monitoring", *sets], run)
    (monitor,) = kinds(manifests, "PodMonitor")
    scraped: set[tuple[str, str]] = set()
    replicas: dict[str, str] = {}
    for each in workloads(manifests):
        if pod_template(each)["metadata"]["labels"]["app.kubernetes.io/component"] == "trainer":
            grow(each, 12)
        for pod in pods_of(each):
            labels = relabelled(monitor, pod)
            component = pod["metadata"]["labels"]["app.kubernetes.io/component"]
            if labels is not None:
                scraped.add((component, pod["metadata"]["name"]))
                replicas |= {labels["replica"]: component} if "replica" in labels else {}
    prefix = f"{run}-" if run else ""
    (trainer,) = [name for component, name in scraped if component == "trainer"]
    assert trainer == (f"{prefix}trainer-hosts-0-0-{HASH}" if sets else f"{prefix}trainer-0")
    assert {name for component, name in scraped if component == "coordinator"} == {f"{prefix}coordinator-{HASH}"}
    assert replicas == {f"{prefix}rollout-{index}": "rollout" for index in range(16)}
    workers = {name for component, name in scraped if component == "rollout-worker"}
    assert len(workers) == (16 if sets else 0)
    assert {component for component, _ in scraped} <= {"coordinator", "trainer", "rollout", "rollout-worker"}


def grow(workload: Manifest, pods: int) -> None:
    """Give a trainer so many pods."""
    if workload["kind"] == "JobSet":
        (jobs,) = workload["spec"]["replicatedJobs"]
        jobs["template"]["spec"] |= {"completions": pods, "parallelism": pods}
    else:
        workload["spec"]["replicas"] = pods


def relabelled(monitor: Manifest, pod: Manifest) -> dict[str, str] | None:
    """The labels that relabelings give a target, as Prometheus does: anchored at both ends. None: it is dropped."""
    selector, labels = monitor["spec"]["selector"], pod["metadata"]["labels"]
    if not matches(selector, labels):
        return None
    meta = {f"__meta_kubernetes_pod_label_{re.sub(r'[^a-zA-Z0-9_]', '_', key)}": text for key, text in labels.items()}
    meta["__meta_kubernetes_pod_name"] = pod["metadata"]["name"]
    made: dict[str, str] = {}
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for rule in endpoint["relabelings"]:
        found = re.fullmatch(rule["regex"], ";".join(meta.get(name, "") for name in rule["sourceLabels"]))
        if found is not None and rule.get("action") == "drop":
            return None
        if found is not None:
            made[rule["targetLabel"]] = found.expand(rule["replacement"].replace("$", "\\"))
    return made


@pytest.mark.runs("python -m tools.prometheus_rule")
def test_the_rules_object_is_the_rules_file() -> None:
    from tools.prometheus_rule import OBJECT, RULES, prometheus_rule

    made = prometheus_rule(RULES.read_text(encoding="utf-8"))
    assert OBJECT.read_text(encoding="utf-8") == made, "run python -m tools.prometheus_rule"


def test_every_dashboard_is_in_a_config_map() -> None:
    manifests = overlay("monitoring")
    maps: list[Manifest] = [
        each for each in kinds(manifests, "ConfigMap") if "grafana_dashboard" in each["metadata"].get("labels", {})
    ]
    files = {path.name: path.read_text() for path in (REPO / "deploy" / "monitoring" / "dashboards").glob("*.json")}
    assert {name: text for each in maps for name, text in each["data"].items()} == files


def test_a_standby_is_the_jobs_second_pod_and_looks_for_another_node(tmp_path: Path) -> None:
    manifests = combine(tmp_path, "cluster", ["names", "standby-coordinator"], "math")
    (job,) = kinds(manifests, "Job")
    assert (job["spec"]["parallelism"], "completions" in job["spec"]) == (2, False)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "--standby" in container["args"]
    assert "--retry-exit" in container["args"]  # else its refusal would fail the Job
    rules = job["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]
    (term,) = rules["preferredDuringSchedulingIgnoredDuringExecution"]
    own = job["spec"]["template"]["metadata"]["labels"]
    wanted = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
    assert wanted.items() <= own.items()
    assert wanted["tandem.run/id"] == own["tandem.run/id"]
