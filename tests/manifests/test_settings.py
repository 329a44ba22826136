"""Manifests and services know the same ports, variables and flags; both ways, from the services' own code."""

import argparse
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from servicekit.environment import ServiceEnvironment
from tandem_config.loading import load_config
from tandem_config.schema import RunConfig
from tests.house.repository import REPO
from tests.manifests.kustomize import (
    OVERLAYS,
    VARIANTS,
    Manifest,
    containers,
    environment,
    find,
    overlay,
    pod_template,
    pod_templates,
    run_yaml,
    service_of,
    templates_of,
)

SERVICES = ("coordinator", "trainer", "rollout")
# Known to the program that reads it, which is not ours: variable -> who.
FOREIGN = {
    "OMP_NUM_THREADS": "OpenMP",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "OpenTelemetry",
    "REDIS_HOST": "component names: $(REDIS_HOST)",
    "REDIS_PASSWORD": "component names: $(REDIS_PASSWORD)",
    # mtls sets it for names, with or without.
    "REDIS_SCHEME": "components names and mtls: $(REDIS_SCHEME)",
    "TRAINER_SET": "the manifest itself: $(TRAINER_SET)",
    "POD_NAME": "the manifest itself: $(POD_NAME)",
    "SET_NAME": "the component lws-rollout: $(SET_NAME)",
    "GROUP_INDEX": "the component lws-rollout: $(GROUP_INDEX)",
}
# Set by other components or by people only; a pod of the base runs without.
OPTIONAL = {
    "TANDEM_WORKER_ID": "tandem run, which gives a lead up in another's place; a coordinator makes one",
    "TANDEM_RUN_TOKEN": "people: from a Secret of theirs; in a cluster certificates and policies close the services",
    "TANDEM_TLS_CERT": "component mtls",
    "TANDEM_TLS_KEY": "component mtls",
    "TANDEM_TLS_CA": "component mtls",
    "TANDEM_REDIS_CA": "components mtls and external-redis",
    "TANDEM_REDIS_CERT": "an external Redis that asks for client certificates",
    "TANDEM_REDIS_KEY": "an external Redis that asks for client certificates",
}
# Flags that components add.
OF_COMPONENTS = {"--standby"}
# What some services alone read, in their own code: variable -> the services.
OF_SOME_SERVICES = {
    "TANDEM_RANKS_PER_HOST": ("trainer",),
    "TANDEM_HOST_INDEX": ("trainer", "rollout"),
    "MASTER_ADDR": ("trainer",),
    "MASTER_PORT": ("trainer",),
    "TANDEM_KUBE_NAMESPACE": ("coordinator",),
    "TANDEM_ROLLOUT_SET": ("coordinator",),
    "TANDEM_TRAINER_SET": ("coordinator",),
    "TANDEM_WEB_PORT": ("coordinator",),
}
# An engine in one pod is host 0, which is the default.
ONLY_WITH_WORKERS = {"rollout": {"TANDEM_HOST_INDEX"}}
# Read by every service, of no use to this one.
LEFT_OUT = {"coordinator": {"TANDEM_DEVICE"}, "trainer": set(), "rollout": set()}
FOLDERS = {"coordinator": "coordinator", "trainer": "trainer_service", "rollout": "rollout_service"}


def of_all_services() -> set[str]:
    """Environment variables that every service reads."""
    return {field.alias for field in ServiceEnvironment.model_fields.values() if field.alias is not None}


@pytest.fixture(params=["base", *OVERLAYS, *VARIANTS])
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return overlay(request.param)


@pytest.mark.parametrize("service", SERVICES)
def test_every_variable_is_one_that_the_service_reads(manifests: tuple[Manifest, ...], service: str) -> None:
    for environ in given(manifests, service):
        assert set(environ) <= of_all_services() | own_variables(service) | set(FOREIGN)


@pytest.mark.parametrize("service", SERVICES)
def test_every_variable_of_the_service_is_set(manifests: tuple[Manifest, ...], service: str) -> None:
    elsewhere = set(OF_SOME_SERVICES) - own_variables(service)
    wanted = of_all_services() - set(OPTIONAL) - LEFT_OUT[service] - elsewhere | own_variables(service)
    spans_hosts = len(templates_of(manifests, service)) > 1
    wanted -= set() if spans_hosts else ONLY_WITH_WORKERS.get(service, set())
    for environ in given(manifests, service):
        assert wanted <= set(environ)


def test_a_variable_that_the_manifest_itself_wants_is_used(manifests: tuple[Manifest, ...]) -> None:
    for template in pod_templates(manifests).values():
        for container in containers(template):
            values = [entry.get("value", "") for entry in container.get("env", [])]
            words = " ".join([*container.get("command", []), *container.get("args", []), *values])
            used = set(re.findall(r"\$\((\w+)\)", words))
            own = {name for name in environment(container) if "$(" in FOREIGN.get(name, "")}
            assert own - {"REDIS_SCHEME"} <= used
            assert used <= own | {"TANDEM_RUN_ID"}


@pytest.mark.parametrize(("name", "services"), OF_SOME_SERVICES.items())
def test_the_services_really_read_it(name: str, services: tuple[str, ...]) -> None:
    fields = [field for field, info in ServiceEnvironment.model_fields.items() if info.alias == name]
    wanted = f"environment.{fields[0]}" if fields else f'"{name}"'
    for service in services:
        sources = [path.read_text(encoding="utf-8") for path in (REPO / FOLDERS[service]).rglob("*.py")]
        assert [text for text in sources if wanted in text], f"no file of {FOLDERS[service]} says {wanted}"


def own_variables(service: str) -> set[str]:
    return {name for name, owners in OF_SOME_SERVICES.items() if service in owners}


def given(manifests: Sequence[Manifest], service: str) -> list[dict[str, Manifest]]:
    """The environment of each kind of pod that runs the service."""
    return [environment(each["spec"]["containers"][0]) for each in templates_of(manifests, service)]


@pytest.mark.parametrize("service", SERVICES)
def test_ports_are_those_of_the_variables(manifests: tuple[Manifest, ...], service: str) -> None:
    variables = {"grpc": "TANDEM_GRPC_PORT", "health": "TANDEM_HEALTH_PORT", "metrics": "TANDEM_METRICS_PORT"}
    variables |= {"web": "TANDEM_WEB_PORT"} if service == "coordinator" else {}
    variables |= {"rendezvous": "MASTER_PORT"} if service == "trainer" else {}
    for template in templates_of(manifests, service):
        (container,) = template["spec"]["containers"]
        declared = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
        environ = environment(container)
        assert declared == {name: environ[variable]["value"] for name, variable in variables.items()}


def test_pods_with_gpus_refuse_to_run_without(manifests: tuple[Manifest, ...]) -> None:
    for template in pod_templates(manifests).values():
        if service_of(template) in ("trainer", "rollout"):
            (container,) = template["spec"]["containers"]
            has_gpu = "nvidia.com/gpu" in container["resources"]["limits"]
            assert environment(container)["TANDEM_DEVICE"]["value"] == ("cuda" if has_gpu else "auto")


def known_flags(module: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The options of `python -m MODULE`, from its own parser, which goes no further."""
    seen: set[str] = set()

    def stop(parser: argparse.ArgumentParser, *_: object) -> None:
        seen.update(option for action in parser._actions for option in action.option_strings)
        raise SystemExit(0)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(SystemExit):
        runpy.run_module(module, run_name="__main__")
    return seen - {"-h", "--help"}


@pytest.mark.parametrize("service", SERVICES)
def test_flags_are_the_programs_own(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: none that the program does not know, and none of the program's left out."""
    for name in ("base", "cluster + all"):
        for template in templates_of(overlay(name), service):
            (container,) = template["spec"]["containers"]
            python, dash_m, module = container["command"]
            assert (python, dash_m) == ("python", "-m")
            used = {word for word in container["args"] if word.startswith("--")}
            of_components = OF_COMPONENTS if name == "base" else set()
            assert used == known_flags(module, monkeypatch) - of_components


@pytest.mark.parametrize("name", OVERLAYS)
class TestTheRun:
    """The run's YAML and the pods describe the same run."""

    @pytest.fixture
    def config(self, name: str, tmp_path: Path) -> RunConfig:
        path = tmp_path / "run.yaml"
        path.write_text(run_yaml(overlay(name)), encoding="utf-8")
        return load_config(path)

    def test_trainer_pods_hold_all_ranks(self, name: str, config: RunConfig) -> None:
        trainer = find(overlay(name), "StatefulSet", "trainer")
        (environ,) = given(overlay(name), "trainer")
        per_host = int(environ["TANDEM_RANKS_PER_HOST"]["value"])
        assert trainer["spec"]["replicas"] * per_host == config.trainer.world_size

    def test_gpus_are_one_per_rank(self, name: str, config: RunConfig) -> None:
        (environ,) = given(overlay(name), "trainer")
        wanted = {
            "trainer": environ["TANDEM_RANKS_PER_HOST"]["value"],
            "rollout": str(config.rollout.tensor_parallel),
        }
        for service, gpus in wanted.items():
            (container,) = pod_template(find(overlay(name), "StatefulSet", service))["spec"]["containers"]
            found = container["resources"]["limits"].get("nvidia.com/gpu")
            assert found == (None if name == "dev-cpu" else gpus), service

    def test_rollout_pods_are_the_replicas(self, name: str, config: RunConfig) -> None:
        assert find(overlay(name), "StatefulSet", "rollout")["spec"]["replicas"] == config.rollout.replicas
        assert find(overlay(name), "StatefulSet", "rollout")["metadata"]["name"] == config.fleet.rollout_set
        assert config.fleet.kind == "kubernetes"

    def test_the_run_is_named_as_its_label_says(self, name: str, config: RunConfig) -> None:
        labels = pod_template(find(overlay(name), "Job", "coordinator"))["metadata"]["labels"]
        assert labels["tandem.run/id"] == config.run.name

    def test_paths_are_mounted(self, name: str, config: RunConfig) -> None:
        (container,) = pod_template(find(overlay(name), "Job", "coordinator"))["spec"]["containers"]
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        sources = [*config.data.train, *(config.data.heldout or ())]
        assert len(sources) == 2
        for path in (config.model.path, *(source.path for source in sources)):
            inside = any(path.is_relative_to(mount) for mount in mounts)
            # The images of the demo hold it.
            assert inside or str(path).startswith("/opt/tandem/examples/arithmetic/"), path

    def test_a_node_of_eight_gpus_can_meet_each_request(self, name: str, config: RunConfig) -> None:
        for template in pod_templates(overlay(name)).values():
            gpus = template["spec"]["containers"][0]["resources"]["limits"].get("nvidia.com/gpu", "0")
            assert int(gpus) <= 8


def test_the_cluster_has_8_trainer_and_16_rollout_gpus(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(run_yaml(overlay("cluster")), encoding="utf-8")
    config = load_config(path)
    assert config.trainer.world_size == 8
    assert config.rollout.replicas * config.rollout.tensor_parallel == 16


def test_the_laptop_runs_the_demo(tmp_path: Path) -> None:
    """Overlay dev-cpu is examples/arithmetic, with the images' paths, under Kubernetes."""
    folder = REPO / "examples" / "arithmetic"
    path = tmp_path / "run.yaml"
    path.write_text(run_yaml(overlay("dev-cpu")).replace("/opt/tandem/examples/arithmetic", str(folder)))
    wanted, found = load_config(folder / "arithmetic.yaml"), load_config(path)
    assert found.model_copy(update={"fleet": wanted.fleet}) == wanted
