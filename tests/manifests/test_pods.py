"""Rules that every pod of every overlay keeps: limits, security, probes, images, termination."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes.utils.quantity import parse_quantity

from coordinator import app as coordinator_app
from environment_service import serve as environment_server
from launcher.check.memory import host_memory
from launcher.deploy.check.overlay import _host_memory
from launcher.run import processes as plan_processes
from reward_service import serve as reward_server
from rollout_service import app as rollout_app
from rollout_service import worker_app
from tandem_config.loading import load_config
from tandem_config.schema import RunSection
from tests.house.repository import REPO
from tests.manifests.kustomize import (
    OVERLAYS,
    VARIANTS,
    Manifest,
    component_of,
    containers,
    environment,
    kinds,
    label,
    overlay,
    pod_template,
    pod_templates,
    run_yaml,
    service_of,
    strings,
    templates_of,
    workloads,
)
from weightsync.model.spec import preset

ALL = ["base", *OVERLAYS, *VARIANTS]
# trainer_service.app imports torch; these three are read from its text.
TRAINER_DRAINS = 3
# Services without an image of their own.
IMAGE_OF = {"reward-server": "coordinator", "environment-server": "coordinator"}


@pytest.fixture(params=ALL)
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return overlay(request.param)


def project_version() -> str:
    (version,) = re.findall(r'^version = "(.*)"', (REPO / "pyproject.toml").read_text(), flags=re.MULTILINE)
    return str(version)


def test_requests_are_limits(manifests: tuple[Manifest, ...]) -> None:
    """Guaranteed pods: never the first to be evicted, and exclusive cores where the kubelet gives them."""
    for owner, template in pod_templates(manifests).items():
        for container in containers(template):
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["limits"]), f"{owner}: {container['name']}"
            assert resources["requests"] == resources["limits"], f"{owner}: {container['name']}"


def test_pods_meet_the_restricted_standard(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        spec = template["spec"]
        pod = spec["securityContext"]
        assert pod["runAsNonRoot"] is True, owner
        assert pod["runAsUser"] > 0, owner
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, owner
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), owner
        assert not [each for each in spec["volumes"] if "hostPath" in each], owner
        for container in containers(template):
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False, owner
            assert context["readOnlyRootFilesystem"] is True, owner
            assert context["capabilities"] == {"drop": ["ALL"]}, owner
            assert "hostPort" not in str(container.get("ports")), owner


@pytest.mark.parametrize(
    ("name", "level"), [("namespace", "restricted"), ("dev-cpu", "restricted"), ("namespace-privileged", "privileged")]
)
def test_the_namespace_enforces_it(name: str, level: str) -> None:
    (namespace,) = kinds(overlay(name), "Namespace")
    labels = namespace["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == level
    assert labels["pod-security.kubernetes.io/warn"] == labels["pod-security.kubernetes.io/audit"] == "restricted"


def test_removing_a_run_removes_neither_namespace_nor_results(manifests: tuple[Manifest, ...]) -> None:
    """But dev-cpu, which is a demo: what is applied with a run goes with it."""
    if "arithmetic" in {each["metadata"]["labels"].get("tandem.run/id") for each in manifests}:
        return
    claims = [each["metadata"]["name"] for each in kinds(manifests, "PersistentVolumeClaim")]
    assert set(claims) <= {"redis"}
    assert not kinds(manifests, "Namespace")
    assert not kinds(manifests, "ClusterQueue")


def test_a_changed_template_reaches_pods_on_purpose_only(manifests: tuple[Manifest, ...]) -> None:
    """A rolling update would mix two configurations or releases, pod by pod."""
    for each in kinds(manifests, "StatefulSet"):
        assert each["spec"]["updateStrategy"] == {"type": "OnDelete"}, label(each)


def test_node_autoscalers_move_nothing_that_a_run_waits_for(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        kept = template["metadata"].get("annotations", {})
        moved = component_of(template) in ("rollout", "rollout-worker", *IMAGE_OF)
        assert (kept.get("cluster-autoscaler.kubernetes.io/safe-to-evict") == "false") is not moved, owner
        assert (kept.get("karpenter.sh/do-not-disrupt") == "true") is not moved, owner


def test_a_variable_is_defined_before_it_is_used(manifests: tuple[Manifest, ...]) -> None:
    """The kubelet leaves $(NAME) as it is where NAME comes later in the list, or not at all."""
    for owner, template in pod_templates(manifests).items():
        for container in containers(template):
            defined: set[str] = set()
            for entry in container.get("env", []):
                used = set(re.findall(r"\$\((\w+)\)", entry.get("value", "")))
                assert used <= defined, f"{owner}: {entry}"
                defined.add(entry["name"])


def test_a_runs_folder_is_its_own(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        environ = environment(containers(template)[0])
        if service_of(template) in ("coordinator", "trainer", "rollout"):
            assert environ["TANDEM_RUN_DIR"]["value"] == "/var/lib/tandem/run/$(TANDEM_RUN_ID)", owner


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_rollouts_mount_no_claim_that_others_write(name: str) -> None:
    for template in templates_of(overlay(name), "rollout"):
        claims = {each["name"] for each in template["spec"]["volumes"] if "persistentVolumeClaim" in each}
        assert claims <= {"models"}


def test_only_the_coordinator_has_a_token(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        mounts = template["spec"].get("automountServiceAccountToken", True)
        assert mounts == (component_of(template) == "coordinator"), owner


def test_every_container_has_three_probes(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        for container in template["spec"]["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert probe in container, f"{owner}: {container['name']} has no {probe}"


def test_probes_ask_for_what_the_health_service_serves(manifests: tuple[Manifest, ...]) -> None:
    from servicekit.rpc.health import LIVENESS, READINESS

    wanted = {"startupProbe": LIVENESS, "readinessProbe": READINESS, "livenessProbe": LIVENESS}
    for owner, template in pod_templates(manifests).items():
        if component_of(template) == "redis":
            continue
        for container in template["spec"]["containers"]:
            ports = {port["name"]: port["containerPort"] for port in container["ports"]}
            for probe, service in wanted.items():
                assert container[probe]["grpc"] == {"port": ports["health"], "service": service}, f"{owner}: {probe}"


@pytest.mark.parametrize("name", OVERLAYS)
def test_start_up_may_take_as_long_as_the_run_allows(name: str, tmp_path: Path) -> None:
    """A pod that is ended before run.startup_timeout_s would start over for ever."""
    path = tmp_path / "run.yaml"
    path.write_text(run_yaml(overlay(name)), encoding="utf-8")
    allowed_s = load_config(path).run.startup_timeout_s
    for owner, template in pod_templates(overlay(name)).items():
        if service_of(template) not in ("trainer", "rollout"):
            continue
        probe = template["spec"]["containers"][0]["startupProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] >= allowed_s, owner


def grace_needed_s() -> dict[str, float]:
    """From SIGTERM to exit, by the services' own constants."""
    source = (REPO / "trainer_service" / "app.py").read_text(encoding="utf-8")
    (drain_s,) = re.findall(r"^DRAIN_GRACE_S = ([\d.]+)", source, flags=re.MULTILINE)
    return {
        # A last checkpoint. Then the end of running calls, STOP, and the ranks' own end: each may take DRAIN_GRACE_S.
        "trainer": RunSection().stop_timeout_s + TRAINER_DRAINS * float(drain_s),
        "rollout": rollout_app.DRAIN_S + plan_processes._SERVICE_GRACE_S,
        # Until its leader has drained and lets it go.
        "rollout-worker": worker_app.LET_GO_S + plan_processes._SERVICE_GRACE_S,
        "coordinator": (RunSection().stop_timeout_s + coordinator_app._DRAIN_S + plan_processes._COORDINATOR_GRACE_S),
        "redis": 10.0,
        "reward-server": reward_server.DRAIN_S,
        "environment-server": environment_server.DRAIN_S,
    }


def test_the_grace_period_covers_the_shutdown(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        needed_s = grace_needed_s()[component_of(template)]
        assert template["spec"]["terminationGracePeriodSeconds"] > needed_s, owner


def test_images_are_pinned_to_this_version(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        for container in containers(template):
            image, _, tag = container["image"].partition(":")
            assert tag not in ("", "latest"), f"{owner}: {container['image']}"
            if image != "redis":
                assert tag.removesuffix("-cpu") == project_version(), f"{owner}: {container['image']}"
                service = service_of(template)
                # Of no registry (RFC 2606): `tandem/...` would be an image of whoever takes that name on docker.io.
                assert image == f"registry.invalid/tandem/{IMAGE_OF.get(service, service)}"


def test_nothing_says_latest() -> None:
    for path in sorted((REPO / "deploy").rglob("*.yaml")):
        assert not re.search(r"\blatest\b", path.read_text(encoding="utf-8")), path


@pytest.mark.parametrize("name", OVERLAYS)
def test_labels_are_on_everything(name: str) -> None:
    for each in overlay(name):
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/name"] == "tandem", label(each)
        assert "tandem.run/id" in labels, label(each)


def test_the_run_is_in_every_selector_that_names_ours(manifests: tuple[Manifest, ...]) -> None:
    """Of Services, sets, budgets, policies, affinities and spreads: or a run would select another run's pods."""
    for each in manifests:
        for selector in selectors(each):
            assert "tandem.run/id" in selector, f"{label(each)}: {selector}"


def selectors(value: object) -> Iterator[Manifest]:
    """Every set of labels to match, in a tree, that has our name; a Service's selector too."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key in ("matchLabels", "selector") and isinstance(each, dict) and "app.kubernetes.io/name" in each:
                yield each
            yield from selectors(each)
    elif isinstance(value, list):
        for each in value:
            yield from selectors(each)


def test_pods_have_the_component_and_the_run(manifests: tuple[Manifest, ...]) -> None:
    """The coordinator finds them by these."""
    for workload in workloads(manifests):
        labels = pod_template(workload)["metadata"]["labels"]
        assert labels["app.kubernetes.io/component"] == workload["metadata"]["labels"]["app.kubernetes.io/component"]
    for template in pod_templates(manifests).values():
        assert {"app.kubernetes.io/name", "tandem.run/id"} <= set(template["metadata"]["labels"])


def test_engines_have_shared_memory_and_scratch(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        if service_of(template) not in ("trainer", "rollout"):
            continue
        mounts = {mount["mountPath"]: mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory", owner
        assert "sizeLimit" in volumes[mounts["/tmp"]]["emptyDir"], owner


def test_pods_of_a_service_spread_as_it_says_and_not_as_the_scheduler_would(manifests: tuple[Manifest, ...]) -> None:
    for owner, template in pod_templates(manifests).items():
        if service_of(template) not in ("trainer", "rollout"):
            continue
        (constraint,) = template["spec"]["topologySpreadConstraints"]
        assert constraint["topologyKey"] == "kubernetes.io/hostname", owner
        # "DoNotSchedule" would keep a pod from a node that has room, where the others have none.
        assert constraint["whenUnsatisfiable"] == "ScheduleAnyway", owner
        assert selects(constraint["labelSelector"], template["metadata"]["labels"]), owner


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    wanted = {key: [value] for key, value in selector.get("matchLabels", {}).items()}
    wanted |= {each["key"]: each["values"] for each in selector.get("matchExpressions", [])}
    return all(labels.get(key) in values for key, values in wanted.items())


def test_disruption_budgets_cover_the_pods_they_are_for(manifests: tuple[Manifest, ...]) -> None:
    for budget in kinds(manifests, "PodDisruptionBudget"):
        chosen = [
            service_of(template)
            for template in pod_templates(manifests).values()
            if selects(budget["spec"]["selector"], template["metadata"]["labels"])
        ]
        assert chosen == [service_of(each) for each in templates_of(manifests, budget["metadata"]["name"])]


def test_no_password_outside_the_overlay_for_laptops() -> None:
    for name in ("base", *OVERLAYS):
        secrets = kinds(overlay(name), "Secret")
        assert [each["metadata"]["name"].rpartition("-")[0] for each in secrets] == (
            ["redis-auth"] if name == "dev-cpu" else []
        )
        assert name == "dev-cpu" or not [text for text in strings(list(overlay(name))) if "password@" in text]


def test_disruptions_are_budgeted(manifests: tuple[Manifest, ...]) -> None:
    budgets = {each["metadata"]["name"]: each["spec"] for each in kinds(manifests, "PodDisruptionBudget")}
    # A share of a Job's pods cannot be told: it has no scale, and the budget would allow nothing, with an error.
    # None beside a standby: only the leader is ready, so a budget would forbid what the standby makes safe.
    (coordinator,) = [each for each in kinds(manifests, "Job") if component_of(each) == "coordinator"]
    alone = coordinator["spec"].get("parallelism", 1) == 1
    assert ("coordinator" in budgets) == alone
    assert not alone or budgets.pop("coordinator")["minAvailable"] == 1
    for each in kinds(manifests, "JobSet"):
        (hosts,) = each["spec"]["replicatedJobs"]
        spec = budgets.pop(each["metadata"]["name"])
        assert (spec["minAvailable"], "maxUnavailable" in spec) == (hosts["template"]["spec"]["parallelism"], False)
    has_redis = any(component_of(each) == "redis" for each in pod_templates(manifests).values())
    wanted = {"rollout": 1} | ({"redis": 0} if has_redis else {})
    wanted |= {"trainer": 0} if "trainer" in budgets else {}
    assert {name: spec["maxUnavailable"] for name, spec in budgets.items()} == wanted


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_a_job_that_has_ended_stays_for_a_week_and_goes(name: str) -> None:
    (job,) = kinds(overlay(name), "Job")
    assert job["spec"]["ttlSecondsAfterFinished"] == 7 * 24 * 3600


@pytest.mark.parametrize("name", ["single-node-gpu", "cluster"])
def test_a_trainer_pod_holds_what_its_ranks_keep_in_host_memory(name: str) -> None:
    """A checkpoint that is written beside the training included."""
    config = load_config(REPO / "deploy" / "overlays" / name / "run.yaml")
    (template,) = (each for each in pod_templates(overlay(name)).values() if component_of(each) == "trainer")
    (container,) = containers(template)
    limit = float(parse_quantity(container["resources"]["limits"]["memory"]))
    ranks = int(environment(container)["TANDEM_RANKS_PER_HOST"]["value"])
    spec = preset(config.model.path.name.lower())
    assert host_memory(config, spec, ranks) < 0.9 * limit
    # and the checker says so of half the memory
    half = {**container, "resources": {"limits": {**container["resources"]["limits"], "memory": str(int(limit / 2))}}}
    template = {**template, "spec": {**template["spec"], "containers": [half]}}
    (problem,) = _host_memory("StatefulSet/trainer", config, template, ranks)
    assert (problem.key, problem.severity) == ("StatefulSet/trainer", "error")
    assert f"{ranks} ranks on a host take " in problem.message
