"""Unusual config.json files that are accepted: Megatron's log-probs are those of transformers on the same folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.trainer.reference import CONFIG, TIMEOUT_S, launch, make_samples, token_logprobs, write_samples
from tests.kit.models import ROPE, as_sglang_scales, load, save_model
from trainer_service.micro_batches.chunks import CHUNK_BYTES
from trainer_service.micro_batches.samples import Samples

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(2 * TIMEOUT_S)]
PLAIN = {"rope_type": "default"}
BARE_ROPE = {key: value for key, value in ROPE.items() if key != "rope_theta"}
SHORT, LONGEST = 16, 64  # tokens: before scaling, and of samples
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": SHORT}
RAMP = {"beta_fast": 1.0, "beta_slow": 0.05, "truncate": False}  # so that it shows in 16 dimensions
# name: the kind of model, what its config.json gets (None: loses)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "theta beside the parameters": ("qwen3", {"rope_parameters": PLAIN, "rope_theta": 1e6}),
    "theta in the scaling": ("qwen2", {"rope_parameters": None, "rope_scaling": PLAIN | {"rope_theta": 1e6}}),
    "scaling replaces parameters": ("qwen3", {"rope_parameters": PLAIN, "rope_scaling": BARE_ROPE, "rope_theta": 5e5}),
    "scaling takes the scaling away": ("llama", {"rope_scaling": PLAIN | {"rope_theta": ROPE["rope_theta"]}}),
    "old spelling of the type": (
        "llama",
        {
            "rope_parameters": None,
            "rope_theta": 5e5,
            "rope_scaling": {**BARE_ROPE, "type": "llama3", "rope_type": None},
        },
    ),
    "window where no layer slides": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4, "layer_types": None},
    ),
    "window that layer types keep off": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention"] * 4},
    ),
    "yarn of Qwen's card": ("qwen2", {"rope_parameters": None, "rope_theta": 1e6, "rope_scaling": YARN}),
    "yarn in transformers 5's spelling": (
        "qwen3",
        {"rope_parameters": {**YARN, **RAMP, "rope_type": "yarn", "mscale": 0.9, "mscale_all_dim": 0.4}},
    ),
    "yarn in a mixture": ("qwen3-moe", {"max_position_embeddings": SHORT, "rope_parameters": YARN}),
    "yarn in a llama": ("llama", {"rope_parameters": {**YARN, "beta_fast": 16, "rope_theta": 5e5}}),
    **{
        f"{kind} in a {family}": (
            family,
            {"max_position_embeddings": SHORT, "rope_parameters": {"rope_type": kind, "factor": 4.0}},
        )
        for kind in ("linear", "dynamic")
        for family in ("qwen2", "llama")
    },
    "single expert without norm": ("qwen3-moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
}


def rewrite(folder: Path, entries: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | entries
    for name, value in list(config.items()):
        if isinstance(value, dict):
            config[name] = {key: each for key, each in value.items() if each is not None}
        if value is None and name in entries:
            del config[name]
    (folder / "config.json").write_text(json.dumps(config))


def samples() -> Samples:
    """Samples, one of the longest length."""
    made = make_samples(seed=4, longest=LONGEST)
    assert made.lengths.max() == LONGEST
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, computed by one process."""
    folder = tmp_path_factory.mktemp("unusual")
    write_samples(samples(), folder / "samples.npz")
    for name, (kind, entries) in CASES.items():
        save_model(kind, folder / "models" / name)
        rewrite(folder / "models" / name, entries)
    described = [
        {
            "foreign": str(folder / "none"),
            "name": name,
            "model": str(folder / "models" / name),
            "dtype": "float32",
            "samples": str(folder / "samples.npz"),
            "layout": {},
            "trainer": {},
            "chunk_bytes": CHUNK_BYTES,
            "grpo": CONFIG["grpo"],
        }
        for name in CASES
    ]
    (folder / "cases-1.json").write_text(json.dumps(described))
    launch(1, folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_logprobs_are_those_of_transformers(folder: Path, name: str) -> None:
    model = as_sglang_scales(load(folder / "models" / name), LONGEST)
    expected, got = samples(), np.load(folder / name / "logprobs.npz")
    with torch.no_grad():
        logprobs, entropies = token_logprobs(model, expected, range(len(expected)), CONFIG["grpo"]["temperature"])
    assert np.abs(got["logprobs"] - logprobs.numpy()).max() <= 1e-5
    assert np.abs(got["entropies"] - entropies.numpy()).max() <= 1e-5
