"""TRL's GRPOTrainer, in an environment of its own. Its public `rollout_func` gives it the samples of each step.

A step is measured from there to the next call of `rollout_func`: it is TRL's padding, rewards, advantages, old
log-probs and optimizer updates. Gradient checkpointing and bfloat16, TRL's defaults, are off as for the other ways.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from tools.bench_train.shapes import GROUP, UPDATES, Shape
from tools.bench_train.workers.channel import (
    ADAM_EPS,
    CLIP_NORM,
    CLIP_RATIO,
    LEARNING_RATE,
    Channel,
    Meter,
    options,
)
from trainer_service.micro_batches.samples import Samples


class Steps:
    """Gives samples to TRL, a step for each command."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._meter: Meter | None = None
        self._samples: Samples | None = None

    def rollouts(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """Answer the command of the step that has ended, then wait for the next one. TRL's `rollout_func`."""
        if self._meter is None:
            self._channel.answer(ready=True)
        else:
            self._channel.answer(loss=None, **self._meter.result())
        while (command := self._channel.receive())["do"] == "export":
            trainer.model.save_pretrained(command["folder"])
            self._channel.answer()
        samples = self._samples = self._channel.samples(command["lengths"])
        tokens = np.split(samples.token_ids, np.cumsum(samples.lengths)[:-1])
        cut = [np.split(row, [prompt]) for row, prompt in zip(tokens, samples.prompt_lengths, strict=True)]
        found = {
            "prompt_ids": [prompt.tolist() for prompt, _ in cut],
            "completion_ids": [completion.tolist() for _, completion in cut],
            "logprobs": None,
        }
        self._meter = Meter()
        return found

    def rewards(self, completions: list[Any], **_: Any) -> list[float]:
        """Return rewards whose mean within each group is 0: TRL's advantages are these."""
        assert self._samples is not None
        return [float(advantage) for advantage in self._samples.advantages]


def configuration(shape: Shape, folder: Path) -> GRPOConfig:
    """Make TRL's settings of the same step."""
    return GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=shape.num_samples // UPDATES,
        gradient_accumulation_steps=1,
        steps_per_generation=UPDATES,
        num_generations=GROUP,
        max_completion_length=2048,
        learning_rate=LEARNING_RATE,
        adam_epsilon=ADAM_EPS,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=CLIP_NORM,
        epsilon=CLIP_RATIO,
        beta=0.0,
        loss_type="bnpo",  # the mean over an update's tokens
        scale_rewards="none",
        temperature=1.0,
        max_steps=10**9,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    """Train until the end of commands."""
    arguments, shape = options()
    channel = Channel(shape)
    torch.set_num_threads(arguments.threads)
    steps = Steps(channel)
    prompts = [f"t{2 + index % (shape.vocabulary - 2)}" for index in range(shape.num_samples // GROUP)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(arguments.model),
        reward_funcs=steps.rewards,
        rollout_func=steps.rollouts,
        args=configuration(shape, arguments.meeting.with_suffix(".trl")),
        train_dataset=Dataset.from_dict({"prompt": prompts}),
    )
    trainer.train()
    sys.exit("TRL ended before its commands did")


if __name__ == "__main__":
    main()
