"""Checks the model folder, and that the model can be cut as trainer and rollouts are told to."""

from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.preflight_trainer import check_trainer_sizes, indivisible, split_sizes
from launcher.preflight_weights import check_weights
from servicekit.errors import ConfigError
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from weightsync.model_config import UnsupportedModel
from weightsync.model_spec import ModelSpec

_LAYERS_SHOWN = 8


def check_model(config: RunConfig, usable: Callable[..., bool]) -> tuple[ModelSpec | None, list[ConfigProblem]]:
    """The model's sizes if its config.json can be used, and what is wrong with folder, weights, parallel sizes."""
    folder = config.model.path
    missing = _missing_folder(folder)
    if missing is not None:
        return None, [missing]
    try:
        spec = ModelSpec.from_folder(folder)
    except ConfigError as error:
        return None, [_unusable(folder, error)]
    problems = list(check_weights(folder, spec))
    problems += check_trainer_sizes(spec, config.trainer, usable)
    problems += _check_dense_layers(folder, spec)
    if usable("rollout.tensor_parallel"):
        problems += _check_rollout_tensor(spec, config.rollout.tensor_parallel)
    return spec, problems


def _missing_folder(folder: Path) -> ConfigProblem | None:
    if folder.is_dir():
        return None
    if folder.exists():
        return _problem(folder, "is a file, not a model folder", f"give its folder: {folder.parent}")
    near = [str(entry) for entry in folder.parent.glob("*/config.json")][:3] if folder.parent.is_dir() else []
    if near:
        hint = f"model folders beside it: {', '.join(Path(entry).parent.name for entry in near)}"
    else:
        hint = "give a local Hugging Face folder; Tandem downloads nothing (`hf download NAME --local-dir FOLDER` does)"
    return _problem(folder, "no such folder", hint)


def _unusable(folder: Path, error: ConfigError) -> ConfigProblem:
    if isinstance(error, UnsupportedModel):
        return _problem(folder, error.problem, error.advice)
    return _problem(
        folder,
        str(error),
        "the folder must be as `save_pretrained` writes it: config.json, *.safetensors, tokenizer.json",
    )


def _check_dense_layers(folder: Path, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """SGLang 0.5.23 builds every layer of a Qwen3-MoE model with experts (qwen3_moe.py: is_layer_sparse = True)."""
    if spec.dense_layers:
        layers = ", ".join(map(str, spec.dense_layers[:_LAYERS_SHOWN]))
        more = ", ..." if len(spec.dense_layers) > _LAYERS_SHOWN else ""
        yield _problem(
            folder,
            f"mlp_only_layers or decoder_sparse_step leave layers {layers}{more} without experts; SGLang gives "
            "every layer experts, so rollouts could not hold this model",
            "use a mixture whose every layer has experts",
        )


def _check_rollout_tensor(spec: ModelSpec, size: int) -> Iterator[ConfigProblem]:
    """More ranks than KV heads are fine if they divide evenly: SGLang then gives several ranks the same head."""

    def replicates(ranks: int) -> bool:
        return ranks % spec.num_kv_heads == 0

    fits = [
        n
        for n in range(1, spec.num_heads + 1)
        if not any(total % n for name, total in split_sizes(spec).items() if name != "KV heads")
        and (spec.num_kv_heads % n == 0 or replicates(n))
    ]
    sizes = split_sizes(spec)
    if replicates(size):
        del sizes["KV heads"]
    yield from indivisible("rollout.tensor_parallel", size, sizes, fits)


def _problem(folder: Path, message: str, suggestion: str) -> ConfigProblem:
    return ConfigProblem(key="model.path", value=str(folder), message=message, suggestion=suggestion)
