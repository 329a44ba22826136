"""The properties that a trainer checkpoint and the run that resumes from it must share. Pure.

Shards are of one model, one parallel layout and one dtype: a trainer with others cannot read them. All else may change.
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
# By key of meta.json, the key of the configuration.
_KEYS = {
    "dtype": "model.dtype",
    **{f"parallel.{name}": f"trainer.{name}_parallel" for name in _SIZES},
    **{f"parallel.{name}": f"trainer.{name}" for name in _OTHERS},
}


def identity(config: RunConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return what meta.json stores of a run as JSON values: model, parallel sizes, dtype."""
    parallel = asdict(Parallel(**config.trainer.parallel_sizes))
    # as JSON reads it back: lists, not tuples
    return {"model": json.loads(spec.fingerprint()), "parallel": parallel, "dtype": config.model.dtype}


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """List, as text, all differences of a checkpoint's meta.json from a run, by the keys of the configuration.

    >>> differences({"dtype": "float32", "parallel": {"tensor": 1}}, {"dtype": "float32", "parallel": {"tensor": 2}})
    ['trainer.tensor_parallel: 1 in the checkpoint, 2 in the run']
    """
    in_checkpoint, in_run = _flat(saved), _flat(own)
    keys = [key for key in in_run | in_checkpoint if key.partition(".")[0] in own]
    return [
        f"{_KEYS.get(key, key)}: {in_checkpoint.get(key)} in the checkpoint, {in_run.get(key)} in the run"
        for key in keys
        if in_checkpoint.get(key) != in_run.get(key)
    ]


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    nested = {key: value for key, value in values.items() if isinstance(value, Mapping)}
    flat = {key: value for key, value in values.items() if key not in nested}
    return flat | {f"{key}.{name}": value for key, inner in nested.items() for name, value in inner.items()}
