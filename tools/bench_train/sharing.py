"""`python -m tools.bench_train.sharing`: what shared prompts save of a step, by prompt : completion; sharing.json.

One rank, steps with and without in turns, processor seconds: the table of docs/numerics.md.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from servicekit.versions import software_versions
from tools.bench_train.shapes import LAYOUTS, SHAPES, UPDATES, write_model
from tools.bench_train.workers.ours import configuration
from tools.conditions import commit, cpu, now
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.micro_batches.samples import Samples

SHAPE, GROUP = SHAPES["0.45m"], 16
# By name: prompt tokens, completion tokens on average, prompts, and whether lengths differ (0.5 to 1.5 x the mean).
RATIOS = {
    "64:16": (64, 16, 16, True),
    "40:40": (40, 40, 16, True),
    "16:64": (16, 64, 16, True),
    "6:4": (6, 4, 64, False),
}
DIVIDED = ("samples", "prompts")


def make_samples(ratio: str, divided: str) -> Samples:
    """Make groups of 16 random completions; an update has a part of every group, or whole groups."""
    prompt, completion, num_prompts, spread = RATIOS[ratio]
    random, num = np.random.default_rng(1), num_prompts * GROUP
    times = np.linspace(0.5, 1.5, num) if spread else np.ones(num)
    lengths = random.permutation(np.rint(completion * times).astype(np.int64))
    prompts = random.integers(2, SHAPE.vocabulary, (num_prompts, prompt)).repeat(GROUP, 0)
    rows = [
        np.concatenate([row, random.integers(2, SHAPE.vocabulary, n)]) for row, n in zip(prompts, lengths, strict=True)
    ]
    places = np.arange(num)
    return Samples(
        sample_ids=tuple(map(str, range(num))),
        update_index=places % UPDATES if divided == "samples" else places * UPDATES // num,
        prompt_lengths=np.full(num, prompt),
        completion_lengths=lengths,
        token_ids=np.concatenate(rows),
        rollout_logprobs=np.full(int(lengths.sum()), -np.log(SHAPE.vocabulary), np.float32),
        advantages=random.normal(size=num).astype(np.float32),
        trainable=np.ones(num, np.bool_),
    )


def measure(engine: MegatronEngine, samples: Samples, repetitions: int) -> dict[str, Any]:
    """Measure steps without and with shared prompts in turns, the first of each left out."""
    plain = engine._runner
    seconds: dict[bool, list[float]] = {False: [], True: []}
    tokens = 1.0
    for _ in range(repetitions + 1):
        for shared, of_way in seconds.items():
            engine._runner = replace(plain, ranks=replace(plain.ranks, share_prompts=shared))
            start_s = time.process_time()
            tokens = engine.train_step(samples, UPDATES).metrics["prompt_sharing"]
            of_way.append(time.process_time() - start_s)
    engine._runner = plain
    whole, less = (median(of_way[1:]) for of_way in seconds.values())
    return {"tokens": tokens, "whole_s": whole, "shared_s": less, "time": less / whole}


def main() -> int:
    """Run the benchmark. Returns: exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratios", nargs="+", choices=RATIOS, default=list(RATIOS))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    load, cases = os.getloadavg(), {}
    with tempfile.TemporaryDirectory(prefix="bench-sharing-") as folder:
        model = Path(folder) / "model"
        write_model(SHAPE, model)
        engine = MegatronEngine(configuration(model, LAYOUTS["tp1"]), torch.device("cpu"))
        engine.load(model)
        for ratio in arguments.ratios:
            for divided in DIVIDED:
                found = measure(engine, make_samples(ratio, divided), arguments.repetitions)
                cases[f"{ratio}, {divided}"] = {name: round(value, 4) for name, value in found.items()}
                print(ratio, divided, cases[f"{ratio}, {divided}"], file=sys.stderr, flush=True)
        engine.close()
    results = {
        "run": now(),
        "commit": commit(),
        "host": {"cpu": cpu(), "cores": os.cpu_count()},
        "software": software_versions(("torch", "megatron-core")),
        "repetitions": arguments.repetitions,
        "load_average_before": list(load),
        "cases": cases,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "sharing.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
