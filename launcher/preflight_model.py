"""Checks the model folder, and that the model can be cut as trainer and rollouts are told to."""

from collections.abc import Callable, Iterator
from pathlib import Path

from launcher.preflight_weights import check_weights
from servicekit.errors import ConfigError
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig
from weightsync.model_spec import ModelSpec


def check_model(config: RunConfig, usable: Callable[..., bool]) -> tuple[ModelSpec | None, list[ConfigProblem]]:
    """The model's sizes if its config.json can be used, and what is wrong with folder, weights, parallel sizes."""
    folder = config.model.path
    missing = _missing_folder(folder)
    if missing is not None:
        return None, [missing]
    try:
        spec = ModelSpec.from_folder(folder)
    except (ConfigError, ValueError, TypeError, ArithmeticError, AttributeError) as error:
        return None, [_problem(folder, _unusable_config(error), _unusable_hint(error))]
    problems = list(check_weights(folder, spec))
    if usable("trainer.tensor_parallel"):
        problems += _check_trainer_tensor(spec, config.trainer.tensor_parallel)
    if usable("trainer.pipeline_parallel"):
        problems += _check_pipeline(spec, config.trainer.pipeline_parallel)
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


def _unusable_config(error: Exception) -> str:
    return str(error) if isinstance(error, ConfigError) else f"its config.json cannot be used: {error}"


def _unusable_hint(error: Exception) -> str:
    if "model_type" in str(error):
        return "dense Qwen2, Qwen2.5 and Qwen3 models can be trained"
    return "the folder must be as `save_pretrained` writes it: config.json, *.safetensors, tokenizer.json"


def _check_trainer_tensor(spec: ModelSpec, size: int) -> Iterator[ConfigProblem]:
    key = "trainer.tensor_parallel"
    fits = [n for n in range(1, spec.num_kv_heads + 1) if not any(_left_over(spec, n))]
    yield from _indivisible(key, size, _sizes(spec), fits)


def _check_rollout_tensor(spec: ModelSpec, size: int) -> Iterator[ConfigProblem]:
    """More ranks than KV heads are fine if they divide evenly: SGLang then gives several ranks the same head."""

    def replicates(ranks: int) -> bool:
        return ranks % spec.num_kv_heads == 0

    fits = [
        n
        for n in range(1, spec.num_heads + 1)
        if not any(left for name, left in zip(_sizes(spec), _left_over(spec, n), strict=True) if name != "KV heads")
        and (spec.num_kv_heads % n == 0 or replicates(n))
    ]
    sizes = _sizes(spec)
    if replicates(size):
        del sizes["KV heads"]
    yield from _indivisible("rollout.tensor_parallel", size, sizes, fits)


def _check_pipeline(spec: ModelSpec, stages: int) -> Iterator[ConfigProblem]:
    fits = [n for n in range(1, spec.num_layers + 1) if spec.num_layers % n == 0]
    yield from _indivisible("trainer.pipeline_parallel", stages, {"layers": spec.num_layers}, fits)


def _sizes(spec: ModelSpec) -> dict[str, int]:
    return {"attention heads": spec.num_heads, "KV heads": spec.num_kv_heads, "FFN size": spec.ffn_size}


def _left_over(spec: ModelSpec, ranks: int) -> list[int]:
    return [total % ranks for total in _sizes(spec).values()]


def _indivisible(key: str, size: int, totals: dict[str, int], fits: list[int]) -> Iterator[ConfigProblem]:
    for name, total in totals.items():
        if total % size != 0:
            yield ConfigProblem(
                key=key,
                value=str(size),
                message=f"does not divide the model's {name} ({total})",
                suggestion=f"sizes that fit this model: {', '.join(map(str, fits))}",
            )


def _problem(folder: Path, message: str, suggestion: str) -> ConfigProblem:
    return ConfigProblem(key="model.path", value=str(folder), message=message, suggestion=suggestion)
