"""The layouts of the engines, by name. A new engine is a module next to the others and a row here."""

from collections.abc import Callable, Mapping

from servicekit.errors import ConfigError
from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec

LAYOUTS: Mapping[str, Callable[[ModelSpec, Parallel], Layout]] = {"megatron": megatron_layout, "sglang": sglang_layout}
# The engines of the two sides of a weight sync.
TRAINER_ENGINE, ROLLOUT_ENGINE = "megatron", "sglang"


def layout_of(engine: str, spec: ModelSpec, parallel: Parallel) -> Layout:
    """Make the layout of an engine: of the one that the sizes name, or else of `engine`, the usual one of the side.

    Raises: ConfigError: the engine has no layout here, or a size does not divide.
    """
    name = parallel.engine or engine
    if name not in LAYOUTS:
        raise ConfigError(f"no layout of engine {name!r} in this release, which has {', '.join(LAYOUTS)}")
    return LAYOUTS[name](spec, parallel)
