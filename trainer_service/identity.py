"""What a checkpoint of the trainer and the run that goes on from it must have in common. Pure.

Shards are of one model, cut in one way, in one type: a trainer of another layout cannot read them. All else may change.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tandem_config.schema import RunConfig
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

_SIZES = ("tensor", "pipeline", "data", "context", "expert", "expert_tensor")
_OTHERS = ("virtual_pipeline", "first_stage_layers", "last_stage_layers", "embedding_counts", "loss_counts")
# Where a user has set what meta.json holds.
_KEYS = {
    "dtype": "model.dtype",
    **{f"parallel.{name}": f"trainer.{name}_parallel" for name in _SIZES},
    **{f"parallel.{name}": f"trainer.{name}" for name in _OTHERS},
}


def identity(config: RunConfig, spec: ModelSpec) -> dict[str, Any]:
    """JSON values: model, parallel sizes, dtype."""
    parallel = asdict(Parallel(**config.trainer.parallel_sizes))
    # as it will be read back: lists, not tuples
    return {"model": json.loads(spec.fingerprint()), "parallel": parallel, "dtype": config.model.dtype}


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Everything in which a checkpoint's meta.json differs from a run, in words, by the keys of the configuration.

    >>> differences({"dtype": "float32", "parallel": {"tensor": 1}}, {"dtype": "float32", "parallel": {"tensor": 2}})
    ['trainer.tensor_parallel: 1 in the checkpoint, 2 in the run']
    """
    there, here = _flat(saved), _flat(own)
    keys = [key for key in here | there if key.partition(".")[0] in own]
    return [
        f"{_KEYS.get(key, key)}: {there.get(key)} in the checkpoint, {here.get(key)} in the run"
        for key in keys
        if there.get(key) != here.get(key)
    ]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    flat = {key: value for key, value in values.items() if key not in nested}
    return flat | {f"{key}.{name}": value for key, inner in nested.items() for name, value in inner.items()}
