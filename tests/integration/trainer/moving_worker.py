"""One rank of the tests of moved checkpoints: train and save at a layout, or go on from another layout's checkpoint.

Arguments: those of parity_worker.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from servicekit.errors import ConfigError
from tandem_config.schema import RunConfig
from tests.integration.trainer.parity_worker import run_all
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, make_samples
from trainer_service.megatron_engine.engine import MegatronEngine

STEPS = 3


def run_case(case: dict[str, Any], out: Path) -> None:
    model = {"path": case["model"], "dtype": case["dtype"]}
    sections = {"model": model, "trainer": CONFIG["trainer"] | case["layout"]}
    engine = MegatronEngine(RunConfig.model_validate(CONFIG | sections), torch.device("cpu"))
    if case["source"] is None:
        engine.load(Path(case["model"]))
        engine.train_step(make_samples(seed=9), NUM_UPDATES)
        engine.save(out / "checkpoint")
    else:
        engine.load_checkpoint(Path(case["source"]))
        engine.save(out / "checkpoint")
    steps, refused = [], ""
    for number in range(STEPS):
        steps.append(dict(engine.train_step(make_samples(seed=number), NUM_UPDATES).metrics))
        if case["source"] is not None and number == 0:
            # the step after a refused load goes on from here
            refused = _refusal(engine, Path(case["foreign"]))
    engine.export(out / "after")
    if dist.get_rank() == 0:
        report = {"steps": steps, "refused": refused}
        (out / "report.json").write_text(json.dumps(report))
    engine.close()


def _refusal(engine: MegatronEngine, folder: Path) -> str:
    try:
        engine.load_checkpoint(folder)
    except ConfigError as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    run_all(run_case)
