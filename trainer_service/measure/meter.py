"""Measures a train step: tokens per second, model-FLOPs utilisation, peak memory, over all ranks."""

import time
from functools import cached_property
from pathlib import Path

import torch
import torch.distributed as dist

from servicekit.logs import get_logger
from weightsync.transfer.devices import wait_for_device

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
_KIB = 1024
# Dimension of the matrices whose product is timed: enough to fill the device. A GPU does the larger one in 1 to 20 ms.
_SIZES = {"cpu": 512, "cuda": 8192}
# Time that is spent on it, and most products.
_SECONDS = 0.1
_MOST_REPEATS = 50

log = get_logger(__name__)


class StepMeter:
    """Measures steps; every rank makes one and calls its methods together with the others.

    Args:
        peak_tflops: of a rank's device, in 10^12 FLOP/s; None: it is measured in the first step, on all ranks together.
        dtype: of the model.
        group: of all ranks, over gloo: a rank may measure for longer than a collective of a device waits.
    """

    def __init__(
        self, device: torch.device, dtype: torch.dtype, peak_tflops: float | None, group: dist.ProcessGroup
    ) -> None:
        self._device, self._dtype, self._peak_tflops, self._group = device, dtype, peak_tflops, group

    def begin(self) -> None:
        """Begin a step."""
        _ = self._flops_per_s  # before the step, because it is none of its work
        restart_peak(self._device)

    def metrics(self, *, tokens: int, flops: float, seconds: float) -> dict[str, float]:
        """Compute the metrics of a step that has ended.

        Args:
            tokens: of the step's samples, prompts included.
            flops: that the step needs, of all ranks.
            seconds: of the step on this rank.
        Returns: train_tokens_per_s; model_flops_utilization: `flops` / what the devices could do in `seconds`;
            train_peak_memory_bytes: of the rank that had most; train_peak_flops_per_s: of all devices.
        """
        peak = torch.tensor(peak_bytes(self._device), dtype=torch.float64)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=self._group)
        return {
            "train_tokens_per_s": tokens / seconds,
            "model_flops_utilization": flops / (seconds * self._flops_per_s),
            "train_peak_memory_bytes": float(peak),
            "train_peak_flops_per_s": self._flops_per_s,
        }

    @cached_property
    def _flops_per_s(self) -> float:
        """FLOP/s of all ranks' devices."""
        if self._peak_tflops is not None:
            return self._peak_tflops * 1e12 * int(dist.get_world_size())
        total = torch.tensor(measured_flops_per_s(self._device, self._dtype), dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        if dist.get_rank() == 0:
            tflops = float(total) / 1e12 / dist.get_world_size()
            log.info("device speed measured", tflops_per_rank=round(tflops, 3), ranks=dist.get_world_size())
        return float(total)


def restart_peak(device: torch.device) -> None:
    """Begin a new peak: of what PyTorch has allocated on a GPU, else of what the process has resident.

    Where a host does not let a process do that for its resident memory, the peak is that since the process started.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes since `restart_peak`; 0 where the host does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = (_PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * _KIB for line in lines if line.startswith("VmHWM:")), 0)


def measured_flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    """Multiply square matrices of the model's type for about 0.1 s. Returns: FLOP/s of the fastest product."""
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
    wait_for_device(left.device)
    return time.perf_counter() - begun_s
