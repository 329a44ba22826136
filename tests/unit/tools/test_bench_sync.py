"""The sync benchmark's pure parts: who hands which tensor on, what is kept of an earlier run, and the ratios."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench_sync.cases import merged
from tools.bench_sync.methods.registry import METHODS
from tools.bench_sync.processes.gathering import Owners, tensors_by_owner
from tools.bench_sync.report.figures import MORE_RATIOS, RATIOS, more_ratios, ratios
from tools.bench_sync.report.page import BEGIN, END, page, refresh, summary
from tools.bench_sync.shapes import CASES, DEFAULT_SHAPES, write_model
from weightsync.layouts.hf import hf_layout
from weightsync.layouts.layout import Parallel

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# As the project's targets name them.
CONTRACT = [
    "vs_stock_flattened",
    "vs_stock_per_tensor",
    "vs_disk",
    "vs_floor",
    "colocated_vs_collective",
    "staged_pause_share",
]


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    """The measured figures in the repository."""
    results: dict[str, Any] = json.loads((BENCHMARKS / "sync.json").read_text(encoding="utf-8"))
    return results


@pytest.mark.parametrize("owners", ["stages", "everyone"])
@pytest.mark.parametrize("parallel", [Parallel(tensor=2), Parallel(pipeline=2), Parallel(tensor=2, pipeline=2)])
def test_every_whole_tensor_is_handed_on_by_one_rank(tmp_path: Path, parallel: Parallel, owners: Owners) -> None:
    spec = write_model("tiny", tmp_path)
    held = tensors_by_owner(spec, parallel, owners)
    assert sorted(name for names in held for name in names) == sorted(hf_layout(spec).params)
    busy = {rank for rank, names in enumerate(held) if names}
    assert busy == (
        set(range(0, parallel.world_size, parallel.stage_size)) if owners == "stages" else {*range(len(held))}
    )


def test_a_stage_hands_on_its_own_layers(tmp_path: Path) -> None:
    first, second = tensors_by_owner(write_model("tiny", tmp_path), Parallel(pipeline=2), "stages")
    assert "model.embed_tokens.weight" in first
    assert "model.layers.0.self_attn.q_proj.weight" in first
    assert "model.layers.1.self_attn.q_proj.weight" in second
    assert "model.norm.weight" in second


def test_ratios_pair_the_runs_of_one_repetition() -> None:
    samples = {
        "ours_in_place": [{"total": 1.0, "pause": 1.0}, {"total": 10.0, "pause": 8.0}, {"total": 2.0, "pause": 1.0}],
        "ours_staged": [{"total": 1.0, "pause": 0.1}, {"total": 1.0, "pause": 0.4}, {"total": 1.0, "pause": 0.3}],
        "stock_flattened": [{"total": total, "pause": 0.8} for total in (3.0, 20.0, 8.0)],
    }
    assert ratios(samples) == {"vs_stock_flattened": 3.0, "staged_pause_share": 0.1}
    assert more_ratios(samples) == {"stock_pause_vs_staged_pause": 2.6667}


def test_ratios_name_methods_that_exist() -> None:
    for above, _, below, _ in (*RATIOS.values(), *MORE_RATIOS.values()):
        assert {above, below} <= set(METHODS)


def test_what_is_committed_has_every_case_and_the_ratios_of_the_contract(committed: dict[str, Any]) -> None:
    assert list(committed["cases"]) == [f"{shape}, {case.name}" for shape in DEFAULT_SHAPES for case in CASES]
    assert list(committed["ratios"]) == CONTRACT
    assert committed["ratios"] == committed["cases"][committed["headline"]]["ratios"]
    for name, case in committed["cases"].items():
        assert case["repetitions"] >= 5, name
        assert {len(runs) for runs in case["samples_s"].values()} == {case["repetitions"]}, name
        assert case["ratios"] == pytest.approx(ratios(case["samples_s"]), rel=0.02), name  # samples are rounded


def test_table_and_readme_say_what_was_measured(committed: dict[str, Any]) -> None:
    assert (BENCHMARKS / "sync.md").read_text(encoding="utf-8") == page(committed)
    assert f"{BEGIN}\n{summary(committed)}{END}" in (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert "<svg" in (BENCHMARKS / "sync.svg").read_text(encoding="utf-8")


def test_cases_that_are_not_measured_anew_stay() -> None:
    earlier = {"cases": {"tiny, a": {"run": "1"}, "50m, a": {"run": "1"}}}
    assert merged(earlier, ["50m, a"]) == {"tiny, a": {"run": "1"}}
    assert merged({}, ["50m, a"]) == {}


def test_the_readme_gets_the_figures_between_its_marks(tmp_path: Path) -> None:
    case = {
        "ratios": {"vs_floor": 0.5},
        "medians_s": {"ours_in_place": {"total": 0.0123}},
        "load_average_at_first_sample": [1.5, 0.0, 0.0],
    }
    results = {"cases": {"tiny, a": case}, "runs": ["now"], "headline": "tiny, a"}
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    refresh(readme, results)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\n")
    assert text.endswith(f"{END}\nafter\n")
    assert "| vs_floor | >= 0.8 | 0.50 |" in text
    assert "| round in place, ms | tiny: <= 50 | 12 |" in text
    assert "old" not in text
