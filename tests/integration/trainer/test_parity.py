"""Megatron against transformers: import, export, log-probs and a whole GRPO step, at every layout a CPU can show."""

import json
import re
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tandem_config.schema import TrainerSection
from tests.integration.trainer.groups import Groups, parametrized
from tests.integration.trainer.layouts import LAYOUTS
from tests.integration.trainer.optimizer_step import reference_step
from tests.integration.trainer.reference import (
    CHUNK_VARIANTS,
    CONFIG,
    MASKED_VARIANTS,
    TIMEOUT_S,
    TRAINER_VARIANTS,
    VARIANTS,
    launch,
    make_samples,
    masked,
    token_logprobs,
    write_samples,
)
from tests.kit.models import ROPE, save_model, trained_model
from trainer_service.batch.chunks import CHUNK_BYTES
from trainer_service.batch.samples import FloatArray, Samples
from trainer_service.saved.policy import SavedPolicy
from weightsync.model.spec import ModelSpec

# The test that asks first waits for its whole group: one world size after the other, each with a deadline of its own.
pytestmark = [pytest.mark.integration, pytest.mark.timeout(3 * TIMEOUT_S)]
TOLERANCE = 1e-5
REFERENCE_SEED = 1  # of the other model that the policy is kept near


@dataclass(frozen=True, kw_only=True)
class Case:
    """One engine: model kind, layout, variant of the algorithm, parameter type."""

    kind: str
    layout: str
    variant: str = "full"
    dtype: str = "float32"

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layout}-{self.variant}-{self.dtype}"

    @property
    def world_size(self) -> int:
        return TrainerSection.model_validate(LAYOUTS[self.layout]).world_size


# Most features and ways to divide a model, once; SLOW has the others, and the other pairs of them.
EXACT = [
    *(Case(kind="qwen3", layout=layout) for layout in ("tp1", "tp2-sequence", "dp2", "tp2-pp2")),
    Case(kind="qwen2-tied", layout="pp2"),
    Case(kind="qwen2", layout="tp4"),
    Case(kind="llama", layout="tp2"),
    *(Case(kind="qwen3", layout="dp2", variant=variant) for variant in ("skips", "rollout", "cispo", "epochs")),
    Case(kind="qwen3", layout="tp2-sequence", variant="chunks"),
    Case(kind="qwen3", layout="cp2", variant="gspo"),
    *(Case(kind="qwen3", layout="tp1", variant=variant) for variant in ("decoupled", "decay")),
    Case(kind="qwen2-tied", layout="pp2-virtual", variant="kl"),
    *(Case(kind="qwen3", layout="cp2", variant=variant) for variant in ("masked", "masked-shared")),
    Case(kind="qwen3", layout="tp2-sequence", variant="shared"),
    Case(kind="qwen3", layout="cp2", variant="shared-kl-epochs"),
    Case(kind="qwen3", layout="cp2", variant="recompute-parts"),
    Case(kind="qwen2-tied", layout="pp2-virtual", variant="recompute-one"),
    Case(kind="qwen3", layout="dp2-overlap"),
    Case(kind="qwen2-tied", layout="pp2-dp2-zero"),
    *(Case(kind="qwen3-moe", layout=layout) for layout in ("ep2", "ep2-pp2", "etp2-overlap", "cp2-ep2")),
    Case(kind="qwen2-5-layers", layout="pp2-embedding"),
    Case(kind="qwen3", layout="cp2-pp2-virtual"),
    Case(kind="qwen3-kv1", layout="tp2-sequence"),
]
SLOW = [
    *(Case(kind="qwen3", layout=layout) for layout in ("tp2", "pp2", "cp2", "dp2-zero", "cp2-zero")),
    *(Case(kind="qwen2-tied", layout=layout) for layout in ("tp2", "dp2", "pp2-virtual")),
    *(Case(kind="qwen2", layout=layout) for layout in ("tp2-pp2", "pp2-first")),
    Case(kind="llama", layout="pp2"),
    Case(kind="qwen3", layout="tp2-pp2", variant="skips"),
    Case(kind="qwen2-tied", layout="tp1", variant="chunks"),
    Case(kind="qwen3", layout="cp2", variant="chunks"),
    Case(kind="qwen3", layout="tp2-pp2", variant="gspo"),
    *(Case(kind="qwen3", layout=layout, variant="kl") for layout in ("tp2-sequence", "cp2")),
    Case(kind="qwen3", layout="tp2-pp2", variant="epochs"),
    *(Case(kind="qwen3", layout=layout, variant="masked") for layout in ("dp2", "tp2-pp2")),
    Case(kind="qwen3", layout="cp2", variant="masked-gspo"),
    *(Case(kind="qwen3", layout=layout, variant="shared") for layout in ("dp2", "tp2-pp2")),
    Case(kind="qwen2-tied", layout="pp2-virtual", variant="shared"),
    Case(kind="qwen3", layout="cp2", variant="shared-gspo"),
    Case(kind="qwen2-tied", layout="tp2-cp2", variant="shared-kl-epochs"),
    Case(kind="qwen3", layout="tp2-pp2", variant="recompute"),
    Case(kind="qwen3", layout="dp2-overlap", variant="epochs"),
    Case(kind="qwen3-moe", layout="ep2", variant="recompute"),
    *(Case(kind="qwen3-moe", layout=layout) for layout in ("tp1", "etp2")),
    Case(kind="qwen3-moe-mixed", layout="ep2"),
    Case(kind="qwen2-tied-6-layers", layout="pp2-virtual-both"),
    *(Case(kind="qwen2-tied", layout=layout) for layout in ("tp1", "tp2-sequence", "tp2-pp2")),
    *(Case(kind="qwen2", layout=layout) for layout in ("tp1", "tp2", "tp2-sequence", "pp2", "dp2")),
    Case(kind="qwen3", layout="tp1", variant="skips"),
    Case(kind="qwen3", layout="tp1", variant="rollout"),
    Case(kind="qwen2-tied", layout="pp2", variant="chunks"),
    *(Case(kind="qwen3", layout=layout, variant="gspo") for layout in ("tp1", "dp2")),
    Case(kind="qwen3", layout="tp1", variant="cispo"),
    *(Case(kind="qwen3", layout=layout, variant="kl") for layout in ("tp1", "dp2")),
    Case(kind="qwen2-tied", layout="tp2-pp2", variant="kl"),
    Case(kind="qwen3-moe", layout="ep2", variant="kl"),
    *(Case(kind="qwen3", layout=layout, variant="epochs") for layout in ("tp1", "cp2")),
    *(Case(kind="qwen3", layout=layout, variant="masked") for layout in ("tp1", "tp2-sequence")),
    Case(kind="qwen3", layout="tp1", variant="masked-gspo"),
    Case(kind="qwen3", layout="tp1", variant="shared"),
    Case(kind="qwen3-moe", layout="ep2", variant="shared"),
    Case(kind="qwen3", layout="cp2", variant="shared"),
    Case(kind="qwen3", layout="dp2-cp2", variant="shared-kl-epochs"),
    Case(kind="qwen3-moe", layout="cp2-ep2", variant="shared"),
    Case(kind="qwen2", layout="tp1", variant="decay"),
    *(Case(kind="qwen3", layout=layout, variant="recompute") for layout in ("tp2-sequence", "dp2")),
    Case(kind="qwen3", layout="tp2-sequence", variant="recompute-parts"),
    Case(kind="qwen3", layout="dp2-reduce"),
    Case(kind="qwen2-tied", layout="dp2-overlap"),
    Case(kind="qwen3-moe", layout="ep2-zero"),
    *(Case(kind="qwen3", layout="dp2-overlap", variant=variant) for variant in ("recompute", "skips")),
    Case(kind="qwen3-moe", layout="ep2", variant="recompute-parts"),
    Case(kind="qwen3-moe", layout="tp2-ep2"),
    Case(kind="qwen3", layout="pp2-virtual"),
    *(Case(kind=kind, layout="tp4-sequence") for kind in ("qwen3", "llama", "qwen3-moe", "qwen3-kv1")),
    *(Case(kind=kind, layout=layout) for kind in ("qwen2-kv1", "qwen3-kv1") for layout in ("tp2", "tp2-cp2")),
    *(
        Case(kind="qwen3-moe", layout=layout)
        for layout in ("tp2-sequence", "tp2-etp2", "ep2-pp2-virtual", "tp2-dp2-ep2-etp2")
    ),
    *(Case(kind="qwen3-moe-mixed", layout=layout) for layout in ("tp1", "tp2-ep2", "ep2-pp2")),
    *(Case(kind="llama-tied", layout=layout) for layout in ("tp1", "tp2", "pp2", "pp2-virtual", "tp2-pp2-virtual")),
    *(Case(kind="qwen2-yarn", layout=layout) for layout in ("tp2-cp2", "pp2-virtual")),
    Case(kind="qwen2", layout="pp2-last"),
    Case(kind="qwen2-5-layers", layout="pp2-loss"),
    *(Case(kind="qwen2-1-layer", layout=layout) for layout in ("pp2-embedding", "pp2-loss")),  # a stage without layers
    *(Case(kind=kind, layout="tp2-cp2") for kind in ("qwen2", "qwen2-tied", "qwen3-moe")),
    *(Case(kind="qwen3", layout=layout) for layout in ("tp2-dp2-overlap", "pp2-dp2-overlap")),
    Case(kind="qwen2-tied", layout="pp2-dp2-overlap", variant="kl"),
    Case(kind="qwen3", layout="cp2", variant="rollout"),
    Case(kind="qwen3-moe", layout="tp2-ep2", variant="decay"),
    Case(kind="qwen3-moe", layout="ep2", variant="skips"),
]
BFLOAT16 = [
    Case(kind="qwen3", layout="tp2", dtype="bfloat16"),
    Case(kind="qwen3-moe", layout="ep2", dtype="bfloat16"),
    Case(kind="qwen3", layout="dp2-overlap", dtype="bfloat16"),
]
SLOW_BFLOAT16 = [
    Case(kind="qwen2-tied", layout="pp2-virtual", dtype="bfloat16"),
    Case(kind="qwen3", layout="tp2", variant="recompute", dtype="bfloat16"),
    Case(kind="qwen3", layout="dp2-zero", dtype="bfloat16"),
]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers computes; log-probs and entropies of masked tokens are 0."""

    samples: Samples
    logprobs: FloatArray
    entropies: FloatArray
    metrics: dict[str, float]
    after: dict[str, torch.Tensor]


def saved_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors as it writes them: by expert, where transformers keeps those of a layer as one tensor."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def with_noisy_rollout(samples: Samples, model: Any) -> Samples:
    """The samples with log-probs near the model's own, as an engine with other rounding would return them."""
    with torch.no_grad():
        exact, _ = token_logprobs(model, samples, range(len(samples)), CONFIG["grpo"]["temperature"])
    noise = np.random.default_rng(2).normal(0, 0.2, exact.shape).astype(np.float32)
    return replace(samples, rollout_logprobs=exact.numpy() + noise)


def references(cases: list[Case], folder: Path) -> dict[tuple[str, str], Reference]:
    """By kind and variant; writes each kind's model and samples into the folder."""
    out = {}
    for kind in sorted({case.kind for case in cases}):
        model = save_model(kind, folder / kind)
        save_model(kind, folder / f"{kind}-reference", seed=REFERENCE_SEED)
        plain = with_noisy_rollout(make_samples(), model)
        write_samples(plain, folder / f"{kind}.npz")
        write_samples(masked(plain), folder / f"{kind}-masked.npz")
        with torch.no_grad():
            logprobs, entropies = token_logprobs(model, plain, range(len(plain)), CONFIG["grpo"]["temperature"])
        for variant in sorted({case.variant for case in cases if case.kind == kind}):
            trained = trained_model(kind)
            decay = TRAINER_VARIANTS.get(variant, {}).get("weight_decay", 0.0)
            grpo = CONFIG["grpo"] | VARIANTS[variant]
            samples = masked(plain) if variant in MASKED_VARIANTS else plain
            counts = samples.loss_mask if samples.loss_mask.size else True
            metrics = reference_step(trained, samples, grpo, decay, reference=trained_model(kind, seed=REFERENCE_SEED))
            out[kind, variant] = Reference(
                samples=samples,
                logprobs=np.where(counts, logprobs.numpy(), 0),
                entropies=np.where(counts, entropies.numpy(), 0),
                metrics=metrics,
                after=saved_tensors(trained),
            )
    return out


def run(cases: list[Case], folder: Path) -> None:
    """Results of every case into folder / its name; cases of one world size share their processes."""
    for size in sorted({case.world_size for case in cases}):
        of_size = [case for case in cases if case.world_size == size]
        described = [_describe(case, folder, _before(case, of_size)) for case in of_size]
        (folder / f"cases-{size}.json").write_text(json.dumps(described))
        launch(size, folder)


def _before(case: Case, cases: list[Case]) -> str:
    """Name of an earlier case whose checkpoint does not fit this one; for the first case there is none."""
    earlier = cases[: cases.index(case)]
    others = [each for each in earlier if (each.kind, each.dtype) != (case.kind, case.dtype)]
    return others[-1].name if others else "none"


def _describe(case: Case, folder: Path, foreign: str) -> dict[str, Any]:
    return {
        "foreign": str(folder / foreign / "checkpoint"),
        "name": case.name,
        "model": str(folder / case.kind),
        "dtype": case.dtype,
        "samples": str(folder / f"{case.kind}{'-masked' if case.variant in MASKED_VARIANTS else ''}.npz"),
        "layout": LAYOUTS[case.layout],
        "trainer": TRAINER_VARIANTS.get(case.variant, {}),
        "chunk_bytes": CHUNK_VARIANTS.get(case.variant, CHUNK_BYTES),
        "grpo": CONFIG["grpo"] | VARIANTS[case.variant],
        "reference": str(folder / f"{case.kind}-reference"),
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


class Results:
    """Everything that the reference and the engines compute: a group of cases, when one of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.references: dict[tuple[str, str], Reference] = {}
        self._groups = Groups(self._compute, [*EXACT, *BFLOAT16], [*SLOW, *SLOW_BFLOAT16])

    def of(self, case: Case) -> Path:
        """The folder of a case's results."""
        self._groups.need(case)
        return self.folder / case.name

    def _compute(self, cases: list[Case]) -> None:
        self.references |= references(cases, self.folder)
        run(cases, self.folder)

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
    return Results(tmp_path_factory.mktemp("parity"))


def assert_bitwise(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert sorted(left) == sorted(right)
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


every_case = parametrized("case", EXACT, SLOW)
every_case_of_both_types = parametrized("case", [*EXACT, *BFLOAT16], [*SLOW, *SLOW_BFLOAT16])


@every_case_of_both_types
def test_import_then_export_is_the_identity(results: Results, case: Case) -> None:
    exported = tensors(results.of(case) / "before")
    original = {name: t.to(getattr(torch, case.dtype)) for name, t in tensors(results.folder / case.kind).items()}
    assert_bitwise(original, exported)


@every_case_of_both_types
def test_a_checkpoint_is_read_without_its_ranks_as_they_export_it(results: Results, case: Case) -> None:
    folder = results.of(case)
    spec = ModelSpec.from_folder(results.folder / case.kind)
    with ExitStack() as stack:
        saved = dict(SavedPolicy(folder / "checkpoint", spec, stack))
    assert_bitwise(tensors(folder / "before"), saved)


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
    for name in {"kl_reference"} & (metrics.keys() | expected.metrics.keys()):
        assert metrics[name] == pytest.approx(expected.metrics[name], rel=TOLERANCE)
    before, after = (tensors(results.of(case) / when) for when in ("before", "after"))
    assert max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-4
    assert max(float((after[n] - expected.after[n]).abs().max()) for n in after) <= TOLERANCE


@every_case
def test_logprob_difference_covers_every_completion_token_of_the_policy(results: Results, case: Case) -> None:
    metrics, expected = results.report(case)["metrics"], results.reference(case)
    counts = expected.samples.loss_mask if case.variant in MASKED_VARIANTS else np.s_[:]
    difference = np.abs(expected.logprobs - expected.samples.rollout_logprobs)[counts]
    assert metrics["tokens"] == difference.size
    if case.variant == "rollout":
        assert 0 < metrics["measured_tokens"] < metrics["tokens"]
        return
    assert metrics["measured_tokens"] == difference.size
    assert metrics["logprob_abs_diff_mean"] == pytest.approx(difference.mean(), abs=TOLERANCE)
    assert metrics["logprob_abs_diff_max"] == pytest.approx(difference.max(), abs=TOLERANCE)
    assert metrics["entropy"] == pytest.approx(expected.entropies[counts].mean(), abs=TOLERANCE)


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
    assert re.search(r"\bs(19|22)\b", message)
    folder = results.of(case)
    assert_bitwise(tensors(folder / "after"), tensors(folder / "after_not_finite"))


@parametrized("case", BFLOAT16, SLOW_BFLOAT16)
def test_bfloat16_is_near_float32(results: Results, case: Case) -> None:
    got, expected = results.logprobs(case), results.reference(case)
    assert np.abs(got["logprobs"] - expected.logprobs).mean() < 0.1
    metrics = results.report(case)["metrics"]
    assert metrics["loss"] == pytest.approx(expected.metrics["loss"], abs=0.1)
    before, after = (tensors(results.of(case) / when) for when in ("before", "after"))
    assert any(not torch.equal(before[name], after[name]) for name in before)
