"""One rank of the tests of grouped experts' names: a step, a checkpoint, another step, the checkpoint again.

Arguments: those of parity_worker.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem_config.schema import RunConfig
from tests.fakes import grouped_experts
from tests.integration.trainer.parity_worker import run_all
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, make_samples
from trainer_service.megatron_engine.engine import MegatronEngine


def run_case(case: dict[str, Any], out: Path) -> None:
    if case["grouped"]:  # the last ones
        grouped_experts.install()
    sections = {"model": {"path": case["model"]}, "trainer": CONFIG["trainer"] | case["trainer"]}
    engine = MegatronEngine(RunConfig.model_validate(CONFIG | sections), torch.device("cpu"))
    engine.load(Path(case["model"]))
    engine.train_step(make_samples(), NUM_UPDATES)
    engine.save(out / "checkpoint")
    after = dict(engine.train_step(make_samples(seed=2), NUM_UPDATES).metrics)
    engine.load_checkpoint(out / "checkpoint")
    again = dict(engine.train_step(make_samples(seed=2), NUM_UPDATES).metrics)
    own = [name for chunk in engine._backend.chunks for name, _ in chunk.named_parameters()]
    report = {"after": after, "again": again, "names": sorted(engine.tensors()), "own": sorted(own)}
    (out / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
    engine.close()


if __name__ == "__main__":
    run_all(run_case)
