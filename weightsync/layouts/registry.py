"""The layouts of the engines, by name. A new engine is a module next to the others and a row here."""

from collections.abc import Callable, Mapping

from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import ModelSpec

LAYOUTS: Mapping[str, Callable[[ModelSpec, Parallel], Layout]] = {
    "megatron": megatron_layout,
    "sglang": sglang_layout,
}
# The engines of the two sides of a weight sync.
TRAINER_ENGINE, ROLLOUT_ENGINE = "megatron", "sglang"


def layout_of(engine: str, spec: ModelSpec, parallel: Parallel) -> Layout:
    """Make an engine's layout. Raises: KeyError: there is no such engine; ConfigError: a size does not divide."""
    return LAYOUTS[engine](spec, parallel)
