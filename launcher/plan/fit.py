"""Makes the layouts of `tandem plan`; an error for sizes that do not fit the model names some that do."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from servicekit.errors import ConfigError
from tandem_config.problems import ConfigErrors, problem
from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.registry import layout_of
from weightsync.layouts.stages import chunks_of
from weightsync.model.spec import ModelSpec

_TENSOR_SIZES = (1, 2, 4, 8, 16, 32, 64)


def fitting_layout(option: str, engine: str, spec: ModelSpec, parallel: Parallel) -> Layout:
    """Make a layout.

    Args:
        option: command line option that gave the sizes.
        engine: of that side.
    Raises: ConfigErrors: the sizes do not fit the model; names the option and sizes that fit.
    """
    try:
        return layout_of(engine, spec, parallel)
    except ConfigError as error:
        advice = _suggestion(engine, spec, parallel)
        raise ConfigErrors([problem(option, _spelled(parallel), str(error), advice)]) from None


def _spelled(parallel: Parallel) -> str:
    sizes = {"tp": parallel.tensor, "pp": parallel.pipeline, "dp": parallel.data, "ep": parallel.expert}
    return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "tp=1"


def _suggestion(engine: str, spec: ModelSpec, parallel: Parallel) -> str:
    """Name values of one size that fit while the other sizes stay; tried on a model of one layer."""
    if not _stages_fit(spec, parallel):
        fits = [n for n in range(1, spec.num_layers + 1) if _stages_fit(spec, replace(parallel, pipeline=n))]
        return f"pp that fits: {_some(fits)}, or say how to split: first=, last=, embedding=1, loss=1"
    layer = replace(spec, num_layers=1, dense_layers=())
    one_stage = replace(
        parallel, pipeline=1, virtual_pipeline=1, first_stage_layers=0, last_stage_layers=0, **_NO_EXTRA_LAYERS
    )
    experts = [n for n in range(1, spec.num_experts + 1) if spec.num_experts % n == 0] or [1]
    for name, field, sizes in (("tp", "tensor", _TENSOR_SIZES), ("ep", "expert", experts)):
        if fits := _fitting(engine, layer, one_stage, field, sizes):
            return f"{name} that fits: {_some(fits)}"
    return ""


_NO_EXTRA_LAYERS: dict[str, Any] = {"embedding_counts": False, "loss_counts": False}


def _fitting(engine: str, spec: ModelSpec, parallel: Parallel, field: str, sizes: Iterable[int]) -> list[int]:
    fits = []
    for size in sizes:
        try:
            layout_of(engine, spec, replace(parallel, **{field: size}))  # type: ignore[arg-type]
            fits.append(size)
        except ConfigError:
            pass
    return fits


def _stages_fit(spec: ModelSpec, parallel: Parallel) -> bool:
    try:
        chunks_of(spec.num_layers, parallel)
        return True
    except ConfigError:
        return False


def _some(sizes: list[int]) -> str:
    return ", ".join(map(str, sizes[:12])) + (", ..." if len(sizes) > 12 else "")
