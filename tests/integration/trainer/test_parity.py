"""Megatron against transformers: import, export, log-probs and a whole GRPO step, at every layout a CPU can show.

Engines of one world size share their processes, since imports cost more than all that they compute.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.integration.trainer.tiny_inputs import CONFIG, KINDS, make_samples, write_samples
from tests.integration.trainer.tiny_models import reference_step, save_model, token_logprobs, with_noisy_rollout

pytestmark = pytest.mark.integration

LAYOUTS = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp2-sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "dp2": {"data_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
}
TOLERANCE = 1e-5
REPOSITORY = Path(__file__).parents[3]


def world_size(layout: str) -> int:
    sizes = LAYOUTS[layout]
    return int(np.prod([v for k, v in sizes.items() if k.endswith("_parallel") and k != "sequence_parallel"]))


def launch(size: int, cases: list[dict[str, Any]], folder: Path) -> None:
    """Run cases in `size` processes. Raises: RuntimeError with the last output of the rank that failed."""
    (folder / f"cases-{size}.json").write_text(json.dumps(cases))
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.trainer.parity_worker"]
    files = [str(folder / f"store-{size}"), str(folder / f"cases-{size}.json"), str(folder)]
    logs = [folder / f"world{size}-rank{rank}.log" for rank in range(size)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [*command, str(rank), str(size), *files],
                    cwd=REPOSITORY,
                    env=os.environ | {"OMP_NUM_THREADS": "1"},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = [process.wait(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        rank = next(i for i, code in enumerate(codes) if code)
        raise RuntimeError(f"rank {rank} of {size} ended with {codes[rank]}:\n{logs[rank].read_text()[-3000:]}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that the reference and the engines computed."""
    folder = tmp_path_factory.mktemp("parity")
    reference, cases = {}, {}
    for kind in KINDS:
        model = save_model(kind, folder / kind)
        samples = with_noisy_rollout(make_samples(), model)
        write_samples(samples, folder / f"{kind}.npz")
        with torch.no_grad():
            logprobs, entropies = token_logprobs(model, samples, range(len(samples)), CONFIG["grpo"]["temperature"])
        metrics = reference_step(model, samples)
        reference[kind] = {
            "logprobs": logprobs.numpy(),
            "entropies": entropies.numpy(),
            "metrics": metrics,
            "samples": samples,
            "after": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        }
    for layout in LAYOUTS:
        for kind in KINDS:
            name = f"{kind}-{layout}"
            files = {"model": str(folder / kind), "samples": str(folder / f"{kind}.npz")}
            cases.setdefault(world_size(layout), []).append({"name": name, "layout": LAYOUTS[layout], **files})
    for size, of_size in cases.items():
        launch(size, of_size, folder)
    return {"folder": folder, "reference": reference}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


every_case = pytest.mark.parametrize(("kind", "layout"), [(k, p) for p in LAYOUTS for k in KINDS])


@every_case
def test_import_then_export_is_the_identity(results: dict[str, Any], kind: str, layout: str) -> None:
    folder = results["folder"]
    assert_bitwise(tensors(folder / kind), tensors(folder / f"{kind}-{layout}" / "before"))


@every_case
def test_logprobs_and_entropies_equal_transformers(results: dict[str, Any], kind: str, layout: str) -> None:
    got = np.load(results["folder"] / f"{kind}-{layout}" / "logprobs.npz")
    expected = results["reference"][kind]
    assert np.abs(got["logprobs"] - expected["logprobs"]).max() <= TOLERANCE
    assert np.abs(got["entropies"] - expected["entropies"]).max() <= TOLERANCE


@every_case
def test_train_step_equals_transformers(results: dict[str, Any], kind: str, layout: str) -> None:
    folder, expected = results["folder"] / f"{kind}-{layout}", results["reference"][kind]
    metrics = json.loads((folder / "report.json").read_text())["metrics"]
    assert metrics["loss"] == pytest.approx(expected["metrics"]["loss"], abs=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(expected["metrics"]["grad_norm"], rel=TOLERANCE, abs=TOLERANCE)
    before, after = tensors(folder / "before"), tensors(folder / "after")
    assert max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-4
    assert max(float((after[n] - expected["after"][n]).abs().max()) for n in after) <= TOLERANCE


@every_case
def test_logprob_difference_covers_every_completion_token(results: dict[str, Any], kind: str, layout: str) -> None:
    metrics = json.loads((results["folder"] / f"{kind}-{layout}" / "report.json").read_text())["metrics"]
    expected = results["reference"][kind]
    difference = np.abs(expected["logprobs"] - expected["samples"].rollout_logprobs)
    assert metrics["measured_tokens"] == metrics["tokens"] == difference.size
    assert metrics["logprob_abs_diff_mean"] == pytest.approx(difference.mean(), abs=TOLERANCE)
    assert metrics["logprob_abs_diff_max"] == pytest.approx(difference.max(), abs=TOLERANCE)
    assert metrics["entropy"] == pytest.approx(expected["entropies"].mean(), abs=TOLERANCE)


@every_case
def test_checkpoint_continues_exactly(results: dict[str, Any], kind: str, layout: str) -> None:
    report = json.loads((results["folder"] / f"{kind}-{layout}" / "report.json").read_text())
    assert report["again"] == report["metrics"]


@every_case
def test_overflow_in_the_second_update_changes_nothing(results: dict[str, Any], kind: str, layout: str) -> None:
    folder = results["folder"] / f"{kind}-{layout}"
    message = json.loads((folder / "report.json").read_text())["not_finite"]
    assert "update 1 is not finite" in message
    assert "s22" in message
    assert_bitwise(tensors(folder / "after"), tensors(folder / "after_not_finite"))
