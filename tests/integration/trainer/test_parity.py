"""Megatron against transformers: import, export, log-probs and a whole GRPO step, at every layout a CPU can show."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.trainer.parity_cases import (
    BFLOAT16,
    EXACT,
    SLOW,
    TIMEOUT_S,
    Case,
    Reference,
    references,
    run,
    tensors,
)
from tests.integration.trainer.reference import CONFIG, make_samples, token_logprobs
from tests.kit.models import ROPE, trained_model

# The test that asks first waits for its whole group: one world size after the other, each with a deadline of its own.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * TIMEOUT_S)]
TOLERANCE = 1e-5


@dataclass
class Results:
    """Everything that the reference and the engines compute: a group of cases, when one of them is asked for."""

    folder: Path
    references: dict[tuple[str, str], Reference] = field(default_factory=dict)
    groups: list[list[Case]] = field(default_factory=lambda: [[*EXACT, *BFLOAT16], SLOW])

    def of(self, case: Case) -> Path:
        """The folder of a case's results."""
        for group in [group for group in self.groups if case in group]:
            self.groups.remove(group)
            self.references |= references(group, self.folder)
            run(group, self.folder)
        return self.folder / case.name

    def reference(self, case: Case) -> Reference:
        self.of(case)
        return self.references[case.kind, case.variant]

    def report(self, case: Case) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.of(case) / "report.json").read_text())
        return report

    def logprobs(self, case: Case) -> Any:
        return np.load(self.of(case) / "logprobs.npz")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(folder=tmp_path_factory.mktemp("parity"))


def assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


slow = [pytest.param(case, marks=pytest.mark.slow) for case in SLOW]
every_case = pytest.mark.parametrize("case", [*EXACT, *slow], ids=lambda case: case.name)
every_case_of_both_types = pytest.mark.parametrize("case", [*EXACT, *BFLOAT16, *slow], ids=lambda case: case.name)


@every_case_of_both_types
def test_import_then_export_is_the_identity(results: Results, case: Case) -> None:
    exported = tensors(results.of(case) / "before")
    original = {name: t.to(getattr(torch, case.dtype)) for name, t in tensors(results.folder / case.kind).items()}
    assert_bitwise(original, exported)


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3", "qwen3-moe", "llama"])
def test_transformers_reads_the_export(results: Results, kind: str) -> None:
    case = next(case for case in EXACT if case.kind == kind and case.layout != "tp1")
    model = AutoModelForCausalLM.from_pretrained(results.of(case) / "before").eval()
    expected = results.reference(case)
    with torch.no_grad():
        rows = range(len(expected.samples))
        logprobs, _ = token_logprobs(model, expected.samples, rows, CONFIG["grpo"]["temperature"])
    assert torch.equal(logprobs, torch.from_numpy(expected.logprobs))


def test_rope_scaling_shows_in_the_reference() -> None:
    samples, model, plain = make_samples(), trained_model("llama"), trained_model("llama")
    plain.config.rope_parameters = {"rope_type": "default", "rope_theta": ROPE["rope_theta"]}
    plain.model.rotary_emb = type(plain.model.rotary_emb)(plain.config)
    with torch.no_grad():
        scaled, unscaled = (token_logprobs(each, samples, range(len(samples)), 1.0)[0] for each in (model, plain))
    assert float((scaled - unscaled).abs().max()) > 100 * TOLERANCE


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
    before, after = (tensors(results.of(case) / when) for when in ("before", "after"))
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
    refused = results.report(case)["foreign"]
    if "/none/checkpoint" in refused:  # the first case of its group has nobody's checkpoint before it
        assert refused.startswith("DamagedCheckpoint")
    else:
        assert refused.startswith("ConfigError")
        assert "is of another run than this" in refused


@every_case_of_both_types
def test_overflow_in_the_second_update_changes_nothing(results: Results, case: Case) -> None:
    message = results.report(case)["not_finite"]
    assert "NotFinite" in message
    assert "update 1 is not finite" in message
    assert "s22" in message
    folder = results.of(case)
    assert_bitwise(tensors(folder / "after"), tensors(folder / "after_not_finite"))


@pytest.mark.parametrize("case", BFLOAT16, ids=lambda case: case.name)
def test_bfloat16_is_near_float32(results: Results, case: Case) -> None:
    got, expected = results.logprobs(case), results.reference(case)
    assert np.abs(got["logprobs"] - expected.logprobs).mean() < 0.1
    metrics = results.report(case)["metrics"]
    assert metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=0.1)
    before, after = (tensors(results.of(case) / when) for when in ("before", "after"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
