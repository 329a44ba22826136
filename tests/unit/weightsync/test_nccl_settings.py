"""The trainer takes the NCCL settings that SGLang's engines have; what somebody has set stays."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_service.app import make_sglang_engine
from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.worker_app import make_sglang_processes
from weightsync.membership.nccl_settings import NCCL_SETTINGS, settle_containers, settle_nccl_settings

H100, GB200 = "NVIDIA H100 80GB HBM3", "NVIDIA GB200"
OFF = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
HOST = {"NCCL_HOSTID": "compose"}
FABRIC = {"NCCL_CUMEM_ENABLE": "1", "NCCL_MNNVL_ENABLE": "1", "NCCL_NVLS_ENABLE": "0"}


@pytest.mark.parametrize(
    ("gpu_name", "engine_hosts", "before", "after"),
    [
        ("", 1, {}, {}),
        (H100, 1, {}, OFF),
        (H100, 2, {}, OFF),
        (GB200, 1, {}, OFF),
        (GB200, 2, {}, FABRIC),
        (GB200, 2, {"NCCL_CUMEM_ENABLE": "0"}, {**FABRIC, "NCCL_CUMEM_ENABLE": "0"}),
        (H100, 1, {"NCCL_NVLS_ENABLE": "1"}, {**OFF, "NCCL_NVLS_ENABLE": "1"}),
        (H100, 1, HOST, {**OFF, **HOST, "NCCL_CUMEM_HOST_ENABLE": "0"}),
    ],
)
def test_what_a_trainer_rank_gets(
    gpu_name: str, engine_hosts: int, before: dict[str, str], after: dict[str, str]
) -> None:
    environ = dict(before)
    settle_nccl_settings(environ, gpu_name=gpu_name, engine_hosts=engine_hosts)
    assert environ == after


def test_what_is_settled_is_compared() -> None:
    assert {*FABRIC, "NCCL_CUMEM_HOST_ENABLE"} <= set(NCCL_SETTINGS)


@pytest.mark.parametrize(
    ("before", "memory"), [({}, None), (HOST, "0"), ({**HOST, "NCCL_CUMEM_HOST_ENABLE": "1"}, "1")]
)
def test_containers_that_are_one_host_share_memory_by_files(before: dict[str, str], memory: str | None) -> None:
    environ = dict(before)
    settle_containers(environ)
    assert environ.get("NCCL_CUMEM_HOST_ENABLE") == memory


def test_every_host_of_an_engine_settles_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settled: list[int] = []
    environment: Any = SimpleNamespace(device="auto", redis_url="", run_id="r", advertise_host="", run_dir=tmp_path)
    monkeypatch.setattr("weightsync.membership.nccl_settings.settle_containers", lambda: settled.append(1))
    monkeypatch.setattr("rollout_service.sglang_engine.engine.SglangEngine", lambda *_, **__: None)
    monkeypatch.setattr("rollout_service.sglang_engine.host.SglangProcesses", lambda *_, **__: None)
    config: Any = SimpleNamespace(rollout=SimpleNamespace(tensor_parallel=1, expert_parallel=1))
    stop: Any = SimpleNamespace(set=None)
    make_sglang_engine(config, "rollout-0", environment, stop, HostRanks())
    assert len(settled) == 1
    make_sglang_processes(config, "rollout-0", environment, HostRanks())
    assert len(settled) == 2
