"""gpu-check's processes, rounds and checks for real, with the tensors on the CPU: what is left for a GPU is the GPU."""

import pytest

from tools.gpu_check import fleet
from tools.gpu_check.cases import Case
from tools.gpu_check.fleet import redis_url, run_case

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
SIZE = {"layers": 2, "hidden": 64, "rounds": 2}


def case(transport: str, install: str) -> Case:
    return Case(
        name=f"{transport} {install}",
        transport=transport,
        trainer=2,
        rollout=1,
        install=install,
        num_gpus=1,
        device="cpu",
    )


@pytest.mark.parametrize(
    ("transport", "install"),
    [("collective", "in_place"), pytest.param("colocated", "staged", marks=pytest.mark.slow)],
)
def test_a_case_is_exact_and_timed(transport: str, install: str) -> None:
    with redis_url() as url:
        result = run_case(case(transport, install), url, **SIZE)
    assert (result.get("error"), result.get("wrong")) == (None, [])
    assert result["exact"]
    assert result["gb_per_s"] > 0
    assert set(result["seconds"]) == {"prepare", "transfer", "verify", "commit", "total"}
    # bfloat16; embedding and output layer, then per layer qkv, o, gate, up, down (4 + 2 + 4 + 4 + 4) and norms
    assert result["bytes"] == 2 * (2 * 98 * 64 * 64 + 2 * (18 * 64 * 64 + 2 * 64 + 2 * 8) + 64)


@pytest.mark.slow
def test_a_rank_that_fails_is_the_case_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PHASES", ("PREPARE", "VERIFY"))
    with redis_url() as url:
        result = run_case(case("collective", "in_place"), url, **SIZE)
    assert not result["exact"]
    assert "the round is prepared, it must be transferred" in result["error"]
