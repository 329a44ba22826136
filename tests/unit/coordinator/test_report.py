import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.data.cursor import CursorState
from coordinator.fleet.services import merge_versions
from coordinator.record.iteration_warnings import check_same_model
from coordinator.record.metrics_row import Timing, build_row
from coordinator.record.state import RunState, Totals
from coordinator.record.summary import build_summary
from coordinator.sync.sync_report import RoundReports
from servicekit.errors import Internal
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import TrainResult
from tandem_files.metrics_file import MetricsFile
from tandem_files.metrics_table import BY_NAME
from tests.unit.coordinator.test_sample_sink import FOUR, completion, finished, generation
from tests.unit.coordinator.test_web_page import SPEED, STEP


def test_rows_after_an_iteration_are_cut(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.cut_after(0) == 0
    for iteration in range(1, 6):
        file.append({"iteration": iteration, "loss": None})
    assert file.cut_after(3) == 0
    assert [row["iteration"] for row in file.rows()] == [1, 2, 3]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2, "los')
    file = MetricsFile(path)
    assert [row["iteration"] for row in file.rows()] == [1]
    assert file.cut_after(2) == 1  # the second is lost
    assert path.read_text() == '{"iteration": 1}\n'


def test_a_torn_line_in_the_middle_costs_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n{"iteration": 2, "lo\xff\n{"iteration": 3}\n')
    file = MetricsFile(path)
    assert file.cut_after(3) == 1
    assert [row["iteration"] for row in file.rows()] == [1, 3]


def test_a_row_has_the_speed_of_the_trainer_and_each_part_of_its_step() -> None:
    record = finished(3).record
    assert record is not None
    metrics = {name: 0.25 + place for place, name in enumerate(SPEED)}
    step = TrainResult(step_id="s", policy_version=5, metrics=metrics, seconds={**STEP, "total": 1.5})
    timing = Timing(parts={"train": 1.5, "evaluate": 1.0}, total_s=5.0)
    row = build_row(replace(record, step=step), None, timing)
    assert {name: row.get(name) for name in SPEED} == metrics
    assert {part: row.get(f"train_{part}_s") for part in STEP} == STEP
    assert (row["tokens_per_s"], row["train_s"]) == (FOUR.num_tokens / 4.0, 1.5)
    skipped = build_row(record, None, timing)
    assert {skipped[name] for name in (*SPEED, *(f"train_{part}_s" for part in STEP))} == {None}, "null, not absent"


def test_a_row_says_how_the_lengths_of_young_completions_differ_from_all() -> None:
    generated = generation(completion("333"), completion("4"), completion("5"), completion("5"))
    record = finished(3, generated=generated).record
    assert record is not None
    timing = Timing(parts={}, total_s=5.0)
    assert build_row(record, None, timing)["trained_length_ratio"] is None
    longest_PG = np.array([[True, False], [False, False]])
    row = build_row(replace(record, old_PG=longest_PG), None, timing)
    assert row["trained_length_ratio"] == pytest.approx(2.0 / 2.5)
    assert build_row(replace(record, old_PG=~np.zeros((2, 2), bool)), None, timing)["trained_length_ratio"] is None


def test_a_row_has_the_fields_of_the_table() -> None:
    record = finished(3).record
    assert record is not None
    row = build_row(record, record.scored, Timing(parts={}, total_s=5.0))
    plain = {name.removeprefix("heldout_") for name in row if "/" not in name and name not in BY_NAME}
    assert plain <= set(row), "a field that the table does not have"
    assert {name for name, metric in BY_NAME.items() if metric.source in ("run", "trainer")} <= set(row)


def test_a_row_that_does_not_fit_leaves_no_part_of_itself(tmp_path: Path) -> None:
    """As on a full disk: the file may not grow beyond 4 KiB in this process."""
    path = tmp_path / "metrics.jsonl"
    script = f"""
import resource, signal
from pathlib import Path
from tandem_files.metrics_file import MetricsFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
file = MetricsFile(Path({str(path)!r}))
for number in range(1, 100):
    file.append({{"iteration": number, "loss": 0.123456789, "entropy": 0.1234}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert str(path) in done.stderr.splitlines()[-2]  # before its note
    lines = path.read_bytes().decode().splitlines(keepends=True)
    assert 40 < len(lines) < 99
    assert [json.loads(line)["iteration"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[-1].endswith("\n")


def test_rows_hold_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        MetricsFile(tmp_path / "m").append({"loss": float("nan")})


def test_the_summary_has_what_the_issue_asks_for() -> None:
    state = RunState(
        iteration=2,
        policy_version=2,
        cursor=CursorState(sources=()),
        batch_rng={},
        model_fingerprint="f",
        initial_accuracy=0.25,
        last_accuracy=0.5,
        totals=Totals(weight_sync_s=[0.3, 0.1, 0.2], bytes_per_rollout_rank=64, redundancy=1.0),
    )
    rows: list[dict[str, float | int | None]] = [
        {"iteration_s": 1.0, "overhead_share": 0.1},
        {"iteration_s": 3.0, "overhead_share": None},
    ]
    summary = build_summary(state, rows, {"torch": "2"})
    json.dumps(summary, allow_nan=False)
    keys = "iterations initial_accuracy final_accuracy wall_s generated_tokens trained_samples policy_version"
    assert set(keys.split()) | {"weight_sync", "logprob_abs_diff_max", "versions"} <= set(summary)
    assert summary["weight_sync"] == {
        "count": 3,
        "total_s_median": 0.2,
        "total_s_max": 0.3,
        "bytes_per_rollout_rank": 64,
        "redundancy": 1.0,
    }
    assert summary["time"]["iteration_s_median"] == 2.0
    assert summary["time"]["overhead_share_median"] == 0.1
    assert summary["time"]["sync_s_median"] is None


def test_versions_of_services_that_differ_are_both_kept() -> None:
    merged = merge_versions({"trainer": {"torch": "2.13"}, "rollout-0": {"torch": "2.12"}})
    assert (merged["torch"], merged["rollout-0.torch"]) == ("2.13", "2.12")


def report(**fields: Any) -> weights_pb2.PhaseReport:
    return weights_pb2.PhaseReport(**fields)


def test_stages_add_up_to_the_total() -> None:
    reports = RoundReports()
    # r0 was late, and the trainer waited for it: rendezvous began when both had prepared.
    reports.add(
        {
            "trainer": [report(seconds={"prepare": 0.1, "rendezvous": 0.5})],
            "r0": [report(seconds={"prepare": 0.4, "rendezvous": 0.15})],
        }
    )
    reports.add(
        {"r0": [report(seconds={"install": 0.2, "commit": 0.05})], "trainer": [report(seconds={"install": 0.1})]}
    )
    reports.check_bytes({"r0": [report(bytes_received=10, shard_bytes=10), report(bytes_received=30, shard_bytes=30)]})
    result = reports.result(
        policy_version=4, attempts=1, total_s=1.5, outside_s={"roll_call": 0.3}, outcomes={}, epoch=1
    )
    expected = {"roll_call": 0.3, "prepare": 0.4, "rendezvous": 0.2, "install": 0.2, "commit": 0.05, "other": 0.35}
    assert result.stages == pytest.approx(expected)
    assert sum(result.stages.values()) == pytest.approx(result.total_s)
    assert result.replica_s == pytest.approx({"r0": 0.8})
    assert (result.bytes_per_rollout_rank, result.bytes_received, result.redundancy) == (30, 40, 1.0)


def test_stages_of_all_rounds_of_a_publication_count() -> None:
    first, second = RoundReports(), RoundReports()
    first.add({"r0": [report(seconds={"transfer": 0.2})]})
    second.add({"r1": [report(seconds={"transfer": 0.3})]})
    first.merge(second)
    result = first.result(policy_version=4, attempts=2, total_s=1.0, outside_s={}, outcomes={}, epoch=2)
    assert result.stages == pytest.approx({"transfer": 0.5, "other": 0.5})


def test_a_participant_without_a_plan_is_named() -> None:
    plans = {"trainer": [report(plan_digest="a"), report(plan_digest="a")], "r0": [report()]}
    wrong = RoundReports().check_plans(plans, "trainer")
    assert {name: (type(error), str(error)) for name, error in wrong.items()} == {
        "r0": (
            Internal,
            "r0 rank 0 made transfer plan (none), but trainer rank 0 made a: they read the round differently",
        )
    }


@pytest.mark.parametrize(("unknown", "stop_at", "ends"), [(10, 0.25, False), (11, 0.25, True), (100, None, False)])
def test_many_tokens_without_a_log_prob_of_the_engine_end_the_run(
    unknown: int, stop_at: float | None, ends: bool
) -> None:
    """They are in no mean difference, which could hide another model."""
    record = finished(3).record
    assert record is not None
    metrics = {"tokens": 100.0, "engine_logprobs_not_finite": float(unknown), "logprob_abs_diff_mean": 0.0}
    trained = replace(record, step=TrainResult(step_id="s", policy_version=5, metrics=metrics, seconds={}))
    with pytest.raises(Internal, match=r"no finite log-prob for 11 of 100 tokens") if ends else nullcontext():
        check_same_model(trained, stop_at)
