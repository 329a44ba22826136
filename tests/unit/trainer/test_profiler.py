"""Profiles of train steps: which steps, what the table says of a real one, and how a timeline is divided."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch.autograd import DeviceType

from tandem_config.sections.profile import ProfileSection
from tandem_files.profiles.folder import read_profiles, trace_path
from tests.integration.trainer.reference import NUM_UPDATES, make_samples
from trainer_service.measure.profiler import StepProfiler, intervals_of, operators
from trainer_service.measure.timeline import Interval, Shares, shares

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SAMPLES = make_samples()
Make = Callable[..., Any]


def span(start_s: float, end_s: float, communicates: bool = False, name: str = "aten::mm") -> Interval:
    return Interval(name=name, start_s=start_s, end_s=end_s, self_s=end_s - start_s, communicates=communicates)


def test_communication_behind_computing_is_not_exposed() -> None:
    # computing 0-4 and 6-7, a collective 3-6, another 6-7 behind computing, nothing 7-10
    intervals = [span(0, 3), span(2, 4), span(3, 6, True), span(6, 7), span(6, 7, True)]
    assert shares(intervals, 10) == Shares(compute_s=5, communication_s=4, exposed_s=2, idle_s=3)
    assert shares([], 2) == Shares(compute_s=0, communication_s=0, exposed_s=0, idle_s=2)


def event(name: str, start: float, end: float, device: DeviceType = DeviceType.CPU, **fields: Any) -> SimpleNamespace:
    """As torch.profiler's FunctionEvent; times in microseconds."""
    times = SimpleNamespace(start=start, end=end)
    defaults = {"is_user_annotation": False, "self_cpu_time_total": end - start}
    return SimpleNamespace(name=name, time_range=times, device_type=device, **{**defaults, **fields})


def test_on_a_host_operators_count_and_what_calls_them_does_not() -> None:
    """A node of autograd that waits for a collective would be computing otherwise."""
    events = [
        event("old_logprobs", 0, 100, is_user_annotation=True),
        event("_AllReduceBackward", 0, 90),
        event("aten::linear", 0, 20, self_cpu_time_total=5),
        event("aten::mm", 2, 18),
        event("c10d::allreduce_", 20, 22),
        event("gloo:all_reduce", 21, 80, self_cpu_time_total=0),
    ]
    intervals = intervals_of(events, CPU)
    found = shares(intervals, 100e-6)
    assert [found.compute_s, found.communication_s, found.idle_s] == pytest.approx([20e-6, 60e-6, 20e-6])
    by_name = {operator.name: operator.seconds for operator in operators(intervals)}
    assert by_name["gloo:all_reduce"] == pytest.approx(59e-6)
    assert by_name["aten::linear"] == pytest.approx(5e-6)


def test_on_a_gpu_its_kernels_count_and_the_host_does_not() -> None:
    events = [
        event("aten::mm", 0, 500),
        event("forward_backward", 10, 90, DeviceType.CUDA, is_user_annotation=True),
        event("sm90_xmma_gemm_bf16", 10, 40, DeviceType.CUDA),
        event("sm90_xmma_gemm_bf16", 50, 60, DeviceType.CUDA),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 30, 50, DeviceType.CUDA),
    ]
    intervals = intervals_of(events, GPU)
    found = shares(intervals, 100e-6)
    assert [found.compute_s, found.exposed_s, found.idle_s] == pytest.approx([40e-6, 10e-6, 50e-6])
    assert next((operator.name, operator.calls) for operator in operators(intervals)) == ("sm90_xmma_gemm_bf16", 2)


@pytest.mark.timeout(120)  # torch.profiler's events are slow to read
def test_a_real_step_is_profiled_when_its_turn_comes_by_the_configuration(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine(profile={"steps": 1, "first": 2}, run_dir=tmp_path)
    engine.train_step(SAMPLES, NUM_UPDATES)
    assert list(tmp_path.iterdir()) == []
    seconds = engine.train_step(SAMPLES, NUM_UPDATES).seconds
    engine.train_step(SAMPLES, NUM_UPDATES)
    (table,) = read_profiles(tmp_path)
    assert (table.step, table.rank, table.world_size, table.timeline) == (2, 0, 1, "cpu")
    assert table.parts == seconds
    assert 0 < table.communication_s < table.seconds  # sums of one rank
    assert 0.1 * table.seconds < table.compute_s < table.seconds
    assert table.compute_s + table.exposed_s + table.idle_s == pytest.approx(table.seconds, rel=0.05)
    assert "aten::mm" in {operator.name for operator in table.operators}
    events = json.loads(gzip.decompress(trace_path(tmp_path, 2, 0).read_bytes()))["traceEvents"]
    assert {"pack", "old_logprobs", "forward_backward", "optimizer", "aten::mm"} <= {one.get("name") for one in events}


def test_other_ranks_and_no_folder_profile_nothing(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine()
    for settings, folder in ((ProfileSection(steps=1, first=1, ranks=(1,)), tmp_path), (ProfileSection(steps=1), None)):
        engine._profiler = StepProfiler(settings, folder, CPU)
        engine.train_step(SAMPLES, NUM_UPDATES)
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_cannot_be_written_is_a_warning(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine()
    (tmp_path / "profile").write_text("no folder")
    engine._profiler = StepProfiler(ProfileSection(steps=1, first=1), tmp_path, CPU)
    with capture_logs() as logs:
        assert engine.train_step(SAMPLES, NUM_UPDATES).metrics["samples"] == len(SAMPLES)
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["profile not written"]
    assert engine.policy_version == 1


def test_a_step_that_fails_writes_no_profile(make_engine: Make, tmp_path: Path) -> None:
    profiler = StepProfiler(ProfileSection(steps=1, first=1), tmp_path, CPU)
    make_engine()
    with pytest.raises(ZeroDivisionError), profiler.around(1):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
