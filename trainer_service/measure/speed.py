"""The highest speed of a rank's device, in FLOP/s: measured with a matrix product in the model's type."""

import time

import torch

# A product's dimension: large enough to fill the device. A GPU does the larger one in 1 to 20 ms.
_SIZES = {"cpu": 512, "cuda": 8192}
_SECONDS = 0.1
_MOST_REPEATS = 50


def measured_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Multiply square matrices for about 0.1 s. Returns: FLOP/s of the fastest product."""
    size = _SIZES[device.type]
    # no random numbers, whose state is the trainer's; equal ones would need less power than a model's
    left = torch.linspace(-1, 1, size * size, device=device).to(dtype).view(size, size)
    right, out = left.flip(0), torch.empty_like(left)
    _seconds(left, right, out)  # the first one loads the kernel
    best, begun_s = float("inf"), time.perf_counter()
    for _ in range(_MOST_REPEATS):
        best = min(best, _seconds(left, right, out))
        if time.perf_counter() - begun_s > _SECONDS:
            break
    return 2.0 * size**3 / best


def _seconds(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    begun_s = time.perf_counter()
    torch.mm(left, right, out=out)
    if left.device.type == "cuda":
        torch.cuda.synchronize(left.device)
    return time.perf_counter() - begun_s
