"""Assigns layers to pipeline stages and their virtual chunks, as megatron-core does."""

from dataclasses import dataclass

from servicekit.errors import ConfigError
from weightsync.layouts.layout import Parallel


@dataclass(frozen=True, kw_only=True)
class ModelChunk:
    """Consecutive layers on one pipeline stage. A stage has `virtual_pipeline` chunks, numbered in model order."""

    stage: int
    index: int
    first_layer: int
    num_layers: int


def chunks_of(num_layers: int, parallel: Parallel) -> list[ModelChunk]:
    """List every chunk, in model order.

    Raises: ConfigError: the layers do not divide by the stages, or a stage's by its chunks.
    """
    per_stage = _layers_per_stage(num_layers, parallel)
    virtual = parallel.virtual_pipeline
    chunks = []
    first = 0
    for index in range(virtual):
        for stage, total in enumerate(per_stage):
            count = _share(total, virtual, f"layers of pipeline stage {stage}", "virtual chunks")
            # The embedding and the loss count as a layer of the first and the last chunk.
            count -= int(parallel.embedding_counts and stage == 0 and index == 0)
            count -= int(parallel.loss_counts and stage == parallel.pipeline - 1 and index == virtual - 1)
            chunks.append(ModelChunk(stage=stage, index=index, first_layer=first, num_layers=count))
            first += count
    return chunks


def _layers_per_stage(num_layers: int, parallel: Parallel) -> list[int]:
    """Count the layers of each stage; embedding and loss are counted if they count as layers."""
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    if first == 0 and last == 0:
        places = num_layers + int(parallel.embedding_counts) + int(parallel.loss_counts)
        return [_share(places, parallel.pipeline, "layers", "pipeline stages")] * parallel.pipeline
    if parallel.embedding_counts or parallel.loss_counts:
        raise ConfigError("first/last stage layers and account_for_embedding/loss exclude each other")
    middle = parallel.pipeline - int(first > 0) - int(last > 0)
    rest = num_layers - first - last
    if rest < 0 or (middle == 0 and rest != 0):
        raise ConfigError(f"{num_layers} layers are not first_stage_layers {first} + last_stage_layers {last}")
    per_stage = _share(rest, middle, "layers of the middle stages", "stages") if middle > 0 else 0
    return [*([first] if first > 0 else []), *[per_stage] * middle, *([last] if last > 0 else [])]


def _share(total: int, parts: int, what: str, parts_name: str) -> int:
    if total % parts != 0:
        raise ConfigError(f"{total} {what} do not divide by {parts} {parts_name}")
    return total // parts
