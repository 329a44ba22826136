"""A rank of our trainer: megatron-core, as the service runs it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem_config.schema import RunConfig
from tools.bench_train.shapes import LAYOUTS, UPDATES
from tools.bench_train.workers.channel import (
    ADAM_EPS,
    CLIP_NORM,
    CLIP_RATIO,
    LEARNING_RATE,
    Channel,
    options,
    serve,
)
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.micro_batches.samples import Samples
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

DEADLINE = timedelta(seconds=600)


def configuration(model: Path, layout: Parallel) -> RunConfig:
    """Make the settings: those of the other ways, and the defaults. The first stage has the rest of the layers."""
    layers, stages = ModelSpec.from_folder(model).num_layers, layout.pipeline
    fields: dict[str, Any] = {
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": model / "unused.jsonl"},
        "grpo": {"clip_low": CLIP_RATIO, "clip_high": CLIP_RATIO, "updates_per_iteration": UPDATES},
        "trainer": {
            "tensor_parallel": layout.tensor,
            "pipeline_parallel": stages,
            "first_stage_layers": layers - layers // stages * (stages - 1) if layers % stages else None,
            "data_parallel": layout.data,
            "learning_rate": LEARNING_RATE,
            "adam_eps": ADAM_EPS,
            "clip_grad": CLIP_NORM,
        },
    }
    return RunConfig.model_validate(fields)


class Ours:
    """Steps of `MegatronEngine`."""

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine

    def step(self, samples: Samples) -> float:
        """Run the engine's train step."""
        return self._engine.train_step(samples, UPDATES).metrics["loss"]

    def export(self, folder: Path) -> None:
        """Export; all ranks together."""
        self._engine.export(folder)


def main() -> None:
    """Serve commands as a rank."""
    arguments, shape = options()
    channel = Channel(shape)
    torch.set_num_threads(arguments.threads)
    layout = LAYOUTS[arguments.layout]
    meeting = f"file://{arguments.meeting}"
    dist.init_process_group("gloo", meeting, timeout=DEADLINE, rank=arguments.rank, world_size=layout.world_size)
    engine = MegatronEngine(configuration(arguments.model, layout), torch.device("cpu"))
    engine.load(arguments.model)
    serve(channel, Ours(engine))


if __name__ == "__main__":
    main()
