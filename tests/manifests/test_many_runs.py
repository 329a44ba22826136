"""Two runs in one namespace: nothing of one has a name of the other, selects its pods, or speaks to it.

Built by the real kubectl from every overlay and component, as `deploy/README.md` says, with the runs' ids as prefixes.
"""

import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.manifests.kustomize import (
    COMPONENTS,
    DEPLOY,
    OVERLAYS,
    Manifest,
    build,
    combine,
    environment,
    find,
    kinds,
    label,
    matches,
    overlay,
    pod_template,
    pod_templates,
    service_of,
    templates_of,
)
from tests.manifests.schemas import is_custom, problems
from tests.manifests.test_components import combinations, place

RUNS = ("red", "blue")
NAMESPACE = "team-a"
# Shared by runs of a namespace, and made apart from them.
SHARED = {"redis-auth", "run", "models", "registry"}
CASES = [
    ("cluster", ("names",)),
    ("cluster", ("names", "gpu-nccl", "mtls", "autoscale-rollout")),
    (
        "cluster",
        (
            "names",
            "tracing",
            "pull-secret",
            "gpu-nodes",
            "disk-transport",
            "reward-server",
            "environment-server",
            "mtls",
        ),
    ),
    ("cluster", ("names", "mtls", "jobset-trainer", "kueue")),
    ("cluster", ("names", "gpu-nccl", "mtls", "autoscale-rollout", "lws-rollout", "kueue")),
    ("cluster", ("names", "external-redis", "jobset-trainer", "lws-rollout", "kueue")),
    ("single-node-gpu", ("names", "gpu-nodes", "mtls", "monitoring")),
    ("single-node-gpu", ("names", "jobset-trainer", "lws-rollout")),
    ("dev-cpu", ("names",)),
]
Pair = tuple[tuple[Manifest, ...], tuple[Manifest, ...]]


@pytest.fixture(params=CASES, ids=lambda case: "+".join([case[0], *case[1]]), scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    base, components = request.param
    red, blue = (combine(tmp_path_factory.mktemp(run), base, components, run, NAMESPACE) for run in RUNS)
    return red, blue


def names(manifests: tuple[Manifest, ...]) -> set[tuple[str, str]]:
    return {(each["kind"], each["metadata"]["name"]) for each in manifests if each["kind"] != "Namespace"}


def test_no_object_has_a_name_of_the_other_run(runs: Pair) -> None:
    red, blue = map(names, runs)
    assert not red & blue
    assert all(name.startswith("red-") for _, name in red)


def test_all_objects_are_in_the_namespace_that_was_asked_for(runs: Pair) -> None:
    for each in (*runs[0], *runs[1]):
        assert each["metadata"].get("namespace", NAMESPACE) == NAMESPACE, label(each)


def pod_selectors(value: object, key: str = "") -> Iterator[Mapping[str, object]]:
    """Every selector of pods in a tree, but those of another namespace's pods."""
    if isinstance(value, dict):
        if key in ("selector", "labelSelector", "podSelector"):
            yield value
        inside = {
            name: each for name, each in value.items() if not ("namespaceSelector" in value and name == "podSelector")
        }
        for name, each in inside.items():
            yield from pod_selectors(each, name)
    elif isinstance(value, list):
        for each in value:
            yield from pod_selectors(each, key)


def test_nothing_of_a_run_selects_a_pod_of_the_other(runs: Pair) -> None:
    for mine, others in itertools.permutations(runs):
        pods = {owner: template["metadata"]["labels"] for owner, template in pod_templates(others).items()}
        own = [template["metadata"]["labels"] for template in pod_templates(mine).values()]
        taken = set()
        for each in mine:
            for selector in pod_selectors(each):
                chosen = [owner for owner, labels in pods.items() if matches(selector, labels)]
                assert not chosen, f"{label(each)} selects {chosen}: {selector}"
                taken |= {index for index, labels in enumerate(own) if matches(selector, labels)}
        assert taken == set(range(len(own))), "a pod that nothing selects: the test could not fail for it"


def test_what_pods_and_roles_refer_to_is_their_own_runs(runs: Pair) -> None:
    """Secrets, ConfigMaps, claims, accounts: of this run, or one that runs of a namespace share."""
    for mine in runs:
        made = {name for _, name in names(mine)}
        # cert-manager makes these, under the certificates' names.
        secrets = {each["spec"]["secretName"] for each in kinds(mine, "Certificate")}
        assert secrets == {each["metadata"]["name"] for each in kinds(mine, "Certificate")}
        for owner, template in pod_templates(mine).items():
            assert set(references(template)) <= made | SHARED, owner
        for role in kinds(mine, "Role"):
            named = {name for rule in role["rules"] for name in rule.get("resourceNames", [])}
            assert named <= made
        for each in (*kinds(mine, "Certificate"), *kinds(mine, "HorizontalPodAutoscaler")):
            spec = each["spec"]
            used = {spec["issuerRef"]["name"]} if "issuerRef" in spec else {spec["scaleTargetRef"]["name"]}
            used |= {metric["object"]["describedObject"]["name"] for metric in spec.get("metrics", [])}
            assert used <= made, label(each)


def references(template: Manifest) -> Iterator[str]:
    spec = template["spec"]
    if "serviceAccountName" in spec:
        yield spec["serviceAccountName"]
    for volume in spec["volumes"]:
        for kind, key in (("configMap", "name"), ("secret", "secretName"), ("persistentVolumeClaim", "claimName")):
            if kind in volume:
                yield volume[kind][key]
    for container in spec["containers"]:
        for entry in container.get("env", []):
            for source in ("secretKeyRef", "configMapKeyRef"):
                if source in entry.get("valueFrom", {}):
                    yield entry["valueFrom"][source]["name"]
        for source in container.get("envFrom", []):
            yield source["configMapRef"]["name"]


def value_of(template: Manifest, name: str) -> str:
    """A variable as the kubelet would put it together."""
    environ = environment(template["spec"]["containers"][0])
    found = str(environ[name]["value"])
    while match := re.search(r"\$\((\w+)\)", found):
        other = environ[match[1]]
        found = found.replace(match[0], other.get("value", f"<{match[1]}>"))
    return found


def test_addresses_are_of_the_runs_own_services(runs: Pair) -> None:
    for run, mine in zip(RUNS, runs, strict=True):
        services = {each["metadata"]["name"] for each in kinds(mine, "Service")}
        sets = {each["metadata"]["name"] for each in mine if each["kind"] in ("StatefulSet", "LeaderWorkerSet")}
        for template in templates_of(mine, "trainer"):
            pod, _, service = value_of(template, "MASTER_ADDR").partition(".")
            jobset = next(iter(kinds(mine, "JobSet")), None)
            if jobset is None:
                assert (pod, service) == (f"{run}-trainer-0", f"{run}-trainer")
                assert service in services
            else:
                assert (pod, service) == (f"{run}-trainer-hosts-0-0", jobset["spec"]["network"]["subdomain"])
                assert service == jobset["metadata"]["name"]
        for template in templates_of(mine, "coordinator"):
            assert value_of(template, "TANDEM_ROLLOUT_SET") in sets
        for template in pod_templates(mine).values():
            if service_of(template) in ("coordinator", "trainer", "rollout") and f"{run}-redis" in services:
                scheme = "rediss" if kinds(mine, "Certificate") else "redis"
                url = value_of(template, "REDIS_URL")
                assert url == f"{scheme}://tandem:<REDIS_PASSWORD>@{run}-redis:6379/0"
        for certificate in kinds(mine, "Certificate"):
            if certificate["metadata"]["name"] == f"{run}-redis-tls":
                assert certificate["spec"]["dnsNames"] == [f"{run}-redis"]


def test_every_pod_says_whose_it_is(runs: Pair) -> None:
    for run, mine in zip(RUNS, runs, strict=True):
        for owner, template in pod_templates(mine).items():
            assert template["metadata"]["labels"]["tandem.run/id"] == run, owner


def test_they_are_valid(runs: Pair) -> None:
    for mine in runs:
        assert not [problem for each in mine if not is_custom(each) for problem in problems(each, "1.36")]


def test_without_the_component_the_other_redis_is_asked(tmp_path: Path) -> None:
    """What `names` is for, and that the tests above would see it missing."""
    without = combine(tmp_path, "cluster", [], "red", NAMESPACE)
    environ = environment(pod_template(find(without, "Job", "red-coordinator"))["spec"]["containers"][0])
    assert "value" not in environ["REDIS_URL"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_without_a_prefix_names_are_the_plain_ones(name: str) -> None:
    sets = {each["metadata"]["name"] for each in kinds(overlay(name), "StatefulSet")}
    assert sets == {"trainer", "rollout", "redis"}
    (trainer,) = templates_of(overlay(name), "trainer")
    assert value_of(trainer, "MASTER_ADDR") == "trainer-0.trainer"


def test_what_a_namespace_needs_once_follows_its_name(tmp_path: Path) -> None:
    places = [os.path.relpath(DEPLOY / name, tmp_path.resolve()) for name in ("namespace", "storage", "queues/local")]
    text = yaml.safe_dump({"namespace": NAMESPACE, "resources": places})
    (tmp_path / "kustomization.yaml").write_text(text, encoding="utf-8")
    made = {(each["kind"], each["metadata"].get("namespace", each["metadata"]["name"])) for each in build(tmp_path)}
    assert made == {(kind, NAMESPACE) for kind in ("Namespace", "PersistentVolumeClaim", "LocalQueue")}


def test_the_readmes_run_builds_beside_another(tmp_path: Path) -> None:
    """The kustomization that deploy/README.md shows, as it stands there."""
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "namePrefix" in each]
    for each in DEPLOY.iterdir():
        (tmp_path / each.name).symlink_to(each)
    folder = tmp_path / "my-run"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text(block, encoding="utf-8")
    (folder / "run.yaml").write_text((DEPLOY / "overlays/cluster/run.yaml").read_text(encoding="utf-8"))
    manifests = build(folder)
    run = yaml.safe_load(block)["namePrefix"].removesuffix("-")
    assert all(name.startswith(f"{run}-") for _, name in names(manifests))
    assert find(manifests, "ConfigMap", f"{run}-run-config")


@pytest.mark.slow
@pytest.mark.parametrize("case", combinations(), ids="+".join)
def test_every_pair_of_components_is_apart(case: tuple[str, ...], tmp_path: Path) -> None:
    base, *pair = case
    components = sorted({*pair, "names"}, key=place)
    built = []
    for run in RUNS:
        (tmp_path / run).mkdir()
        built.append(combine(tmp_path / run, base, components, run, NAMESPACE))
    red, blue = built
    test_no_object_has_a_name_of_the_other_run((red, blue))
    test_nothing_of_a_run_selects_a_pod_of_the_other((red, blue))
    test_what_pods_and_roles_refer_to_is_their_own_runs((red, blue))
    test_addresses_are_of_the_runs_own_services((red, blue))
    assert set(COMPONENTS) >= set(pair)
