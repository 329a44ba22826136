"""The trainer takes the NCCL settings that SGLang's engines have; what somebody has set stays."""

import pytest

from weightsync.nccl_settings import NCCL_SETTINGS, settle_nccl_settings

H100, GB200 = "NVIDIA H100 80GB HBM3", "NVIDIA GB200"
OFF = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
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
    ],
)
def test_what_a_trainer_rank_gets(
    gpu_name: str, engine_hosts: int, before: dict[str, str], after: dict[str, str]
) -> None:
    environ = dict(before)
    settle_nccl_settings(environ, gpu_name=gpu_name, engine_hosts=engine_hosts)
    assert environ == after


def test_what_is_settled_is_compared() -> None:
    assert set(FABRIC) <= set(NCCL_SETTINGS)
