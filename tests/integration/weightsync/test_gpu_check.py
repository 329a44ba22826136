"""gpu-check's processes, rounds and checks for real, with the tensors on the CPU: what is left for a GPU is the GPU."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tools.gpu_check import fleet
from tools.gpu_check.cases import Case
from tools.gpu_check.fleet import redis_url, run_case
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.services.fleet import running
from tools.gpu_check.services.resume import load_folder
from tools.gpu_check.services.rounds import check_parity, check_round
from tools.gpu_check.services.samples import train_step
from tools.gpu_check.services.settings import SCALES, Shape
from tools.gpu_check.services.trainers import TRAINERS, check_trainer

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
    # fewer than 256 KiB of a message share a segment; the layers are smaller, the embedding and output layer are not
    assert result["segments"] >= 2
    assert result["segments_per_s"] == result["segments"] / result["seconds"]["transfer"]
    assert set(result["seconds"]) == {"prepare", "transfer", "verify", "commit", "total"}
    # bfloat16; embedding and output layer, then per layer qkv, o, gate, up, down (4 + 2 + 4 + 4 + 4) and norms
    assert result["bytes"] == 2 * (2 * 98 * 64 * 64 + 2 * (18 * 64 * 64 + 2 * 64 + 2 * 8) + 64)


@pytest.mark.slow
def test_a_rank_that_fails_is_the_case_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "PHASES", ("PREPARE", "VERIFY"))
    with redis_url() as url:
        result = run_case(case("collective", "in_place"), url, **SIZE)
    assert not result["exact"]
    assert "has not done TRANSFER" in result["error"]


@pytest.mark.slow
async def test_a_round_of_real_services_passes_and_one_wrong_value_is_seen() -> None:
    right, wrong, stale = Findings(), Findings(), Findings()
    async with running(Shape(name="TP1 -> TP1", tensor=1, rollout_tensor=1), SCALES["cpu"]) as real:
        samples = await check_round(real, right, "round", install="staged")
        export = real.export
        real.export = lambda: spoilt(export)  # type: ignore[method-assign]
        await check_round(real, wrong, "round")
        await train_step(real, "unpublished", samples)
        await check_parity(real, stale, "log-probs", "rollout-0", 0)
    assert right.failed == []
    assert wrong.failed == ["round"]
    assert wrong.checks[0]["wrong"] == [
        "rollout-0/0: model.layers.1.self_attn.o_proj.weight is not what SGLang's own loader writes"
    ]
    assert stale.failed == ["log-probs"]


async def spoilt(export: Callable[[], Awaitable[Path]]) -> Path:
    """The trainer's export with one value changed: what the round brings is not that."""
    folder = await export()
    tensors = load_folder(folder)
    tensors["model.layers.1.self_attn.o_proj.weight"][3, 5] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
async def test_trainers_of_all_options_train_what_one_rank_does() -> None:
    """In bfloat16 too: what GPUs are given as a limit was measured so."""
    for scale in (SCALES["cpu"], replace(SCALES["cpu"], dtype="bfloat16", layout_limit=SCALES["cuda"].layout_limit)):
        findings = Findings()
        for shapes in TRAINERS.values():
            async with running(shapes[-1], scale) as trainer:
                await check_trainer(trainer, findings)
        assert findings.failed == [], findings.checks
