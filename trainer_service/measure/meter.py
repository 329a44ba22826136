"""Measures a train step: tokens per second, model-FLOPs utilisation, peak memory, over all ranks."""

from functools import cached_property

import torch
import torch.distributed as dist

from servicekit.logs import get_logger
from trainer_service.measure.memory import peak_bytes, restart_peak
from trainer_service.measure.speed import measured_flops_per_s

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
        _ = self._flops_per_s  # before the step, since it is none of its work
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
