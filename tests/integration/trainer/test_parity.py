"""Megatron against transformers: import, export, log-probs and a whole GRPO step, at every layout a CPU can show."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.trainer.parity_cases import BFLOAT16, EXACT, Case, Reference, references, run, tensors

pytestmark = pytest.mark.integration
TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Results:
    """Everything that the reference and the engines computed."""

    folder: Path
    references: dict[tuple[str, str], Reference]

    def reference(self, case: Case) -> Reference:
        return self.references[case.kind, case.variant]

    def report(self, case: Case) -> dict[str, Any]:
        return json.loads((self.folder / case.name / "report.json").read_text())

    def logprobs(self, case: Case) -> Any:
        return np.load(self.folder / case.name / "logprobs.npz")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("parity")
    expected = references(folder)
    run([*EXACT, *BFLOAT16], folder)
    return Results(folder=folder, references=expected)


def assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


every_case = pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
every_case_of_both_types = pytest.mark.parametrize("case", [*EXACT, *BFLOAT16], ids=lambda case: case.name)


@every_case_of_both_types
def test_import_then_export_is_the_identity(results: Results, case: Case) -> None:
    original = {name: t.to(getattr(torch, case.dtype)) for name, t in tensors(results.folder / case.kind).items()}
    assert_bitwise(original, tensors(results.folder / case.name / "before"))


@every_case
def test_logprobs_and_entropies_equal_transformers(results: Results, case: Case) -> None:
    got, expected = results.logprobs(case), results.reference(case)
    assert np.abs(got["logprobs"] - expected.logprobs).max() <= TOLERANCE
    assert np.abs(got["entropies"] - expected.entropies).max() <= TOLERANCE


@every_case
def test_train_step_equals_transformers(results: Results, case: Case) -> None:
    metrics, expected = results.report(case)["metrics"], results.reference(case)
    assert metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=TOLERANCE, abs=TOLERANCE)
    before, after = (tensors(results.folder / case.name / when) for when in ("before", "after"))
    assert max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-4
    assert max(float((after[n] - expected.after[n]).abs().max()) for n in after) <= TOLERANCE


@every_case
def test_logprob_difference_covers_every_completion_token(results: Results, case: Case) -> None:
    metrics, expected = results.report(case)["metrics"], results.reference(case)
    difference = np.abs(expected.logprobs - expected.samples.rollout_logprobs)
    assert metrics["tokens"] == difference.size
    if case.variant == "rollout":
        assert 0 < metrics["measured_tokens"] < metrics["tokens"]
        return
    assert metrics["measured_tokens"] == difference.size
    assert metrics["logprob_abs_diff_mean"] == pytest.approx(difference.mean(), abs=TOLERANCE)
    assert metrics["logprob_abs_diff_max"] == pytest.approx(difference.max(), abs=TOLERANCE)
    assert metrics["entropy"] == pytest.approx(expected.entropies.mean(), abs=TOLERANCE)


@every_case_of_both_types
def test_checkpoint_continues_exactly(results: Results, case: Case) -> None:
    report = results.report(case)
    assert report["again"] == report["metrics"]


@every_case_of_both_types
def test_checkpoint_of_another_engine_is_refused(results: Results, case: Case) -> None:
    assert "ConfigError" in results.report(case)["foreign"]


@every_case_of_both_types
def test_overflow_in_the_second_update_changes_nothing(results: Results, case: Case) -> None:
    message = results.report(case)["not_finite"]
    assert "NotFinite" in message
    assert "update 1 is not finite" in message
    assert "s22" in message
    folder = results.folder / case.name
    assert_bitwise(tensors(folder / "after"), tensors(folder / "after_not_finite"))


@pytest.mark.parametrize("case", BFLOAT16, ids=lambda case: case.name)
def test_bfloat16_is_near_float32(results: Results, case: Case) -> None:
    got, expected = results.logprobs(case), results.reference(case)
    assert np.abs(got["logprobs"] - expected.logprobs).mean() < 0.1
    metrics = results.report(case)["metrics"]
    assert metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=0.1)
    before, after = (tensors(results.folder / case.name / when) for when in ("before", "after"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
