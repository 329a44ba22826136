"""Activation recompute: what the backward pass computes again instead of keeping it (`trainer.recompute`)."""

from typing import Any

from tandem_config.schema import TrainerSection


def recompute_arguments(trainer: TrainerSection, num_layers: int) -> dict[str, Any]:
    """Make the arguments of TransformerConfig.

    Args:
        num_layers: of the model; more than a chunk has means all of the chunk's.
    """
    if trainer.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": list(trainer.recompute_modules)}
    if trainer.recompute == "full":
        layers = num_layers if trainer.recompute_layers is None else trainer.recompute_layers
        # one checkpoint per layer: a checkpoint of several would hold the activations of them all together
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": layers}
    return {}
