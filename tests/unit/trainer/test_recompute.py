"""Activation recompute in a real engine of one rank: the same bits, and fewer bytes held for the backward pass."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.integration.trainer.reference import NUM_UPDATES, make_samples
from tests.unit.trainer.live_bytes import LiveBytes
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.step.token_loss import TokenState

SAMPLES = make_samples(16)
# One row of all tokens, so that the activations of layers outweigh everything else.
TOKENS = {"max_tokens_per_micro_batch": 512}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attn": {"recompute": "selective"},
    "moe": {"recompute": "selective", "recompute_modules": ["moe"]},
    "one layer": {"recompute": "full", "recompute_layers": 1},
    "full": {"recompute": "full"},
}
# The first engine imports transformers and writes models: a minute on a busy machine.
pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Trained:
    """A step's metrics, the weights after it, and the bytes that the step held at the loss of its last update."""

    metrics: dict[str, float]
    weights: dict[str, torch.Tensor]
    held: int


def train(engine: MegatronEngine, monkeypatch: pytest.MonkeyPatch) -> Trained:
    held, loss = [0], TokenState.loss

    def weighed(*given: Any) -> torch.Tensor:
        held.append(live.total())
        return loss(*given)

    # What lives before the second update is not counted: gradients, optimizer state, copies of both.
    engine.train_step(SAMPLES, NUM_UPDATES)
    with LiveBytes() as live, monkeypatch.context() as patch:
        patch.setattr(TokenState, "loss", weighed)
        metrics = engine.train_step(SAMPLES, NUM_UPDATES).metrics
    weights = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    return Trained(dict(metrics), weights, held[-1])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_recompute_holds_less_and_changes_no_bit(
    make_engine: Callable[..., MegatronEngine], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    found = {name: train(make_engine(dtype, trainer=TOKENS | mode), monkeypatch) for name, mode in MODES.items()}
    kept = found.pop("none")
    for name, each in found.items():
        assert each.metrics == kept.metrics, name
        assert [key for key in kept.weights if not torch.equal(each.weights[key], kept.weights[key])] == [], name
    held = {name: each.held / kept.held for name, each in found.items()}
    assert held["core_attn"] < 1, held
    assert held["moe"] < 0.85, held
    assert held["one layer"] < 0.85, held  # of four
    assert held["full"] < 0.3, held
