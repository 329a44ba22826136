"""One rank of the tests of gathered parameters: who reads them right after a step, with the last gather still to come.

Arguments: those of parity_worker.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tandem_config.schema import RunConfig
from tests.integration.trainer.parity_worker import run_all
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, make_samples
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.micro_batches.samples import Samples
from weightsync.transfer.tensors import tensor_checksums

REFRESHED = {"kl_coefficient": 0.05, "reference_refresh_every": 1}
# Updates of a step of which no sample has a gradient.
EMPTY: dict[str, tuple[int, ...]] = {"none": (), "first": (0,), "last": (1,), "all": (0, 1)}


def run_case(case: dict[str, Any], out: Path) -> None:
    work: Callable[[MegatronEngine, Path], dict[str, Any]] = {"readers": readers, "empty": empty_updates}[case["work"]]
    grpo = CONFIG["grpo"] | (REFRESHED if case["work"] == "readers" else {})
    sections = {"model": {"path": case["model"]}, "trainer": CONFIG["trainer"] | case["trainer"], "grpo": grpo}
    engine = MegatronEngine(RunConfig.model_validate(CONFIG | sections), torch.device("cpu"))
    engine.load(Path(case["model"]))
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(work(engine, out)))
    engine.close()


def readers(engine: MegatronEngine, out: Path) -> dict[str, Any]:
    before = tensor_checksums(dict(engine.tensors()))
    engine.train_step(make_samples(), NUM_UPDATES)
    published = present(engine)
    assert engine._reference is not None
    reference = tensor_checksums(engine._reference.tensors())
    engine.save(out / "checkpoint")
    engine.export(out / "export")
    return {"before": before, "published": published, "reference": reference}


def empty_updates(engine: MegatronEngine, out: Path) -> dict[str, Any]:
    """Steps with updates that have no micro-batch, which AdamW's momentum makes nevertheless."""
    report: dict[str, Any] = {}
    for number, (name, empty) in enumerate(EMPTY.items()):
        result = engine.train_step(without_gradient(make_samples(seed=number), empty), NUM_UPDATES)
        report[name] = {"published": present(engine), "metrics": dict(result.metrics)}
        engine.export(out / name)
    return report


def without_gradient(samples: Samples, updates: tuple[int, ...]) -> Samples:
    return replace(samples, trainable=samples.trainable & ~np.isin(samples.update_index, updates))


def present(engine: MegatronEngine) -> dict[str, Any]:
    """Checksums of the parameters as they are now."""
    return tensor_checksums({name: tensor.clone() for name, tensor in engine.tensors().items()})


if __name__ == "__main__":
    run_all(run_case)
