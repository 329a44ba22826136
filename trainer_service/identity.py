"""The properties that a trainer checkpoint and the run that resumes from it must share. Pure.

They are of one model and one dtype. All else may change, parallel sizes too.
"""

import json
from collections.abc import Mapping
from typing import Any

from tandem_config.schema import RunConfig
from weightsync.model.spec import ModelSpec

# By key of meta.json, the key of the configuration.
_KEYS = {"dtype": "model.dtype"}


def identity(config: RunConfig, spec: ModelSpec) -> dict[str, Any]:
    """Return what meta.json stores of a run as JSON values: model, dtype."""
    # as JSON reads it back: lists, not tuples
    return {"model": json.loads(spec.fingerprint()), "dtype": config.model.dtype}


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """List, as text, all differences of a checkpoint's meta.json from a run, by the keys of the configuration.

    >>> differences({"dtype": "float32", "model": {"tied": True}}, {"dtype": "bfloat16", "model": {"tied": True}})
    ['model.dtype: float32 in the checkpoint, bfloat16 in the run']
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
