"""Seeds of requests: a completion's tokens depend on its seed and its text, not on what else the engine computes.

SGLang honours `sampling_seed` in deterministic inference only, which needs certain GPU kernels. These hooks honour it
in ordinary inference, where log-probs of different batches differ by rounding: a completion is repeated unless two
tokens are closer than that. A token is argmax p / e over the vocabulary, e exponential with mean 1, which is a draw
from p; here e comes from a hash of (seed, position, token).

| hook                                  | does                                                                  |
|---------------------------------------|-----------------------------------------------------------------------|
| SamplingBatchInfo.from_schedule_batch | gives a batch the seeds of its requests, if all have one              |
| SamplingBatchInfo.merge_batch         | removes them if the other batch has none: SGLang needs all or none    |
| sampling_from_probs_torch             | draws with them                                                       |
| multinomial_with_seed                 | the same after top-k and top-p                                        |
"""

from collections.abc import Callable
from typing import Any

import torch

# Elements that are hashed together: 32 MiB of int64.
_CHUNK = 1 << 22
# SplitMix64 (Steele, Lea, Flood 2014); as int64, whose products wrap around.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def request_seed(group_seed: int, index: int) -> int:
    """Make the seed of completion `index` of a group, as SGLang takes it (63 bits).

    >>> request_seed(5, 0), request_seed(2**64 - 1, 3)
    (5, 2)
    """
    return (group_seed + index) % (1 << 63)


def give_seeds(info: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Set the seeds of a batch, after SamplingBatchInfo.from_schedule_batch."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if info.sampling_seed is None and None not in seeds and _can_be_seeded(info):
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device)


def _can_be_seeded(info: Any) -> bool:
    """Whether SGLang's sampler takes seeds for such a batch; its kernels for GPUs take none with top-p and top-k."""
    from sglang.srt.runtime_context import get_exec

    filtered = info.need_top_p_sampling or info.need_top_k_sampling
    return not info.need_min_p_sampling and (not filtered or get_exec().kernel.sampling_backend == "pytorch")


def all_or_none(info: Any, other: Any) -> None:
    """Remove the seeds of two batches of which one has none, before SamplingBatchInfo.merge_batch."""
    if info.sampling_seed is None or other.sampling_seed is None:
        info.sampling_seed = other.sampling_seed = None


def draw_from_probs(
    draw_without: Callable[..., Any],
    probs: torch.Tensor,
    sampling_seed: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> Any:
    """Draw a token of each row, around sampling_from_probs_torch."""
    if sampling_seed is None or positions is None:
        return draw_without(probs, sampling_seed=sampling_seed, positions=positions)
    return seeded_draw(probs, sampling_seed, positions).to(torch.int32)


def draw_from_logprobs(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw an index of each row, in place of multinomial_with_seed. Returns: [B, 1]."""
    return seeded_draw(logprobs.exp(), seed, positions).view(-1, 1)


def seeded_draw(probs_BV: torch.Tensor, seeds_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Draw a token from each row of probabilities, which need not sum to 1.

    Args:
        positions_B: of the token before the one that is drawn.
    Returns: [B] tokens (int64); a function of each row, seed and position alone.
    """
    num_rows, num_tokens = probs_BV.shape
    tokens_V = _GOLDEN * torch.arange(1, num_tokens + 1, device=probs_BV.device)
    rows_B = _mixed(seeds_B.long() + _GOLDEN * (positions_B.long() + 1))
    step = max(1, _CHUNK // num_tokens)
    drawn = [
        (probs_BV[start : start + step] / _exponential(rows_B[start : start + step, None] + tokens_V)).argmax(dim=-1)
        for start in range(0, num_rows, step)
    ]
    return torch.cat(drawn)


def _mixed(state: torch.Tensor) -> torch.Tensor:
    """Apply the output function of SplitMix64, in place."""
    state ^= _shifted(state, 30)
    state *= _MIX1
    state ^= _shifted(state, 27)
    state *= _MIX2
    state ^= _shifted(state, 31)
    return state


def _shifted(state: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (state >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _exponential(state: torch.Tensor) -> torch.Tensor:
    """Turn states into exponential noise, at least 2^-33, in place: -log1p(-u) is precise where u is small."""
    uniform = _shifted(_mixed(state), 32).to(torch.float32).add_(0.5).mul_(2.0**-32)
    return uniform.neg_().log1p_().neg_()
