"""The same step in plain transformers and torch: padded as TRL pads, computed the faster way where there are two.

Legend: S samples, P tokens of the longest prompt, C of the longest completion of all samples, B samples of an update.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tools.bench_train.shapes import UPDATES
from tools.bench_train.workers.channel import (
    ADAM_EPS,
    CLIP_NORM,
    CLIP_RATIO,
    LEARNING_RATE,
    Channel,
    options,
    serve,
)
from trainer_service.micro_batches.samples import Samples, starts


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of samples: prompts are padded on the left, completions on the right."""

    input_ids: Tensor  # [S, P + C]
    mask: Tensor  # [S, P + C]
    completion_mask: Tensor  # [S, C]
    advantages: Tensor  # [S]

    @classmethod
    def of(cls, samples: Samples) -> "Batch":
        """Pad all samples of a step to one width, as TRL does."""
        prompt, completion = int(samples.prompt_lengths.max()), int(samples.completion_lengths.max())
        input_ids = torch.zeros(len(samples), prompt + completion, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        first = prompt - samples.prompt_lengths
        for row, (start, length) in enumerate(zip(starts(samples.lengths), samples.lengths, strict=True)):
            place = slice(first[row], first[row] + length)
            input_ids[row, place] = torch.from_numpy(samples.token_ids[start : start + length])
            mask[row, place] = 1
        advantages = torch.from_numpy(samples.advantages)
        return cls(input_ids=input_ids, mask=mask, completion_mask=mask[:, prompt:], advantages=advantages)

    def rows(self, rows: Tensor) -> "Batch":
        """Take some samples, [B]."""
        fields = {name: value[rows] for name, value in vars(self).items()}
        return Batch(**fields)


class PaddedSteps:
    """Steps of a transformers model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model.train()
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, eps=ADAM_EPS, weight_decay=0.0, fused=True
        )

    def step(self, samples: Samples) -> float:
        """Compute old log-probs of all samples, then the updates."""
        whole = Batch.of(samples)
        updates = [whole.rows(torch.from_numpy(np.flatnonzero(samples.update_index == k))) for k in range(UPDATES)]
        with torch.no_grad():
            old = [self._logprobs_entropies(batch)[0] for batch in updates]
        return float(np.mean([self._update(batch, before) for batch, before in zip(updates, old, strict=True)]))

    def _update(self, batch: Batch, old: Tensor) -> float:
        logprobs, _ = self._logprobs_entropies(batch)
        ratio = (logprobs - old).exp()
        advantages = batch.advantages[:, None]
        losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_RATIO, 1 + CLIP_RATIO) * advantages)
        loss = (losses * batch.completion_mask).sum() / batch.completion_mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss)

    def _logprobs_entropies(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Compute [B, C] log-probs, and entropies, which both trainers report."""
        completion = batch.completion_mask.shape[1]
        out = self._model(
            input_ids=batch.input_ids, attention_mask=batch.mask, logits_to_keep=completion + 1, use_cache=False
        )
        logprobs = out.logits[:, :-1].log_softmax(-1)
        with torch.no_grad():
            entropies = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(-1, batch.input_ids[:, -completion:, None])[..., 0], entropies

    def export(self, folder: Path) -> None:
        """Save the model."""
        self._model.save_pretrained(folder)


def main() -> None:
    """Serve commands."""
    arguments, shape = options()
    channel = Channel(shape)
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, attn_implementation="sdpa")
    serve(channel, PaddedSteps(model))


if __name__ == "__main__":
    main()
