"""One rank of the tests of gathered parameters: who reads them right after a step, with the last gather still to come.

Arguments: those of parity_worker.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem_config.schema import RunConfig
from tests.integration.trainer.parity_worker import run_all
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, make_samples
from trainer_service.megatron_engine.engine import MegatronEngine
from weightsync.transfer.tensors import tensor_checksums


def run_case(case: dict[str, Any], out: Path) -> None:
    grpo = CONFIG["grpo"] | {"kl_coefficient": 0.05, "reference_refresh_every": 1}
    sections = {"model": {"path": case["model"]}, "trainer": CONFIG["trainer"] | case["trainer"], "grpo": grpo}
    engine = MegatronEngine(RunConfig.model_validate(CONFIG | sections), torch.device("cpu"))
    engine.load(Path(case["model"]))
    before = tensor_checksums(dict(engine.tensors()))
    engine.train_step(make_samples(), NUM_UPDATES)
    published = tensor_checksums({name: tensor.clone() for name, tensor in engine.tensors().items()})
    assert engine._reference is not None
    reference = tensor_checksums(engine._reference.tensors())
    engine.save(out / "checkpoint")
    engine.export(out / "export")
    report = {"before": before, "published": published, "reference": reference}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    engine.close()


if __name__ == "__main__":
    run_all(run_case)
