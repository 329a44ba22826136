"""The CPU images, built on a real Docker engine, run the example through compose: to its end, and on after a stop."""

import contextlib
import json
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from tests.house.repository import REPO
from tests.images.compose import resolved, service
from tests.images.conftest import BASE, BUILD_S, KINDS
from tests.images.engine import Engine, Unavailable
from tests.images.project import LOOK_S, RUN_DIR, UP_S, Project
from tests.images.stand_ins import provide_prometheus
from tests.kit.waiting import until
from tests.monitoring.live import PrometheusApi
from tests.monitoring.test_rules import ALL_RULES

RUN_S = 900.0
# Scrapes are 5 s apart, evaluations 15 s.
SCRAPED_S = 120.0
MAX_COORDINATOR_BYTES = 400_000_000
ENGINES = ("trainer", "rollout-0", "rollout-1")

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(2 * BUILD_S)]


def test_the_coordinator_is_small(docker: Engine, images: dict[str, str]) -> None:
    """Of all its layers, unpacked."""
    assert int(docker.run("image", "inspect", "--format", "{{.Size}}", images["coordinator"])) <= MAX_COORDINATOR_BYTES


@pytest.mark.runs("make images")
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


@contextlib.contextmanager
def project_of(
    engine: Engine, command: Sequence[str], folder: Path, iterations: int, example: str = "arithmetic"
) -> Iterator[Project]:
    """A project of an example with so many iterations; goes away with its volumes."""
    name = f"tandemtest{uuid.uuid4().hex[:8]}"
    job = make_job(folder, iterations, example)
    made = Project(engine=engine, command=command, name=name, job=job, config=f"{example}.yaml")
    try:
        yield made
    finally:
        made.remove()


def make_job(folder: Path, iterations: int, example: str = "arithmetic") -> Path:
    """An example with a checkpoint after each of fewer iterations, for any user to read."""
    job = folder / "job"
    ignored = shutil.ignore_patterns("*.py" if example == "arithmetic" else "m*.py", "__pycache__")
    shutil.copytree(REPO / "examples" / example, job, ignore=ignored)
    set_iterations(job, iterations, example)
    for path in (job, *job.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return job


def set_iterations(job: Path, iterations: int, example: str = "arithmetic") -> None:
    """Changes run.iterations of a job, and run.checkpoint_every to 1."""
    text = (REPO / "examples" / example / f"{example}.yaml").read_text(encoding="utf-8")
    for key, value in (("iterations", iterations), ("checkpoint_every", 1)):
        text, found = re.subn(rf"^  {key}: \d+$", f"  {key}: {value}", text, flags=re.MULTILINE)
        assert found == 1, key
    (job / f"{example}.yaml").write_text(text, encoding="utf-8")


def never_waiting(config: Path) -> None:
    """Changes the schedule of a copy of the example, and what that needs, to what its user writes for `async`."""
    text = config.read_text(encoding="utf-8")
    assert text.count("\ngrpo:\n") == 1
    text = text.replace("\ngrpo:\n", "\nschedule:\n  kind: async\n\ngrpo:\n  preset: decoupled\n")
    config.write_text(text, encoding="utf-8")


@pytest.mark.runs("docker compose")
def test_the_example_runs_to_its_end(
    docker: Engine, redis_image: str, composes: list[list[str]], tmp_path: Path
) -> None:
    with project_of(docker, composes[0], tmp_path, iterations=3) as project:
        assert project.exit_code("up", "--no-build", "--exit-code-from", "coordinator", "coordinator") == 0
        assert [row["iteration"] for row in project.rows()] == [1, 2, 3]
        summary = json.loads(project.read("summary.json"))
        assert summary["iterations"] == 3
        assert json.loads(project.read("hf/config.json"))["model_type"] == "qwen3"
        # In the trainer's image, which has neither rich nor typer.
        export = ["-m", "trainer_service.export", RUN_DIR, "-c", "/etc/tandem/job/arithmetic.yaml", "--checkpoint", "2"]
        run = [
            "run",
            "--rm",
            "-T",
            "--no-deps",
            "--entrypoint",
            "python",
            "trainer",
            *export,
            "--out",
            f"{RUN_DIR}/at-2",
        ]
        assert f"iteration 2 of {RUN_DIR} is in {RUN_DIR}/at-2" in project.compose(*run)
        assert json.loads(project.read("at-2/tandem_export.json"))["iteration"] == 2


@pytest.mark.runs("docker compose")
def test_an_environment_beside_the_configuration_answers(
    docker: Engine, redis_image: str, composes: list[list[str]], tmp_path: Path
) -> None:
    """The calculator: its tools are a file of the job's folder, which the coordinator's workers import."""
    with project_of(docker, composes[0], tmp_path, iterations=2, example="calculator") as project:
        assert project.exit_code("up", "--no-build", "--exit-code-from", "coordinator", "coordinator") == 0
        rows = project.rows()
        assert [row["failed_episodes"] for row in rows] == [0, 0]
        assert min(row["turns_mean"] for row in rows) > 1.5


def test_the_reward_server_of_the_compose_file_scores(
    docker: Engine, images: dict[str, str], composes: list[list[str]], tmp_path: Path
) -> None:
    """The example, by its profile: healthy, called by its name in the project's network, ended by SIGTERM."""
    script = """
import grpc
from tandem_api.reward.v1 import reward_pb2 as pb, reward_pb2_grpc
sample = pb.Sample(sample_id="a", completion="3 * 4 = 12", answer="12", num_tokens=8)
with grpc.insecure_channel("reward-server:50051") as channel:
    stub = reward_pb2_grpc.RewardServiceStub(channel)
    print(stub.ScoreBatch(pb.ScoreBatchRequest(samples=[sample]), timeout=60).scores[0].value)
"""
    with project_of(docker, composes[0], tmp_path, iterations=1) as project:
        project.compose("--profile", "reward", "up", "--no-build", "--detach", "reward-server", timeout_s=UP_S)
        until(lambda: project.state("reward-server")["Health"]["Status"] == "healthy", RUN_S, interval_s=LOOK_S)
        said = project.compose("--profile", "reward", "exec", "-T", "reward-server", "python", "-c", script)
        assert said.strip() == "1.0"
        project.compose("--profile", "reward", "stop", "reward-server")
        assert project.state("reward-server")["ExitCode"] == 0


@pytest.fixture(scope="module")
def endless(
    docker: Engine, redis_image: str, composes: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Project]:
    """A run that has an iteration behind it and many before it, watched by Prometheus; the last test ends it.

    By docker-compose 1.29 where that is there: `docker compose` has run the example.
    """
    try:
        provide_prometheus(docker, resolved(service("prometheus")["image"]), BASE)
    except Unavailable as why:
        pytest.skip(f"NO PROMETHEUS: {why}")
    with project_of(docker, composes[-1], tmp_path_factory.mktemp("endless"), iterations=100_000) as project:
        project.compose("up", "--no-build", "--detach", "coordinator", "prometheus", timeout_s=UP_S)
        until(lambda: '"iteration": 1' in project.read("metrics.jsonl"), RUN_S, interval_s=LOOK_S)
        yield project


def test_prometheus_watches_every_service_of_a_run(endless: Project) -> None:
    """With the configuration and the rules that the compose file gives it."""
    api = PrometheusApi(f"http://{endless.address('prometheus', 9090)}")
    up = {f"up{{job='{job}'}}": number for job, number in (("coordinator", 1), ("trainer", 1), ("rollout", 2))}
    until(lambda: {query: sum(api.now(query)) for query in up} == up, SCRAPED_S, interval_s=LOOK_S)
    assert endless.state("prometheus")["Health"]["Status"] == "healthy"
    assert {label["replica"] for label in api.labels("tandem_replica_state")} == {"rollout-0", "rollout-1"}
    # Every group is evaluated 15 s after the start, and the first time without data.
    until(lambda: set(api.rules().values()) == {"ok"}, SCRAPED_S, interval_s=LOOK_S)
    assert set(api.rules()) == {rule.get("alert") or rule["record"] for rule in ALL_RULES}
    for recorded in ("tandem:iteration_seconds:mean6h", "tandem:weight_sync_seconds:p95", "tandem:entropy:mean15m"):
        until(partial(api.now, recorded), SCRAPED_S, interval_s=LOOK_S)
        assert min(api.now(recorded)) > 0, recorded


@pytest.mark.parametrize("name", ["coordinator", *ENGINES])
def test_log_lines_say_which_run_and_which_service(endless: Project, name: str) -> None:
    lines = endless.log_lines(name)
    assert len(lines) > 2
    # An engine's ranks are "rollout-rank".
    said = {(line["service"].partition("-")[0], line["run"]) for line in lines}
    assert said == {(name.partition("-")[0], "compose")}
    assert [line for line in lines if not line.keys() >= {"time", "level", "message", "logger"}] == []
    if name.startswith("rollout"):
        assert {line["replica"] for line in lines if line["message"] == "weights committed"} == {name}
    if name == "coordinator":
        within = [line for line in lines if line["message"] == "iteration done"]
        assert [line["iteration"] for line in within] == list(range(1, len(within) + 1))
        assert [line["policy_version"] for line in within] == list(range(len(within)))
    else:
        assert any("policy_version" in line for line in lines)


def test_a_stopped_run_ends_well_and_goes_on(endless: Project) -> None:
    """Every process ends on SIGTERM by itself: a code of 137 would be Docker's kill after the grace period.

    The resume changes the schedule.
    """
    endless.compose("stop")
    codes = {name: endless.state(name)["ExitCode"] for name in ("coordinator", *ENGINES)}
    assert codes == dict.fromkeys(codes, 0)
    done = endless.rows()[-1]["iteration"]
    set_iterations(endless.job, done + 6)
    never_waiting(endless.job / "arithmetic.yaml")
    assert endless.exit_code("up", "--no-build", "--exit-code-from", "coordinator", "coordinator") == 0
    rows = endless.rows()
    assert [row["iteration"] for row in rows] == list(range(1, done + 7))
    # Turns before, none after: samples are older than the policy that they train.
    assert {row["token_age_mean"] for row in rows[1:done]} == {0.0}
    assert max(row["token_age_mean"] for row in rows[done:]) > 0
    assert max(row["staleness_max"] for row in rows[done:]) <= 3
