"""docker-compose.yml says what the services' settings, the Dockerfiles, the monitoring files and the document say."""

import itertools
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from servicekit.environment import ServiceEnvironment
from servicekit.rpc.health import LIVENESS, READINESS
from tandem_config.loading import load_config
from tests.house.repository import REPO
from tests.images.compose import FILE, OURS, SCALED, VARIABLE, compose, of_profile, resolved, service, variables
from tests.images.dockerfiles import read
from tests.images.test_dockerfiles import ENTRYPOINTS, GPU_BASE
from tests.manifests.nccl_rule import EVERY, GpuContainer, faults, transport
from tests.manifests.test_settings import known_flags
from weightsync.membership.nccl_settings import settle_nccl_settings

KIND = {name: kind for kind, names in OURS.items() for name in names}
SERVICES = sorted(KIND)
COMPOSE_TIMEOUT_S = 60.0

OF_THE_COORDINATOR = {"TANDEM_WEB_PORT", "TANDEM_KUBE_NAMESPACE", "TANDEM_ROLLOUT_SET", "TANDEM_TRAINER_SET"}
# Read by trainer_service.host, which is not imported here: a test runs it as a program.
OF_THE_TRAINER = {"TANDEM_RANKS_PER_HOST", "TANDEM_HOST_INDEX"}

# Read by NCCL and CUDA themselves, where there are GPUs.
OF_NCCL = {"NCCL_HOSTID", "CUDA_VISIBLE_DEVICES"}
ON_GPUS = sorted(name for name in SERVICES if service(name)["build"].get("target") == "gpu")

# Settings that one machine's private network does without, and why; all others are set.
UNSET = {
    "TANDEM_KUBE_NAMESPACE": "there is no Kubernetes",
    "TANDEM_ROLLOUT_SET": "there is no set, and no Kubernetes",
    "TANDEM_TRAINER_SET": "there is no Kubernetes",
    "TANDEM_WORKER_ID": "each coordinator makes one; only the launcher gives a lead up in another's place",
    "TANDEM_RUN_TOKEN": "services meet on the project's own network; a person may set it from a secret of theirs",
    "TANDEM_REDIS_CA": "Redis is reached without TLS, on the project's own network",
    "TANDEM_REDIS_CERT": "Redis is reached without TLS, on the project's own network",
    "TANDEM_REDIS_KEY": "Redis is reached without TLS, on the project's own network",
    "TANDEM_REDIS_WAIT_S": "services start once Redis is healthy, so the default is long enough",
    "TANDEM_TLS_CA": "services meet on the project's own network, without TLS",
    "TANDEM_TLS_CERT": "services meet on the project's own network, without TLS",
    "TANDEM_TLS_KEY": "services meet on the project's own network, without TLS",
    "TANDEM_RANKS_PER_HOST": "all ranks of the trainer are in its one container, which is the default",
    "TANDEM_HOST_INDEX": "all ranks of the trainer are in its one container, which is the default",
}
# Flags that are for Kubernetes.
UNUSED_FLAGS = {
    "--interrupted-exit": "a Job takes 0 for finished; here nobody restarts the coordinator",
    "--retry-exit": "a Job counts failures over its whole life; here nobody restarts the coordinator",
}


def settings_of(kind: str) -> set[str]:
    """Every variable that a service of ours reads."""
    shared = {field.alias for field in ServiceEnvironment.model_fields.values() if field.alias is not None}
    if kind == "trainer":
        shared |= OF_THE_TRAINER
    return shared if kind == "coordinator" else shared - OF_THE_COORDINATOR


@pytest.mark.parametrize("name", SERVICES)
def test_the_environment_is_what_the_service_reads(name: str) -> None:
    """Both ways: nothing that it does not know, and nothing left out but what UNSET gives a reason for."""
    known, given = settings_of(KIND[name]), set(service(name)["environment"])
    given |= {"TANDEM_ADVERTISE_HOST"} if name == SCALED else set()  # by its entrypoint
    assert given - known == (OF_NCCL if name in ON_GPUS else set())
    assert known - given == known & set(UNSET)


@pytest.mark.parametrize("name", SERVICES)
def test_the_environment_is_accepted(name: str) -> None:
    environ = {key: str(value) for key, value in service(name)["environment"].items()}
    environ |= {"TANDEM_ADVERTISE_HOST": SCALED} if name == SCALED else {}
    found = ServiceEnvironment.from_env(environ | {"TANDEM_RUN_DIR": str(REPO)})
    assert found.advertise_host == name.removesuffix("-gpu")


def test_reasons_are_given() -> None:
    assert set(UNSET) <= settings_of("coordinator") | settings_of("trainer"), "a setting that is no more"
    assert [name for name, reason in {**UNSET, **UNUSED_FLAGS}.items() if len(reason) < 20] == []


@pytest.mark.parametrize("name", SERVICES)
def test_flags_are_those_of_the_program(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: none that it does not know, and none left out but what UNUSED_FLAGS gives a reason for."""
    known = known_flags(ENTRYPOINTS[KIND[name]], monkeypatch)
    words = [*" ".join(service(name).get("entrypoint", [])).split(), *service(name)["command"]]
    used = {word for word in words if word.startswith("--")}
    assert used == known - set(UNUSED_FLAGS) - (set() if "standby" in name else {"--standby"})


def test_a_replica_of_a_scaled_service_is_called_and_reached_by_its_container(tmp_path: Path) -> None:
    """As the shell of the image starts it, whose first process it is then."""
    found = service(SCALED)
    (tmp_path / "python").write_text('#!/bin/sh\necho "$TANDEM_ADVERTISE_HOST" "$$" "$@"\n')
    (tmp_path / "python").chmod(0o755)
    command = [word.replace("$$", "$") for word in [*found["entrypoint"], *found["command"]]]
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOSTNAME": "3f2a9c81b0de"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as started:
        said, _ = started.communicate(timeout=30)
    assert said.split() == [
        "3f2a9c81b0de",
        str(started.pid),
        *("-m", "rollout_service", "--name", "rollout-3f2a9c81b0de"),
        *found["command"],
    ]


@pytest.mark.parametrize("name", sorted(set(SERVICES) - {SCALED}))
def test_it_is_reached_under_the_name_that_it_gives(name: str) -> None:
    wanted = service(name)["environment"]["TANDEM_ADVERTISE_HOST"]
    aliases = service(name).get("networks", {}).get("default", {}).get("aliases", [])
    assert wanted == name or wanted in aliases


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_replicas_are_those_of_the_example(profile: str) -> None:
    config = load_config(REPO / "examples" / "arithmetic" / "arithmetic.yaml")
    commands = [service(name)["command"] for name in of_profile(profile) if KIND.get(name) == "rollout"]
    names = sorted(command[command.index("--name") + 1] for command in commands)
    assert names == [f"rollout-{index}" for index in range(config.rollout.replicas)]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_starts_one_of_each(profile: str) -> None:
    kinds = sorted(KIND.get(name, name) for name in of_profile(profile))
    assert kinds == ["coordinator", "grafana", "prometheus", "redis", "rollout", "rollout", "trainer"]
    for name in of_profile(profile):
        assert set(service(name).get("depends_on", {})) <= of_profile(profile)


def test_the_default_profile_is_cpu() -> None:
    assert "\nCOMPOSE_PROFILES=cpu\n" in (REPO / ".env").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", sorted(compose()["services"]))
def test_everything_starts_when_what_it_needs_is_healthy(name: str) -> None:
    for needed, how in service(name).get("depends_on", {}).items():
        assert how == {"condition": "service_healthy"}
        assert "healthcheck" in service(needed), needed


@pytest.mark.parametrize("name", SERVICES)
def test_nobody_waits_for_a_rollout_to_have_weights(name: str) -> None:
    """The coordinator gives them to it, so a coordinator that waited for its readiness would wait for itself."""
    assert service(name)["healthcheck"]["test"][:4] == ["CMD", "python", "-m", "servicekit.rpc.probe"]
    assert service(name)["healthcheck"]["test"][4] == (READINESS if KIND[name] == "trainer" else LIVENESS)


@pytest.mark.parametrize("name", sorted(compose()["services"]))
def test_images_are_pinned(name: str) -> None:
    image, _, tag = resolved(service(name)["image"]).partition(":")
    assert image
    assert re.search(r"\d+\.\d+", tag), tag
    if name in KIND:
        version = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
        on_cpu = "gpu" not in service(name)["profiles"] and KIND[name] != "coordinator"
        assert (image, tag) == (f"registry.invalid/tandem/{KIND[name]}", f"{version}-cpu" if on_cpu else version)


@pytest.mark.parametrize("name", sorted(compose()["services"]))
def test_no_image_of_ours_can_be_somebody_elses(name: str) -> None:
    """A name without a registry is one of docker.io, where anybody may take the user `tandem`."""
    image = resolved(service(name)["image"])
    assert "tandem" not in image or image.startswith("registry.invalid/tandem/")


@pytest.mark.parametrize("name", SERVICES)
def test_builds_are_those_of_the_dockerfiles(name: str) -> None:
    build, file = service(name)["build"], read(KIND[name])
    assert build["dockerfile"] == f"deploy/images/{KIND[name]}.Dockerfile"
    assert build.get("target", "final") in {stage.name for stage in file.stages}
    known = set(file.arguments) | {text.partition("=")[0] for text in file.all("ARG")}
    assert set(build["args"]) <= known
    gpu = build.get("target") == "gpu"
    assert resolved(build["args"]["BASE"]) == (GPU_BASE if gpu else file.arguments["BASE"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_can_gain_nothing(name: str) -> None:
    assert service(name)["cap_drop"] == ["ALL"]
    assert service(name)["security_opt"] == ["no-new-privileges:true"]
    assert service(name)["read_only"] is True
    assert not {"privileged", "user", "network_mode"} & set(service(name))
    # CUDA finds the memory of another container's process by its id; all are user 10001 without a capability
    assert service(name).get("pid") == service(name).get("ipc") == ("host" if name in ON_GPUS else None)


@pytest.mark.parametrize("name", sorted(compose()["services"]))
def test_ports_are_published_on_the_loopback_address(name: str) -> None:
    for port in service(name).get("ports", []):
        assert resolved(port).startswith("127.0.0.1:")


def test_the_gpu_profile_has_a_gpu_for_every_rank() -> None:
    config = load_config(REPO / "examples" / "arithmetic" / "arithmetic.yaml")
    wanted = {"trainer": config.trainer.world_size, "rollout": config.rollout.tensor_parallel, "coordinator": 0}
    for name in sorted(of_profile("gpu") & set(KIND)):
        on_gpu = name in ON_GPUS
        assert on_gpu == ("deploy" in service(name)), name
        assert service(name)["environment"]["TANDEM_DEVICE"] == ("cuda" if on_gpu else "auto"), name
        assert len(gpu_container(name).uses if on_gpu else ()) == wanted[KIND[name]], name


def test_every_gpu_reaches_every_other_over_nvlink() -> None:
    """NCCL's rule, whole: a part of it alone makes NCCL choose a path that then fails, in the first PREPARE."""
    assert len(ON_GPUS) == 3
    for one, other in itertools.combinations(map(gpu_container, ON_GPUS), 2):
        assert (transport(one, other), faults(one, other)) == ("P2P", []), f"{one.name} and {other.name}"


def gpu_container(name: str) -> GpuContainer:
    """A service, as NCCL sees it: with what each of its processes sets before NCCL starts."""
    found = service(name)
    (reserved,) = found["deploy"]["resources"]["reservations"]["devices"]
    devices = EVERY if reserved.get("count") == "all" else frozenset(reserved["device_ids"])
    settle_nccl_settings(environ := dict(found["environment"]), gpu_name="NVIDIA H100 80GB HBM3")
    assert environ["NCCL_CUMEM_HOST_ENABLE"] == "0", "file descriptors do not cross networks"
    return GpuContainer(
        name=name,
        devices=devices,
        uses=frozenset(environ["CUDA_VISIBLE_DEVICES"].split(",")) if "CUDA_VISIBLE_DEVICES" in environ else devices,
        ipc=found.get("ipc", name),
        pids=found.get("pid", name),
        network=found.get("network_mode", name),
        environment=environ,
    )


@pytest.mark.parametrize("name", SERVICES)
def test_what_is_compiled_at_run_time_can_be_loaded(name: str) -> None:
    """HOME is /tmp, where Triton, flashinfer and inductor put shared objects; Docker's tmpfs is noexec by default."""
    assert service(name)["tmpfs"] == ["/tmp:exec,mode=1777"]


def test_prometheus_scrapes_what_the_services_serve() -> None:
    scraped = yaml.safe_load((REPO / "deploy" / "monitoring" / "prometheus.yml").read_text(encoding="utf-8"))
    found = {
        target for job in scraped["scrape_configs"] for each in job["static_configs"] for target in each["targets"]
    }
    services = [service(name)["environment"] for name in of_profile("cpu") & set(KIND)]
    assert found == {f"{each['TANDEM_ADVERTISE_HOST']}:{each['TANDEM_METRICS_PORT']}" for each in services}


@pytest.mark.parametrize("name", sorted(compose()["services"]))
def test_what_is_mounted_exists(name: str) -> None:
    for mount in service(name).get("volumes", []):
        source = resolved(mount).partition(":")[0]
        assert source in compose()["volumes"] or (REPO / source).exists(), source


def test_the_document_lists_every_variable() -> None:
    """Both ways, with the same defaults."""
    text = (REPO / "docs" / "docker.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `([A-Z_]+)` \| (?:`([^`]+)`|none) \|", text, flags=re.MULTILINE))
    defaults = {match[1]: match[2] or "" for match in VARIABLE.finditer(FILE.read_text(encoding="utf-8"))}
    assert set(table) == variables()
    assert {name: default for name, default in table.items() if default} == {
        name: default for name, default in defaults.items() if default
    }


@pytest.mark.parametrize("command", [["docker", "compose"], ["docker-compose"]], ids=" ".join)
@pytest.mark.parametrize("profile", ["cpu", "gpu", "reward"])
def test_compose_reads_it(command: list[str], profile: str) -> None:
    """Needs no Docker engine."""
    if shutil.which(command[0]) is None or subprocess.run([*command, "version"], capture_output=True).returncode != 0:
        pytest.skip(f"no `{' '.join(command)}` on this machine")
    done = subprocess.run(
        [*command, "--profile", profile, "config"],
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=COMPOSE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    started = set(yaml.safe_load(done.stdout)["services"])
    # 1.29 shows the services of all profiles, and starts those of the given one.
    assert of_profile(profile) <= started
    if command == ["docker", "compose"]:
        assert started - {SCALED} == of_profile(profile)
