"""The policy of the chaos tests: small, and other numbers at every version."""

import torch

from tests.weight_stores import canonical_tensors, cut, tiny_spec
from weightsync.layout import Parallel
from weightsync.sglang_layout import sglang_layout
from weightsync.tensors import tensor_checksums

TRAINER = Parallel(tensor=2)
ROLLOUT = Parallel()
SPEC = tiny_spec()
_checksums: dict[int, dict[str, str]] = {}


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Every canonical tensor at a version."""
    return canonical_tensors(SPEC, seed=version)


def expected_checksums(version: int) -> dict[str, str]:
    """What a replica's only rank holds at a version."""
    if version not in _checksums:
        _checksums[version] = tensor_checksums(cut(sglang_layout(SPEC, ROLLOUT), 0, weights_of(version)))
    return _checksums[version]
