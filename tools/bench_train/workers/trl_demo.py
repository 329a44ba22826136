"""The demo's work in TRL: its model, problems, reward and sizes, by GRPOTrainer with generation by transformers.

Prints a line of JSON: the seconds of each rollout step, that is generation, rewards and its optimizer updates.
"""

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from tandem_config.loading import load_config


class Clock(TrainerCallback):  # type: ignore[misc]  # of transformers, which is not typed here
    """Notes when each optimizer update ends."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start."""
        self.ends_s.append(time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Note the end of an update."""
        self.ends_s.append(time.perf_counter())


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Score 1 for the answer and nothing else."""
    return [float(completion == expected) for completion, expected in zip(completions, answer, strict=True)]


def main() -> None:
    """Train as the demo's configuration says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("folder", type=Path, help="for what TRL writes")
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    demo = load_config(arguments.config)
    grpo, updates = demo.grpo, demo.grpo.updates_per_iteration
    samples = grpo.prompts_per_iteration * grpo.group_size
    settings = GRPOConfig(
        output_dir=str(arguments.folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=samples // updates,
        steps_per_generation=updates,
        gradient_accumulation_steps=1,
        num_generations=grpo.group_size,
        max_completion_length=grpo.max_new_tokens,
        temperature=grpo.temperature,
        beta=0.0,
        epsilon=grpo.clip_low,
        epsilon_high=grpo.clip_high,
        loss_type="dapo",
        scale_rewards="group",
        learning_rate=demo.trainer.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=demo.trainer.clip_grad,
        max_steps=arguments.iterations * updates,
        save_strategy="no",
        report_to="none",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    problems = arguments.config.parent / "train.jsonl"
    rows = [json.loads(line) for line in problems.read_text(encoding="utf-8").splitlines()]
    clock = Clock()
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(demo.model.path, dtype=torch.float32),
        reward_funcs=exact,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(demo.model.path),
        callbacks=[clock],
    ).train()
    ends_s = clock.ends_s[::updates]
    steps_s = [end_s - start_s for start_s, end_s in pairwise(ends_s)]
    sys.stdout.write("\n" + json.dumps(steps_s) + "\n")


if __name__ == "__main__":
    main()
