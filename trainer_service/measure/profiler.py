"""Profiles the train steps that the configuration names: a trace by torch.profiler, and a table made from it."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from servicekit.logs import get_logger
from tandem_config.sections.profile import ProfileSection
from tandem_files.profiles.folder import step_folder, trace_path
from weightsync.transfer.devices import wait_for_device

# Micro-batches that are recorded of each part of a step. A layer has some 360 events forward and 980 with its backward
# pass on a GPU, of 260 bytes each: with 28 layers 150,000. All 184 micro-batches of 1,024 samples of 1,536 tokens would
# be 3.6 million, a gigabyte, and minutes in which the other ranks wait.
MICRO_BATCHES = 4
# In which the table and the packed trace are made, during the training.
_TABLE_S = 600.0

log = get_logger(__name__)


class StepProfiler:
    """Profiles steps of this rank: of each part the first micro-batches, and all that is done besides them.

    Of the first update also the last one: gradients are reduced after it, or during its backward pass. And a pipeline's
    stage has run some forward passes, all that are recorded perhaps, before its first backward pass.

    Args:
        run_dir: folder of the run; None: there is none, and nothing is profiled.
    """

    def __init__(self, settings: ProfileSection, run_dir: Path | None, device: torch.device) -> None:
        self._settings, self._run_dir, self._device = settings, run_dir, device
        self._activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._recorder: Any = None  # while a step is profiled
        self._seen: Counter[str] = Counter()  # micro-batches, by part
        self._part, self._has_last = "", False
        self._since_s: float | None = None  # None: it is not recording
        self._recorded_s = 0.0
        self._writing: threading.Thread | None = None

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
        settings = self._settings
        self._seen.clear()
        self._has_last, self._recorded_s = False, 0.0
        begun_s = self._since_s = time.perf_counter()
        with profile(
            activities=self._activities,
            record_shapes=settings.shapes,
            profile_memory=settings.memory,
        ) as self._recorder:
            recorder = self._recorder
            try:
                yield parts
                self._record(False)
                seconds = time.perf_counter() - begun_s
            finally:
                self._recorder = None
        trace = trace_path(self._run_dir, step, dist.get_rank()).with_suffix("")  # not packed yet
        fields = {"step": step, "rank": dist.get_rank(), "world_size": dist.get_world_size(), "parts": parts}
        fields |= {"timeline": self._device.type, "seconds": seconds}
        fields |= {"recorded_s": self._recorded_s, "run_dir": str(self._run_dir)}
        try:
            step_folder(self._run_dir, step).mkdir(parents=True, exist_ok=True)
            recorder.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:  # the trace's disk is full, or Kineto has failed
            log.warning("profile not written", step=step, error=str(error))
            return
        self._writing = threading.Thread(
            target=_write, args=(trace, fields, self._writing), name="profile", daemon=True
        )
        self._writing.start()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Record a part of a step; its first micro-batches only."""
        self._part = name
        with record_function(name):
            try:
                yield
            finally:
                self._record(True)

    def micro_batch(self, last: bool) -> None:
        """Note that a micro-batch of the part begins. last: of an update."""
        if self._recorder is None:
            return
        self._seen[self._part] += 1
        self._record(self._seen[self._part] <= MICRO_BATCHES or (last and not self._has_last))
        self._has_last |= last

    def wait(self, timeout_s: float = _TABLE_S) -> None:
        """Wait for the files of all profiles, at most for `timeout_s`: they are lost when the process ends."""
        if self._writing is None:
            return
        self._writing.join(timeout_s)
        if self._writing.is_alive():
            log.warning("profile not written", error=f"its table was not made within {timeout_s:g} s of the stop")

    def _record(self, wanted: bool) -> None:
        if self._recorder is None or wanted == (self._since_s is not None):
            return
        wait_for_device(self._device)  # kernels belong to the micro-batch that launched them
        self._recorder.toggle_collection_dynamic(wanted, self._activities)
        now_s = time.perf_counter()
        self._recorded_s += 0.0 if self._since_s is None else now_s - self._since_s
        self._since_s = now_s if wanted else None


def _write(trace: Path, fields: dict[str, Any], before: threading.Thread | None = None) -> None:
    """Make the table and the packed trace in another process. before: makes those of another step, first."""
    if before is not None:
        before.join()
    command = [sys.executable, "-m", "trainer_service.measure.trace_table", str(trace), json.dumps(fields)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TABLE_S)
    except (OSError, subprocess.SubprocessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip().rpartition("\n")[2]
        trace.unlink(missing_ok=True)
        log.warning("profile not written", step=fields["step"], error=why)
        return
    log.info("profile written", step=fields["step"], trace=f"{trace}.gz")
