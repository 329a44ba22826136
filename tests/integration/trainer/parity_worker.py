"""One rank of the parity tests: for each case build an engine, export, log-probs, one train step, export again.

Arguments: rank, world size, file for the store, JSON file of the cases, folder for the results.
"""

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from servicekit.errors import TandemError
from tandem_config.schema import RunConfig
from tests.integration.trainer.gradients import record, stop_recording
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, read_samples
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.micro_batches import chunks
from trainer_service.micro_batches.samples import Samples


def run_case(case: dict[str, Any], out: Path) -> None:
    chunks.CHUNK_BYTES = case["chunk_bytes"]
    model = {"path": case["model"], "dtype": case["dtype"]}
    grpo = case["grpo"] | ({"reference_path": case["reference"]} if "kl_coefficient" in case["grpo"] else {})
    sections = {"model": model, "trainer": CONFIG["trainer"] | case["layout"] | case["trainer"], "grpo": grpo}
    config = RunConfig.model_validate(CONFIG | sections)
    engine = MegatronEngine(config, torch.device("cpu"))
    engine.load(Path(case["model"]))
    engine.export(out / "before")
    samples = read_samples(Path(case["samples"]))
    logprobs, entropies = engine.logprobs(samples)
    engine.save(out / "checkpoint")
    record(engine, out / "gradients")
    result = engine.train_step(samples, NUM_UPDATES)
    stop_recording(engine)
    engine.export(out / "after")
    engine.load_checkpoint(out / "checkpoint")
    again = engine.train_step(samples, NUM_UPDATES)
    foreign = refusal(lambda: engine.load_checkpoint(Path(case["foreign"])))
    not_finite = overflow_in_last_update(engine, samples)
    engine.export(out / "after_not_finite")
    if dist.get_rank() == 0:
        np.savez(out / "logprobs.npz", logprobs=logprobs, entropies=entropies)
        report = {
            "metrics": dict(result.metrics),
            "again": dict(again.metrics),
            "not_finite": not_finite,
            "foreign": foreign,
        }
        (out / "report.json").write_text(json.dumps(report))
    engine.close()


def overflow_in_last_update(engine: MegatronEngine, samples: Samples) -> str:
    """A finite advantage whose gradient is not: the first update is done by then, and must be undone."""
    advantages = samples.advantages.copy()
    advantages[22] = 3e38
    advantages[19] = -3e38  # the case of GSPO gives sample 22 no weight, because its correction is out of bounds
    return refusal(lambda: engine.train_step(replace(samples, advantages=advantages), NUM_UPDATES))


def refusal(action: Callable[[], object]) -> str:
    """What the engine says instead of doing it."""
    try:
        action()
    except TandemError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def run_all(run: Callable[[dict[str, Any], Path], None]) -> None:
    """Run the cases of the command line."""
    rank, world_size, store, cases, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    gc.freeze()  # what is imported need not be looked at after each case
    for case in json.loads(Path(cases).read_text()):
        start = time.perf_counter()
        run(case, Path(out) / case["name"])
        # A circle of references keeps a closed engine's process groups. Each has threads on gloo that look up a hundred
        # times a second: with those of 40 cases, a case took minutes.
        gc.collect()
        print(case["name"], f"{time.perf_counter() - start:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_all(run_case)
