"""The CPU images, built on a real Docker engine, run the example through compose: to its end, and on after a stop."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.images.compose import resolved, service
from tests.images.conftest import BUILD_S, KINDS
from tests.images.engine import Engine
from tests.images.project import UP_S, Project, make_job, set_iterations
from tests.images.redis_image import provide_redis
from tests.polling import until

RUN_S = 900.0
MAX_COORDINATOR_BYTES = 250_000_000
ENGINES = ("trainer", "rollout-0", "rollout-1")
COMPOSES = [["docker", "compose"], ["docker-compose"]]

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(2 * BUILD_S)]


@pytest.fixture(params=COMPOSES, ids=" ".join)
def project(
    request: pytest.FixtureRequest, docker: Engine, images: dict[str, str], tmp_path: Path
) -> Iterator[Project]:
    """A project of three iterations; goes away with its volumes."""
    command: list[str] = request.param
    if shutil.which(command[0]) is None or subprocess.run([*command, "version"], capture_output=True).returncode != 0:
        pytest.skip(f"no `{' '.join(command)}` on this machine")
    provide_redis(
        docker, resolved(service("redis")["image"]), resolved(service("coordinator")["build"]["args"]["BASE"])
    )
    name = f"tandemtest{abs(hash(tmp_path)) % 10**8}"
    made = Project(engine=docker, command=command, name=name, job=make_job(tmp_path, iterations=3))
    try:
        yield made
    finally:
        made.remove()


def test_the_coordinator_is_small(docker: Engine, images: dict[str, str]) -> None:
    """Of all its layers, unpacked."""
    assert int(docker.run("image", "inspect", "--format", "{{.Size}}", images["coordinator"])) <= MAX_COORDINATOR_BYTES


def test_the_coordinator_has_no_engine_and_works(docker: Engine, images: dict[str, str]) -> None:
    script = """
import importlib.util as util
import kubernetes.client, math_verify, numpy, tokenizers, coordinator.app, launcher.cli
print(*[name for name in ("torch", "transformers", "megatron", "sglang", "pip") if util.find_spec(name)])
print(math_verify.verify(math_verify.parse("$0.5$"), math_verify.parse("$\\\\frac{1}{2}$")))
"""
    said = docker.run("run", "--rm", "--entrypoint", "python", images["coordinator"], "-c", script, timeout_s=300)
    assert said == "\nTrue\n"


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_image_says_of_itself_is_true(docker: Engine, images: dict[str, str], kind: str) -> None:
    found = json.loads(docker.run("image", "inspect", "--format", "{{json .Config}}", images[kind]))
    assert found["User"] == "10001:10001"
    labels = found["Labels"]
    assert labels["org.opencontainers.image.version"] == images[kind].partition(":")[2].removesuffix("-cpu")
    assert len(labels["org.opencontainers.image.revision"]) == 12
    assert "secrets" not in json.dumps(found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrong_setting_is_named_and_exit_code_2(docker: Engine, images: dict[str, str], kind: str) -> None:
    """The image refuses like the program in it."""
    flags = ["--config", "/nowhere.yaml", *(["--name", "rollout-0"] if kind == "rollout" else [])]
    done = subprocess.run(
        [docker.docker, "run", "--rm", "--read-only", "--tmpfs", "/tmp", images[kind], *flags],
        env=docker.environ,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "/nowhere.yaml" in (done.stdout + done.stderr).splitlines()[0]


def test_the_example_runs_to_its_end(project: Project) -> None:
    assert project.exit_code("up", "--no-build", "--exit-code-from", "coordinator", "coordinator") == 0
    assert [row["iteration"] for row in project.rows()] == [1, 2, 3]
    summary = json.loads(project.read("summary.json"))
    assert summary["iterations"] == 3
    assert json.loads(project.read("hf/config.json"))["model_type"] == "qwen3"


@pytest.mark.parametrize("project", [COMPOSES[0]], indirect=True, ids=" ".join)
def test_a_stopped_run_ends_well_and_goes_on(project: Project) -> None:
    """Every process ends on SIGTERM by itself: a code of 137 would be Docker's kill after the grace period."""
    set_iterations(project.job, 100_000)
    project.compose("up", "--no-build", "--detach", "coordinator", timeout_s=UP_S)
    until(lambda: "\n" in project.read("metrics.jsonl"), RUN_S)
    project.compose("stop")
    codes = {name: project.state(name)["ExitCode"] for name in ("coordinator", *ENGINES)}
    assert codes == dict.fromkeys(codes, 0)
    done = project.rows()[-1]["iteration"]
    set_iterations(project.job, done + 3)
    assert project.exit_code("up", "--no-build", "--exit-code-from", "coordinator", "coordinator") == 0
    assert [row["iteration"] for row in project.rows()] == list(range(1, done + 4))
