"""Profiles the train steps that the configuration names: a trace by torch.profiler, and a table made from it."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from servicekit.logs import get_logger
from tandem_config.sections.profile import ProfileSection
from tandem_files.profiles.folder import Operator, RankProfile, step_folder, trace_path, write_profile
from trainer_service.measure.timeline import Interval, shares

# Operators of a table.
MOST_OPERATORS = 40
_COMPUTES = "aten::"  # on a host; what calls such an operator (autograd's nodes, modules) is counted by it
_COMMUNICATES = ("c10d::", "gloo:", "nccl:", "nccldevkernel", "ncclkernel")
_US = 1e-6

log = get_logger(__name__)


class StepProfiler:
    """Profiles steps of this rank.

    Args:
        run_dir: folder of the run; None: there is none, and nothing is profiled.
    """

    def __init__(self, settings: ProfileSection, run_dir: Path | None, device: torch.device) -> None:
        self._settings, self._run_dir, self._device = settings, run_dir, device

    @contextmanager
    def around(self, step: int) -> Iterator[dict[str, float]]:
        """Profile a `with` block if this rank profiles the step. A profile that cannot be written is a warning.

        Args:
            step: its number, from 1.
        Yields: the seconds of the step's parts, for the block to fill in.
        """
        parts: dict[str, float] = {}
        if self._run_dir is None or not self._settings.covers(step, dist.get_rank()):
            yield parts
            return
        with self._recording() as recorded:
            begun_s = time.perf_counter()
            yield parts
            seconds = time.perf_counter() - begun_s
        try:
            step_folder(self._run_dir, step).mkdir(parents=True, exist_ok=True)
            write_profile(
                self._run_dir, self._table(intervals_of(recorded.events(), self._device), step, seconds, parts)
            )
            trace = trace_path(self._run_dir, step, dist.get_rank())
            recorded.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:  # the trace's disk is full, or Kineto has failed
            log.warning("profile not written", step=step, error=str(error))
            return
        log.info("profile written", step=step, trace=str(trace))

    def _recording(self) -> Any:
        settings, activities = self._settings, [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        return profile(
            activities=activities,
            record_shapes=settings.shapes,
            with_stack=settings.stacks,
            profile_memory=settings.memory,
        )

    def _table(self, intervals: list[Interval], step: int, seconds: float, parts: Mapping[str, float]) -> RankProfile:
        return RankProfile(
            step=step,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            timeline=self._device.type,
            seconds=seconds,
            parts=dict(parts),
            operators=tuple(operators(intervals)[:MOST_OPERATORS]),
            **asdict(shares(intervals, seconds)),
        )


def intervals_of(events: Iterable[Any], device: torch.device) -> list[Interval]:
    """Choose what counts of a profile's events: the device's kernels and copies, or the host's operators.

    Args:
        events: torch's FunctionEvents.
    """
    wanted = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    intervals = []
    for event in events:
        communicates = event.name.lower().startswith(_COMMUNICATES)
        computes = device.type == "cuda" or event.name.startswith(_COMPUTES)
        if event.device_type != wanted or event.is_user_annotation or not (communicates or computes):
            continue
        start_s, end_s = event.time_range.start * _US, event.time_range.end * _US
        whole = communicates or device.type == "cuda"
        self_s = end_s - start_s if whole else event.self_cpu_time_total * _US
        intervals.append(
            Interval(name=event.name, start_s=start_s, end_s=end_s, self_s=self_s, communicates=communicates)
        )
    return intervals


def operators(intervals: Iterable[Interval]) -> list[Operator]:
    """Add up intervals by name, longest first."""
    calls: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for one in intervals:
        calls[one.name] += 1
        seconds[one.name] += one.self_s
    names = sorted(seconds, key=lambda name: -seconds[name])
    return [Operator(name=name, calls=calls[name], seconds=seconds[name]) for name in names]
