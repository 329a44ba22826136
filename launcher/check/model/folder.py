"""Checks the model folder, and that the model can be sharded by the parallel sizes of trainer and rollouts."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from launcher.check.model.trainer import check_tensor_size, check_trainer_sizes, indivisible
from launcher.check.model.weights import check_weights
from servicekit.errors import ConfigError
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_files.rows.files import is_lfs_pointer
from weightsync.model.config import UnsupportedModel
from weightsync.model.spec import ModelSpec

_LAYERS_SHOWN = 8
_REFERENCE = "grpo.reference_path"
_LFS_SUFFIXES = (".safetensors", ".json", ".bin", ".model")


def check_model(config: RunConfig, usable: Callable[..., bool]) -> tuple[ModelSpec | None, list[ConfigProblem]]:
    """Check the folder, its weights and the parallel sizes.

    Args:
        usable: whether all of the given keys have valid values.
    Returns: the model's sizes, None if its config.json cannot be used, and the problems.
    """
    folder = config.model.path
    missing = _missing_folder(folder)
    if missing is not None:
        return None, [missing]
    try:
        spec = ModelSpec.from_folder(folder)
    except ConfigError as error:
        return None, [_unusable(folder, error)]
    problems = check_weights(folder, spec)
    problems += check_trainer_sizes(spec, config.trainer, usable)
    problems += _check_reference(config, spec) if usable("grpo.reference_path", "grpo.kl_coefficient") else ()
    problems += _check_dense_layers(folder, spec)
    problems += _check_dynamic(folder, spec)
    if usable("rollout.tensor_parallel"):
        problems += check_tensor_size(spec, "rollout.tensor_parallel", config.rollout.tensor_parallel)
        if usable("rollout.expert_parallel"):
            problems += _check_rollout_experts(spec, config.rollout.tensor_parallel, config.rollout.expert_parallel)
    return spec, problems


def _missing_folder(folder: Path) -> ConfigProblem | None:
    """Find why a path is no model folder, as far as the path itself says it."""
    if folder.is_dir():
        return _cache_entry(folder) or _unfetched(folder)
    if folder.exists():
        return problem("model.path", folder, "is a file, not a model folder", f"give its folder: {folder.parent}")
    near = [str(entry) for entry in folder.parent.glob("*/config.json")][:3] if folder.parent.is_dir() else []
    if near:
        hint = f"model folders beside it: {', '.join(Path(entry).parent.name for entry in near)}"
    else:
        # ORG/NAME of the Hub, or its address, as others take it: the folder before the last does not exist either.
        name = "/".join(folder.parts[-2:]) if not folder.parent.is_dir() else "NAME"
        hint = (
            f"give a local Hugging Face folder; Tandem does not download: `hf download {name} --local-dir FOLDER` does"
        )
    return problem("model.path", folder, "no such folder", hint)


def _cache_entry(folder: Path) -> ConfigProblem | None:
    """Recognise the folder that the Hub's cache has around its snapshots of a model."""
    snapshots = sorted(folder.glob("snapshots/*/config.json"), key=lambda file: file.stat().st_mtime)
    if not snapshots or (folder / "config.json").exists():
        return None
    return problem(
        "model.path",
        folder,
        "is an entry of the Hugging Face cache, whose snapshots are the model",
        f"give {snapshots[-1].parent}",
    )


def _unfetched(folder: Path) -> ConfigProblem | None:
    """Recognise files that `git clone` left as pointers of Git LFS."""
    files = [path for path in sorted(folder.iterdir()) if path.suffix in _LFS_SUFFIXES and os.access(path, os.R_OK)]
    found = [path for path in files if path.is_file() and is_lfs_pointer(path)]
    if not found:
        return None
    names = ", ".join(path.name for path in found[:_LAYERS_SHOWN])
    return problem(
        "model.path",
        folder,
        f"{names}: a pointer of Git LFS each, not the file itself",
        f"fetch the files: `git -C {folder} lfs pull`",
    )


def _unusable(folder: Path, error: ConfigError) -> ConfigProblem:
    if isinstance(error, UnsupportedModel):
        return problem("model.path", folder, error.problem, error.advice)
    return problem(
        "model.path",
        folder,
        str(error),
        "the folder must be as `save_pretrained` writes it: config.json, *.safetensors, tokenizer.json",
    )


def _check_reference(config: RunConfig, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """Check that a reference policy of its own can take the policy's place."""
    folder = config.grpo.reference_path
    if folder is None or config.grpo.kl_coefficient == 0:
        return
    missing = _missing_folder(folder)
    if missing is not None:
        yield replace(missing, key=_REFERENCE)
        return
    try:
        different = ModelSpec.from_folder(folder).differences(spec)
    except ConfigError as error:
        yield replace(_unusable(folder, error), key=_REFERENCE)
        return
    if different:
        yield problem(
            _REFERENCE,
            folder,
            f"is a model of another shape than model.path: {'; '.join(different)}",
            "the trainer's own modules compute it: give a model with the sizes of model.path, or leave it "
            "out for the policy's start",
        )
        return
    yield from (replace(problem, key=_REFERENCE) for problem in check_weights(folder, spec))


def _check_dense_layers(folder: Path, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """Refuse dense layers in a mixture of experts: SGLang 0.5.23 builds experts in every layer of Qwen3-MoE models.

    See `is_layer_sparse = True` in its qwen3_moe.py.
    """
    if spec.dense_layers:
        layers = ", ".join(map(str, spec.dense_layers[:_LAYERS_SHOWN]))
        more = ", ..." if len(spec.dense_layers) > _LAYERS_SHOWN else ""
        yield problem(
            "model.path",
            folder,
            f"mlp_only_layers or decoder_sparse_step leave layers {layers}{more} without experts; SGLang gives "
            "every layer experts, so rollouts could not hold this model",
            "use a mixture whose every layer has experts",
        )


def _check_dynamic(folder: Path, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """Warn that transformers computes other log-probs of short sequences than SGLang and the trainer."""
    scaling = spec.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        message = (
            f"rotary scaling of type dynamic: SGLang and the trainer use the frequencies of {scaling.longest} tokens "
            f"for every sequence, transformers unscaled ones up to {scaling.original} tokens"
        )
        advice = f"remove the entry if no sequence is longer than {scaling.original} tokens"
        yield problem("model.path", folder, message, advice, severity="warning")


def _check_rollout_experts(spec: ModelSpec, tensor: int, expert: int) -> Iterator[ConfigProblem]:
    """Check how a replica's ranks divide the experts, and the FFN of an expert that several ranks share."""
    key = "rollout.expert_parallel"
    if spec.num_experts == 0 and expert > 1:
        yield problem(key, expert, "the model has no experts to divide", f"leave {key} at 1")
    if spec.num_experts == 0 or tensor % expert != 0:
        return
    fits = [
        n
        for n in range(1, tensor + 1)
        if tensor % n == 0 and spec.num_experts % n == 0 and spec.expert_ffn_size % (tensor // n) == 0
    ]
    yield from indivisible(key, expert, {"number of experts": spec.num_experts}, fits)
    sharers = tensor // expert
    if spec.expert_ffn_size % sharers != 0:
        yield problem(
            key,
            expert,
            f"leaves {sharers} ranks to each expert, which do not divide its FFN size ({spec.expert_ffn_size})",
            f"sizes that fit this model: {', '.join(map(str, fits)) or 'none'}",
        )
