"""The cases of the parity tests: their references by transformers, their results by processes of our engine."""

import json
import os
import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tandem_config.schema import TrainerSection
from tests.integration.trainer.reference import (
    CONFIG,
    TRAINER_VARIANTS,
    VARIANTS,
    make_samples,
    reference_step,
    saved_tensors,
    token_logprobs,
    write_samples,
)
from tests.integration.trainer.reference import with_noisy_rollout as noisy
from tests.kit.models import save_model, trained_model
from trainer_service.batch.samples import FloatArray, Samples

REPOSITORY = Path(__file__).parents[3]
TIMEOUT_S = 600.0  # of one world size; a tenth of it on two idle cores
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp2-sequence": {"tensor_parallel": 2, "sequence_parallel": True},
    # more ranks than KV heads, where the model has 2 (tp4) or 1 (tp2)
    "tp4": {"tensor_parallel": 4},
    "tp4-sequence": {"tensor_parallel": 4, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
    "dp2": {"data_parallel": 2},
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "pp2-virtual": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "tp2-pp2-virtual": {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2, "sequence_parallel": True},
    "pp2-first": {"pipeline_parallel": 2, "first_stage_layers": 1},
    "pp2-last": {"pipeline_parallel": 2, "last_stage_layers": 1},
    "pp2-embedding": {"pipeline_parallel": 2, "embedding_counts": True},
    "pp2-loss": {"pipeline_parallel": 2, "loss_counts": True},
    "pp2-virtual-both": {
        "pipeline_parallel": 2,
        "virtual_pipeline": 2,
        "embedding_counts": True,
        "loss_counts": True,
    },
    "ep2": {"data_parallel": 2, "expert_parallel": 2},
    "etp2": {"data_parallel": 2, "expert_tensor_parallel": 2},
    "tp2-ep2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    "tp2-etp2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
    "ep2-pp2": {"data_parallel": 2, "expert_parallel": 2, "pipeline_parallel": 2},
    "ep2-pp2-virtual": {
        "data_parallel": 2,
        "expert_parallel": 2,
        "pipeline_parallel": 2,
        "virtual_pipeline": 2,
    },
    "tp2-dp2-ep2-etp2": {
        "tensor_parallel": 2,
        "sequence_parallel": True,
        "data_parallel": 2,
        "expert_parallel": 2,
        "expert_tensor_parallel": 2,
    },
    "cp2": {"context_parallel": 2},
    "cp2-ep2": {"context_parallel": 2, "expert_parallel": 2},
    "tp2-cp2": {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2},
    "cp2-pp2-virtual": {"context_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline": 2},
}


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


BASE = ("tp1", "tp2", "tp2-sequence", "pp2", "dp2", "tp2-pp2")
EXACT = [
    *(Case(kind=kind, layout=layout) for layout in BASE for kind in ("qwen2", "qwen2-tied", "qwen3")),
    *(Case(kind="qwen3", layout=layout, variant="skips") for layout in ("tp1", "dp2", "tp2-pp2")),
    *(Case(kind="qwen3", layout=layout, variant="rollout") for layout in ("tp1", "dp2")),
    *(Case(kind=kind, layout="tp1", variant="decay") for kind in ("qwen2", "qwen3")),
    *(Case(kind="qwen3-moe", layout=layout) for layout in ("tp1", "ep2", "tp2-ep2", "ep2-pp2", "etp2")),
    Case(kind="qwen3-moe-mixed", layout="ep2"),
    *(Case(kind=kind, layout="pp2-virtual") for kind in ("qwen3", "qwen2-tied")),
    *(Case(kind="llama", layout=layout) for layout in ("tp2", "pp2")),
    Case(kind="qwen2", layout="pp2-first"),
    Case(kind="qwen2-5-layers", layout="pp2-embedding"),
    Case(kind="qwen2-tied-6-layers", layout="pp2-virtual-both"),
    *(Case(kind="qwen3", layout=layout) for layout in ("cp2", "cp2-pp2-virtual")),
    Case(kind="qwen3-moe", layout="cp2-ep2"),
    Case(kind="qwen3-kv1", layout="tp2-sequence"),
    Case(kind="qwen2", layout="tp4"),
]
SLOW = [
    *(Case(kind=kind, layout="tp4-sequence") for kind in ("qwen3", "llama", "qwen3-moe", "qwen3-kv1")),
    *(Case(kind=kind, layout=layout) for kind in ("qwen2-kv1", "qwen3-kv1") for layout in ("tp2", "tp2-cp2")),
    *(
        Case(kind="qwen3-moe", layout=layout)
        for layout in ("tp2-sequence", "tp2-etp2", "ep2-pp2-virtual", "tp2-dp2-ep2-etp2")
    ),
    *(Case(kind="qwen3-moe-mixed", layout=layout) for layout in ("tp1", "tp2-ep2", "ep2-pp2")),
    *(Case(kind="llama-tied", layout=layout) for layout in ("tp1", "tp2", "pp2", "pp2-virtual", "tp2-pp2-virtual")),
    Case(kind="qwen2", layout="pp2-last"),
    Case(kind="qwen2-5-layers", layout="pp2-loss"),
    *(Case(kind="qwen2-1-layer", layout=layout) for layout in ("pp2-embedding", "pp2-loss")),  # a stage without layers
    *(Case(kind=kind, layout="tp2-cp2") for kind in ("qwen2", "qwen2-tied", "qwen3-moe")),
    Case(kind="qwen3", layout="cp2", variant="rollout"),
    Case(kind="qwen3-moe", layout="tp2-ep2", variant="decay"),
    Case(kind="qwen3-moe", layout="ep2", variant="skips"),
]
BFLOAT16 = [
    Case(kind="qwen3", layout="tp2", dtype="bfloat16"),
    Case(kind="qwen2-tied", layout="pp2-virtual", dtype="bfloat16"),
    Case(kind="qwen3-moe", layout="ep2", dtype="bfloat16"),
]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What transformers computes."""

    samples: Samples
    logprobs: FloatArray
    entropies: FloatArray
    metrics: dict[str, float]
    after: dict[str, torch.Tensor]


def references(cases: list[Case], folder: Path) -> dict[tuple[str, str], Reference]:
    """By kind and variant; writes each kind's model and samples into the folder."""
    out = {}
    for kind in sorted({case.kind for case in cases}):
        model = save_model(kind, folder / kind)
        samples = noisy(make_samples(), model)
        write_samples(samples, folder / f"{kind}.npz")
        with torch.no_grad():
            logprobs, entropies = token_logprobs(model, samples, range(len(samples)), CONFIG["grpo"]["temperature"])
        for variant in sorted({case.variant for case in cases if case.kind == kind}):
            trained = trained_model(kind)
            decay = TRAINER_VARIANTS.get(variant, {}).get("weight_decay", 0.0)
            metrics = reference_step(trained, samples, CONFIG["grpo"] | VARIANTS[variant], decay)
            out[kind, variant] = Reference(
                samples=samples,
                logprobs=logprobs.numpy(),
                entropies=entropies.numpy(),
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
    others = [each for each in earlier if (each.kind, each.layout, each.dtype) != (case.kind, case.layout, case.dtype)]
    return others[-1].name if others else "none"


def _describe(case: Case, folder: Path, foreign: str) -> dict[str, Any]:
    return {
        "foreign": str(folder / foreign / "checkpoint"),
        "name": case.name,
        "model": str(folder / case.kind),
        "dtype": case.dtype,
        "samples": str(folder / f"{case.kind}.npz"),
        "layout": LAYOUTS[case.layout],
        "trainer": TRAINER_VARIANTS.get(case.variant, {}),
        "grpo": CONFIG["grpo"] | VARIANTS[case.variant],
    }


def launch(size: int, folder: Path) -> None:
    """Raises: RuntimeError: with the last output of the rank that failed."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.integration.trainer.parity_worker"]
    # Another group's processes have met at a store of their own, which would send these to them.
    files = [str(folder / f"store-{uuid.uuid4().hex}"), str(folder / f"cases-{size}.json"), str(folder)]
    logs = [folder / f"world{size}-rank{rank}.log" for rank in range(size)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            arguments = [*command, str(rank), str(size), *files]
            processes.append(subprocess.Popen(arguments, cwd=REPOSITORY, env=environment, stdout=output, stderr=output))
    try:
        codes = [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [rank for rank, code in enumerate(codes) if code]
    if failed:
        texts = "\n".join(logs[rank].read_text()[-3000:] for rank in failed)
        raise RuntimeError(f"ranks {failed} of {size} ended with {codes}:\n{texts}")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a Hugging Face folder."""
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
