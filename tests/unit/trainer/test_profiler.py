"""Profiles of train steps: which steps, what the table says of a real one, and how a timeline is divided."""

import gzip
import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from tandem_config.sections.profile import ProfileSection
from tandem_files.profiles.folder import read_profiles, trace_path
from tests.integration.trainer.reference import NUM_UPDATES, make_samples
from trainer_service.measure import profiler as profiling
from trainer_service.measure.profiler import MICRO_BATCHES, StepProfiler
from trainer_service.measure.trace_table import Interval, Shares, intervals_of, operators, shares

CPU = torch.device("cpu")
SAMPLES = make_samples()
Make = Callable[..., Any]


def span(start_s: float, end_s: float, communicates: bool = False, name: str = "aten::mm") -> Interval:
    return Interval(name=name, start_s=start_s, end_s=end_s, self_s=end_s - start_s, communicates=communicates)


def test_communication_behind_computing_is_not_exposed() -> None:
    # computing 0-4 and 6-7, a collective 3-6, another 6-7 behind computing, nothing 7-10
    intervals = [span(0, 3), span(2, 4), span(3, 6, True), span(6, 7), span(6, 7, True)]
    assert shares(intervals, 10) == Shares(compute_s=5, communication_s=4, exposed_s=2, idle_s=3)
    assert shares([], 2) == Shares(compute_s=0, communication_s=0, exposed_s=0, idle_s=2)


def event(name: str, start: float, end: float, category: str = "cpu_op", thread: int = 1) -> dict[str, Any]:
    """As in torch's trace; times in microseconds."""
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": end - start}


def test_on_a_host_operators_count_and_what_calls_them_does_not() -> None:
    """A node of autograd that waits for a collective would be computing otherwise."""
    events = [
        event("old_logprobs", 0, 100, "user_annotation"),
        event("_AllReduceBackward", 0, 90),
        event("aten::linear", 0, 20),
        event("aten::mm", 2, 18),
        event("c10d::allreduce_", 20, 22),
        event("gloo:all_reduce", 21, 80, "user_annotation", thread=2),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "tid": 1, "ts": 3},
    ]
    intervals = intervals_of(events, "cpu")
    found = shares(intervals, 100e-6)
    assert [found.compute_s, found.communication_s, found.idle_s] == pytest.approx([20e-6, 60e-6, 20e-6])
    by_name = {operator.name: operator.seconds for operator in operators(intervals)}
    assert by_name["gloo:all_reduce"] == pytest.approx(59e-6)
    assert by_name["aten::linear"] == pytest.approx(4e-6)


def test_on_a_gpu_its_kernels_count_and_the_host_does_not() -> None:
    events = [
        event("aten::mm", 0, 500),
        event("forward_backward", 10, 90, "gpu_user_annotation"),
        event("sm90_xmma_gemm_bf16", 10, 40, "kernel"),
        event("sm90_xmma_gemm_bf16", 50, 60, "kernel"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)", 30, 50, "kernel"),
    ]
    intervals = intervals_of(events, "cuda")
    found = shares(intervals, 100e-6)
    assert [found.compute_s, found.exposed_s, found.idle_s] == pytest.approx([40e-6, 10e-6, 50e-6])
    assert next((operator.name, operator.calls) for operator in operators(intervals)) == ("sm90_xmma_gemm_bf16", 2)


def test_a_real_step_is_profiled_when_its_turn_comes_by_the_configuration(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine(profile={"steps": 1, "first": 2}, run_dir=tmp_path)
    engine.train_step(SAMPLES, NUM_UPDATES)
    assert list(tmp_path.iterdir()) == []
    seconds = engine.train_step(SAMPLES, NUM_UPDATES).seconds
    engine.train_step(SAMPLES, NUM_UPDATES)
    engine._profiler.wait()
    (table,) = read_profiles(tmp_path)
    assert (table.step, table.rank, table.world_size, table.timeline) == (2, 0, 1, "cpu")
    assert table.parts == seconds
    assert 0 < table.communication_s < table.recorded_s <= table.seconds  # sums of one rank
    assert 0.1 * table.recorded_s < table.compute_s < table.recorded_s
    assert table.compute_s + table.exposed_s + table.idle_s == pytest.approx(table.recorded_s, rel=0.05)
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


def test_the_first_micro_batches_of_each_part_are_recorded(make_engine: Make, tmp_path: Path) -> None:
    """However many there are: events of all would be millions, on which the other ranks would wait."""
    engine = make_engine(
        profile={"steps": 1, "first": 1},
        run_dir=tmp_path,
        trainer={"max_tokens_per_micro_batch": int(SAMPLES.lengths.sum()) // 24},
        old_logprobs="recompute",
        kl_coefficient=0.0,
    )
    engine.train_step(SAMPLES, NUM_UPDATES)
    engine._profiler.wait()
    events = json.loads(gzip.decompress(trace_path(tmp_path, 1, 0).read_bytes()))["traceEvents"]
    names = [one.get("name") for one in events if one.get("ph") == "X"]
    seen = engine._profiler._seen
    assert seen["forward_backward"] > 2 * MICRO_BATCHES
    # one in each forward pass; of the first update also the last
    assert names.count("aten::embedding") == sum(min(count, MICRO_BATCHES) for count in seen.values()) + 1
    assert names.count("aten::embedding_dense_backward") == MICRO_BATCHES + 1
    assert {"old_logprobs", "forward_backward", "optimizer"} <= set(names)
    (table,) = read_profiles(tmp_path)
    assert table.recorded_s < table.seconds
    assert sorted(path.name for path in trace_path(tmp_path, 1, 0).parent.iterdir()) == [
        "rank-000.json",
        "rank-000.trace.json.gz",
    ]


def test_a_stage_of_a_pipeline_records_backward_passes_and_the_reduction_of_gradients(tmp_path: Path) -> None:
    """The first of eight stages, whose warm-up has more forward passes than are recorded first."""
    profiler, span = StepProfiler(ProfileSection(steps=1, first=1), tmp_path, CPU), torch.profiler.record_function
    with profiler.around(1):
        for update in range(2):
            with profiler.part("forward_backward"):
                for number in range(12):
                    profiler.micro_batch(number == 11)
                    with span(f"forward {update} {number}"):
                        pass
                    if number >= 7:
                        with span(f"backward {update} {number - 7}"):
                            pass
                for number in range(5, 12):
                    with span(f"backward {update} {number}"):
                        pass
                with span(f"reduce {update}"):
                    pass
    profiler.wait()
    events = json.loads(gzip.decompress(trace_path(tmp_path, 1, 0).read_bytes()))["traceEvents"]
    forward, backward, reduced = (
        [name for one in events if (name := str(one.get("name"))).startswith(f"{what} ")]
        for what in ("forward", "backward", "reduce")
    )
    assert sorted(set(forward)) == sorted(f"forward 0 {number}" for number in (0, 1, 2, 3, 11))
    assert sorted(set(backward)) == sorted(f"backward 0 {number}" for number in range(4, 12))
    assert set(reduced) == {"reduce 0"}


def test_the_seconds_of_a_step_are_without_the_end_of_its_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, now = torch.profiler.profile.__exit__, [0.0]

    def end(*given: Any) -> None:
        now[0] += 100.0
        real(*given)

    monkeypatch.setattr(torch.profiler.profile, "__exit__", end)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    profiler = StepProfiler(ProfileSection(steps=1, first=1), tmp_path, CPU)
    with profiler.around(1):
        now[0] += 3.0
    profiler.wait()
    (table,) = read_profiles(tmp_path)
    assert (table.seconds, table.recorded_s) == (3.0, 3.0)


def test_tables_are_made_one_after_the_other_and_all_are_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, running, most = threading.Event(), [0], [0]

    def make(*_: Any, **__: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        may_end.wait(60)
        running[0] -= 1

    monkeypatch.setattr(subprocess, "run", make)
    profiler = StepProfiler(ProfileSection(steps=2, first=1), tmp_path, CPU)
    for step in (1, 2):
        with profiler.around(step):
            pass
    with capture_logs() as logs:
        profiler.wait(0.1)
    assert "within 0.1 s of the stop" in logs[0]["error"]
    may_end.set()
    profiler.wait()
    assert (running, most) == ([0], [1])


def test_a_step_does_not_wait_for_its_table(make_engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = threading.Event()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: made.wait(60))
    engine = make_engine(profile={"steps": 1, "first": 1}, run_dir=tmp_path)
    engine.train_step(SAMPLES, NUM_UPDATES)  # ends though the table does not come
    assert engine._profiler._writing.is_alive()
    made.set()
    engine._profiler.wait()


def test_a_table_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    trace = tmp_path / "rank-000.trace.json"
    trace.write_text("no trace")
    with capture_logs() as logs:
        profiling._write(trace, {"step": 1, "run_dir": str(tmp_path)})
    (line,) = logs
    assert (line["event"], "JSONDecodeError" in line["error"]) == ("profile not written", True)
    assert not trace.exists()
