"""Small samples and messages for the trainer's unit tests."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from servicekit.rpc.arrays import packed
from tandem_api.trainer.v1 import trainer_pb2 as pb
from trainer_service.micro_batches.checks import Limits
from trainer_service.micro_batches.samples import Samples

LIMITS = Limits(vocab_size=10, max_positions=16, max_tokens=64)


def message(**changes: Any) -> pb.SampleChunk:
    """Two samples: prompt 1 2 + completion 3, prompt 4 + completion 5 6."""
    fields: dict[str, Any] = {
        "update_index": 0,
        "sample_ids": ["a", "b"],
        "prompt_lengths": [2, 1],
        "completion_lengths": [1, 2],
        "token_ids": [1, 2, 3, 4, 5, 6],
        "rollout_logprobs": [-0.1, -0.2, -0.3],
        "advantages": [1.0, -1.0],
        "trainable": [True, True],
    }
    return sample_chunk({**fields, **changes})


def sample_chunk(fields: Mapping[str, Any]) -> pb.SampleChunk:
    """A message whose arrays are given as items: token_ids, rollout_logprobs, loss_mask."""
    given = dict(fields)
    for field in ("token_ids_u32", "rollout_logprobs_f32", "loss_mask_u8"):
        if (items := given.pop(field.rpartition("_")[0], None)) is not None:
            given[field] = packed(field, items)
    return pb.SampleChunk(**given)


def random_samples(num_samples: int = 40, updates: int = 2, seed: int = 0, **changes: Any) -> Samples:
    """Ragged samples, equally many in each update."""
    random = np.random.default_rng(seed)
    prompts, completions = random.integers(1, 6, num_samples), random.integers(1, 8, num_samples)
    fields: dict[str, Any] = {
        "sample_ids": tuple(f"s{i}" for i in range(num_samples)),
        "update_index": np.arange(num_samples) * updates // num_samples,
        "prompt_lengths": prompts,
        "completion_lengths": completions,
        "token_ids": random.integers(0, 10, int((prompts + completions).sum())),
        "rollout_logprobs": random.normal(-2, 1, int(completions.sum())).astype(np.float32),
        "advantages": random.normal(size=num_samples).astype(np.float32),
        "trainable": np.ones(num_samples, np.bool_),
    }
    return Samples(**{**fields, **changes})
