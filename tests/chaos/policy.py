"""The policies of the chaos tests: other numbers at every version.

"tiny" has random numbers. The large ones are for transfers that take their time: every tensor is one number, exact in
bfloat16, so that a version costs no memory beside the shards.
"""

from functools import lru_cache

import torch

from tests.kit.stores import canonical_tensors, cut, medium_spec, tiny_spec
from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.transfer.tensors import tensor_checksums

TRAINER = Parallel(tensor=2)
ROLLOUT = Parallel()
SPEC = tiny_spec()
SPECS = {
    "tiny": SPEC,
    # 50 and 490 million parameters: 100 MB and 1 GB for a replica.
    "50m": medium_spec(),
    "0.5b": tiny_spec(
        num_hidden_layers=24,
        hidden_size=1280,
        intermediate_size=3584,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=80,
        vocab_size=16000,
    ),
}
_PATTERN = 128  # versions and tensors are told apart by numbers up to this, which bfloat16 holds exactly


def dtype_of(size: str) -> torch.dtype:
    """What everybody holds."""
    return torch.float32 if size == "tiny" else torch.bfloat16


def weights_of(version: int, size: str = "tiny") -> dict[str, torch.Tensor]:
    """Every canonical tensor at a version."""
    if size == "tiny":
        return canonical_tensors(SPEC, seed=version)
    layout = hf_layout(SPECS[size])
    return {
        name: torch.full((), (version + 7 * number) % _PATTERN, dtype=torch.float32).expand(shape)
        for number, (name, shape) in enumerate(zip(layout.params, layout.param_shapes, strict=True))
    }


def shard_of(layout: Layout, rank: int, version: int, size: str) -> dict[str, torch.Tensor]:
    """What a rank holds at a version."""
    return cut(layout, rank, weights_of(version, size), dtype_of(size))


@lru_cache(maxsize=64)
def expected_checksums(version: int, size: str = "tiny") -> dict[str, str]:
    """What a replica's only rank holds at a version."""
    return tensor_checksums(shard_of(sglang_layout(SPECS[size], ROLLOUT), 0, version, size))
