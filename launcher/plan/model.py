"""The model of `tandem plan`: a built-in name, a config.json, or the folder of one."""

import difflib
import json
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from tandem_config.problems import ConfigErrors, ConfigProblem, problem
from weightsync.model.config import UnsupportedModel
from weightsync.model.spec import PRESETS, ModelSpec, preset

_LARGEST_BYTES = 2**24
# Keys that change what a model computes, not which parameters it has.
_IGNORED_KEYS = (
    "rope_scaling",
    "rope_parameters",
    "rope_theta",
    "partial_rotary_factor",
    "use_sliding_window",
    "layer_types",
    "hidden_act",
)


def model_spec(model: str) -> ModelSpec:
    """Read the sizes of a model.

    Args:
        model: built-in name, config.json, or the folder of one.
    Raises: ConfigErrors: an unknown name, with the closest one; a file that is no supported config.json.
    """
    if model in PRESETS:
        return preset(model)
    file = _config_file(model)
    if file is None:
        raise ConfigErrors([_unknown(model)])
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise ConfigError(f"{file} has {file.stat().st_size} bytes: it is no config.json")
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(config, dict):
            config = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
        return ModelSpec.from_config(config)
    except UnsupportedModel as error:
        raise ConfigErrors([problem("--model", model, error.problem, error.advice)]) from None
    except ConfigError as error:
        raise ConfigErrors([problem("--model", model, str(error))]) from None
    except (OSError, ValueError, RecursionError) as error:
        hint = "give the config.json that `save_pretrained` writes"
        raise ConfigErrors(
            [problem("--model", model, f"cannot be read as a model's config.json: {error}", hint)]
        ) from None


def _config_file(model: str) -> Path | None:
    path = Path(model)
    try:
        file = path / "config.json" if path.is_dir() else path
        return file if file.is_file() else None
    except OSError:  # e.g. longer than a file name can be
        return None


def _unknown(model: str) -> ConfigProblem:
    close = difflib.get_close_matches(model.lower().rsplit("/", 1)[-1], PRESETS, 1, 0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return problem(
        "--model",
        model,
        "is neither a file, nor a folder with config.json, nor a built-in model",
        f"{hint}built in: {', '.join(PRESETS)}",
    )
