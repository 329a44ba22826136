"""Checks that the trainer's parallel sizes fit the model: what Megatron would refuse, by configuration key."""

from collections.abc import Callable, Iterator

from servicekit.errors import ConfigError
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import TrainerSection
from weightsync.layouts.layout import Parallel
from weightsync.layouts.stages import chunks_of
from weightsync.model.spec import ModelSpec

KV_HEADS = "KV heads"
_MOST_SHOWN = 1024
_SPLITS = ("first_stage_layers", "last_stage_layers", "embedding_counts", "loss_counts", "virtual_pipeline")


def check_trainer_sizes(
    spec: ModelSpec, trainer: TrainerSection, usable: Callable[..., bool]
) -> Iterator[ConfigProblem]:
    """Check every parallel size of the trainer for which `usable(*keys)` holds."""
    if usable("trainer.tensor_parallel"):
        yield from check_tensor_size(spec, "trainer.tensor_parallel", trainer.tensor_parallel)
        yield from _check_rows(spec, trainer.tensor_parallel)
    if usable("trainer.pipeline_parallel", *(f"trainer.{name}" for name in _SPLITS)):
        yield from _check_stages(spec, trainer)
    if usable("trainer.expert_parallel", "trainer.expert_tensor_parallel"):
        yield from _check_experts(spec, trainer)
    if usable("trainer.tensor_parallel", "trainer.sequence_parallel"):
        yield from _check_sequence(spec, trainer)
    if usable(
        "trainer.recompute", "trainer.recompute_modules", "trainer.recompute_layers", "trainer.pipeline_parallel"
    ):
        yield from _check_recompute(spec, trainer)
    if usable("trainer.moe_grouped_gemm") and trainer.moe_grouped_gemm and spec.num_experts == 0:
        yield problem(
            "trainer.moe_grouped_gemm",
            "true",
            "the model has no experts to group",
            "leave trainer.moe_grouped_gemm out",
        )
    if usable("trainer.context_parallel"):
        yield from _check_context(spec, trainer.context_parallel)


def indivisible(key: str, size: int, totals: dict[str, int], fits: list[int]) -> Iterator[ConfigProblem]:
    """Report every total that `size` does not divide.

    Args:
        key: the size's key in the configuration.
        totals: what it must divide, by name.
        fits: sizes that would fit, for the suggestion.
    """
    for name, total in totals.items():
        if total % size != 0:
            yield problem(
                key,
                size,
                f"does not divide the model's {name} ({total})",
                f"sizes that fit this model: {', '.join(map(str, fits))}",
            )


def split_sizes(spec: ModelSpec) -> dict[str, int]:
    """Return the sizes that tensor parallelism divides, by their names in messages."""
    sizes = {"attention heads": spec.num_heads, KV_HEADS: spec.num_kv_heads, "FFN size": spec.ffn_size}
    if spec.num_experts > 0 and not spec.dense_layers:
        del sizes["FFN size"]
    return sizes


def _divisors(total: int) -> list[int]:
    return [n for n in range(1, min(total, _MOST_SHOWN) + 1) if total % n == 0]


def check_tensor_size(spec: ModelSpec, key: str, size: int) -> Iterator[ConfigProblem]:
    """Check a tensor-parallel size of either side: its ranks divide the KV heads, or share each of them evenly."""
    fits = [n for n in _divisors(spec.num_heads) if not list(_undivided(spec, n))]
    yield from indivisible(key, size, dict(_undivided(spec, size)), fits)


def _check_rows(spec: ModelSpec, size: int) -> Iterator[ConfigProblem]:
    """Check that the query, key and value rows divide evenly, as Megatron cuts them (narrow KV heads may not)."""
    rows = spec.size("q") + 2 * spec.size("kv")
    if not list(_undivided(spec, size)):
        fits = [n for n in _divisors(spec.num_heads) if rows % n == 0 and not list(_undivided(spec, n))]
        yield from indivisible("trainer.tensor_parallel", size, {"query, key and value rows": rows}, fits)


def _undivided(spec: ModelSpec, size: int) -> Iterator[tuple[str, int]]:
    for name, total in split_sizes(spec).items():
        shared = name == KV_HEADS and size % total == 0
        if total % size != 0 and not shared:
            yield name, total


def _check_stages(spec: ModelSpec, trainer: TrainerSection) -> Iterator[ConfigProblem]:
    changed = [name for name in _SPLITS if getattr(trainer, name) != TrainerSection.model_fields[name].default]
    if not changed:
        fits = _divisors(spec.num_layers)
        yield from indivisible(
            "trainer.pipeline_parallel", trainer.pipeline_parallel, {"layers": spec.num_layers}, fits
        )
        return
    misfit = _misfit(spec, Parallel(**trainer.parallel_sizes))
    if misfit is not None:
        yield problem(
            f"trainer.{changed[0]}",
            getattr(trainer, changed[0]),
            f"does not fit the model's {spec.num_layers} layers: {misfit}",
            f"the split is decided by trainer.pipeline_parallel, {', '.join(changed)}",
        )


def _misfit(spec: ModelSpec, parallel: Parallel) -> str | None:
    try:
        chunks = chunks_of(spec.num_layers, parallel)
    except ConfigError as error:
        return str(error)
    short = [chunk for chunk in chunks if chunk.num_layers < 0]
    return f"stage {short[0].stage} would have {short[0].num_layers} layers" if short else None


def _check_experts(spec: ModelSpec, trainer: TrainerSection) -> Iterator[ConfigProblem]:
    sizes = {"expert_parallel": spec.num_experts, "expert_tensor_parallel": spec.expert_ffn_size}
    names = {"expert_parallel": "number of experts", "expert_tensor_parallel": "expert FFN size"}
    for key, total in sizes.items():
        size = getattr(trainer, key)
        if spec.num_experts > 0:
            yield from indivisible(f"trainer.{key}", size, {names[key]: total}, _divisors(total))
        elif size > 1:
            yield problem(f"trainer.{key}", size, "the model has no experts to divide", f"leave trainer.{key} at 1")


def _check_sequence(spec: ModelSpec, trainer: TrainerSection) -> Iterator[ConfigProblem]:
    if spec.num_experts > 0 and trainer.tensor_parallel > 1 and not trainer.sequence_parallel:
        yield problem(
            "trainer.sequence_parallel",
            "false",
            "a mixture of experts with trainer.tensor_parallel above 1 trains only with it (Megatron's rule)",
            "set trainer.sequence_parallel: true",
        )


def _check_context(spec: ModelSpec, size: int) -> Iterator[ConfigProblem]:
    """Check that Megatron can cut its table of YaRN's cosines, which it makes of the original length."""
    scaling = spec.rope_scaling
    if size > 1 and scaling is not None and scaling.kind == "yarn" and scaling.original % (2 * size) != 0:
        fits = [n for n in range(1, 2 * size) if scaling.original % (2 * n) == 0]
        yield problem(
            "trainer.context_parallel",
            size,
            f"two chunks per rank do not divide YaRN's original_max_position_embeddings ({scaling.original})",
            f"sizes that fit this model: {', '.join(map(str, fits)) or '1'}",
        )


def _check_recompute(spec: ModelSpec, trainer: TrainerSection) -> Iterator[ConfigProblem]:
    """Check that there is what trainer.recompute is to compute again."""
    dense = [layer for layer in range(spec.num_layers) if not spec.has_experts(layer)]
    held = {"core_attn": True, "mlp": bool(dense), "moe": len(dense) < spec.num_layers}
    lacking = [name for name in trainer.recompute_modules if not held[name]]
    if trainer.recompute == "selective" and lacking:
        yield problem(
            "trainer.recompute_modules",
            f"[{', '.join(trainer.recompute_modules)}]",
            f"no layer of the model has {lacking[0]}",
            f"modules of this model: {', '.join(name for name, has in held.items() if has)}",
        )
    most = _most_layers(spec, trainer)
    if trainer.recompute == "full" and trainer.recompute_layers is not None and trainer.recompute_layers > most > 0:
        yield problem(
            "trainer.recompute_layers",
            trainer.recompute_layers,
            f"is more than the {most} layers of a pipeline stage (or of its virtual chunk)",
            f"1 to {most}, or null for all of them",
        )


def _most_layers(spec: ModelSpec, trainer: TrainerSection) -> int:
    """Return the layers of the largest chunk; 0: they do not divide, which is reported elsewhere."""
    try:
        return max(chunk.num_layers for chunk in chunks_of(spec.num_layers, Parallel(**trainer.parallel_sizes)))
    except ConfigError:
        return 0
