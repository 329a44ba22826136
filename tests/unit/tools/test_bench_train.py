"""The benchmark of train steps, its pure parts: samples, the floor's operations, ratios, and what is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.bench_train.cases import _joined
from tools.bench_train.report.figures import TARGETS, headline, ratios
from tools.bench_train.report.page import BEGIN, END, page, summary, write
from tools.bench_train.shapes import (
    DEFAULT_SHAPES,
    GROUP,
    LAYOUTS,
    LENGTHS,
    SHAPES,
    UPDATES,
    Shape,
    completion_lengths,
    make_samples,
    step_flops,
)
from tools.bench_train.sharing import DIVIDED, RATIOS
from tools.bench_train.sharing import GROUP as SHARING_GROUP
from tools.bench_train.sharing import make_samples as make_sharing
from tools.bench_train.workers.handle import WAYS
from tools.bench_train.workers.ours import configuration
from weightsync.layouts.layout import Parallel
from weightsync.layouts.stages import chunks_of
from weightsync.model.spec import ModelSpec

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", SHAPES)
def test_samples_fill_the_updates_equally_and_fit_the_model(shape: str, lengths: str) -> None:
    of, samples = SHAPES[shape], make_samples(SHAPES[shape], lengths)
    assert np.bincount(samples.update_index).tolist() == [of.num_samples // UPDATES] * UPDATES
    assert of.num_samples % (GROUP * UPDATES) == 0
    assert samples.lengths.max() <= of.config()["max_position_embeddings"]
    # within rounding, and the cut tail
    mean = of.equal_completion if lengths == "equal" and of.equal_completion is not None else of.completion
    assert samples.completion_lengths.mean() == pytest.approx(mean, rel=0.05)
    assert np.abs(samples.advantages.reshape(-1, GROUP).sum(1)).max() < 1e-5


def test_lengths_differ_in_their_tail() -> None:
    tails = [completion_lengths(SHAPES["10m"], lengths).max() / SHAPES["10m"].completion for lengths in LENGTHS]
    assert tails == pytest.approx([1, 2, 6.8], rel=0.05)


def test_operations_of_a_step_are_counted_by_hand(tmp_path: Path) -> None:
    """One layer of `tiny` has 32 * (8 * 16 + 3 * 48) weights; 16 samples have 6 inputs and 4 completion tokens each."""
    shape = SHAPES["tiny"]
    (tmp_path / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    layer, pairs = 32 * (8 * 16 + 3 * 48), 6 * 7 // 2
    forward = 2 * 2 * layer * 6 + 2 * 32 * 64 * 4 + 2 * 4 * (2 * 16) * pairs
    step = step_flops(ModelSpec.from_folder(tmp_path), make_samples(shape, "equal"))
    assert step == forward * (12 + 3 * 16)
    assert shape.parameters() == 2 * layer + 32 * 64


def runs(**seconds: list[float]) -> dict[str, list[dict[str, float]]]:
    return {way: [{"seconds": each} for each in of_way] for way, of_way in seconds.items()}


def test_ratios_pair_the_steps_of_one_repetition() -> None:
    found = ratios(runs(ours_tp1=[1.0, 10.0, 2.0], ours_dp2=[1.0, 1.0, 1.0], padded=[3.0, 20.0, 8.0]))
    assert found == {"ours_tp1": {"vs_padded": 3.0}, "ours_dp2": {"vs_padded": 8.0}}


def test_headline_is_the_model_at_which_ours_is_slowest() -> None:
    def case(padded: float, floor: float) -> dict[str, Any]:
        return {"ratios": {"ours_tp1": {"vs_padded": padded, "vs_floor": floor}, "ours_dp2": {"vs_padded": 9.0}}}

    cases = {"10m, equal": case(1.5, 0.5), "100m, equal": case(1.2, 0.7), "10m, long_tail": case(3.0, 0.5)}
    assert headline(cases) == {"long_tail_vs_padded": 3.0, "equal_vs_padded": 1.2, "vs_floor_100m": 0.7}


def test_a_page_and_a_readme_show_the_figures(tmp_path: Path) -> None:
    per_way = {"ours_tp1": 1.0, "padded": 2.0, "floor": 0.5}
    case = {
        "medians_s": per_way, "tokens_per_s": per_way, "peak_mib": {"ours_tp1": 512.0}, "rise_mib": {"padded": 256.0},
        "ratios": {"ours_tp1": {"vs_padded": 2.0}}, "flops": 2e9, "flops_per_s": 4e9, "parameters": 7, "samples": 8,
        "tokens": 9, "longest": 3, "repetitions": 5, "seconds": 6.0, "load_average_before": [1.25, 0, 0],
        "load_average_after": [2.0, 0, 0],
        "run": "now",
        "agreement": {"ours_tp1": {"loss_difference": 1e-7, "weight_difference": 2e-8, "largest_weight_change": 3e-5}},
    }  # fmt: skip
    results = {
        "run": "now", "commit": "abc", "host": {"cpu": "x", "cores": 2}, "threads": 2, "definitions": {"step": "text"},
        "cases": {"tiny, equal": case}, "ratios": {"equal_vs_padded": 2.0},
    }  # fmt: skip
    (tmp_path / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write(results, tmp_path)
    assert json.loads((tmp_path / "train.json").read_text(encoding="utf-8")) == results
    shown = (tmp_path / "train.md").read_text(encoding="utf-8")
    for line in (
        "| tiny, equal | ours_tp1 | 2.00 |  |  |",  # vs_padded; neither TRL nor the floor
        "| tiny, equal | 0.50 |",  # GiB
        "| tiny, equal | ours_tp1 | 1.0e-07 | 2.0e-08 | 3.0e-05 |",
        "| tiny, equal | 7 | 8 | 9 | 3 | 5 | 6.0 | 2 | 4 | 1.2, 2.0 |",
        "* **step**: text",
    ):
        assert line in shown
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert readme.startswith(f"before\n{BEGIN}\n")
    assert readme.endswith(f"{END}\nafter\n")
    assert "| equal_vs_padded | >= 1 | 2.00 |" in readme
    assert "old" not in readme


def test_what_is_committed_has_every_case_and_the_ratios_of_the_contract() -> None:
    if not (BENCHMARKS / "train.json").exists():
        pytest.skip("not measured yet: make bench-train")
    committed = json.loads((BENCHMARKS / "train.json").read_text(encoding="utf-8"))
    assert list(committed["cases"]) == [f"{shape}, {lengths}" for shape in DEFAULT_SHAPES for lengths in LENGTHS]
    assert list(committed["ratios"]) == list(TARGETS)
    assert committed["ratios"] == headline(committed["cases"])
    for case in committed["cases"].values():
        assert set(case["samples_s"]) == set(WAYS)
        assert min(map(len, case["samples_s"].values())) >= 5
        apart = case.get("samples_s_apart", {})
        for way, found in case["ratios"].items():
            again = ratios(runs(**(apart if way in apart else case["samples_s"])))
            assert found == pytest.approx(again[way], rel=0.02)  # samples are rounded
    assert (BENCHMARKS / "train.md").read_text(encoding="utf-8") == page(committed)
    assert f"{BEGIN}\n{summary(committed)}{END}" in (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert "<svg" in (BENCHMARKS / "train.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize("divided", DIVIDED)
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_prompt_is_in_all_updates_or_in_one(ratio: str, divided: str) -> None:
    samples, (prompt, completion, num_prompts, _) = make_sharing(ratio, divided), RATIOS[ratio]
    assert np.bincount(samples.update_index).tolist() == [num_prompts * SHARING_GROUP // UPDATES] * UPDATES
    of_prompts = samples.update_index.reshape(num_prompts, SHARING_GROUP)
    assert {len(set(row)) for row in of_prompts.tolist()} == {UPDATES if divided == "samples" else 1}
    assert set(samples.prompt_lengths.tolist()) == {prompt}
    assert samples.completion_lengths.mean() == pytest.approx(completion, rel=0.02)


def test_committed_results_agree() -> None:
    """Float32 rounding is all that differs; a token at the edge of the clip may be on either side of it (README.md)."""
    committed = json.loads((BENCHMARKS / "train.json").read_text(encoding="utf-8"))
    edge = {("10m, long_tail", "ours_dp2")} if committed["run"] == "2026-11-23T07:21:29+00:00" else set()
    for name, case in committed["cases"].items():
        for way, found in case["agreement"].items():
            at_edge = (name, way) in edge
            assert found["loss_difference"] < (2e-5 if at_edge else 5e-7), (name, way)
            # an AdamW update changes a weight by up to the learning rate, 1e-4
            assert found["weight_difference"] < (3e-4 if at_edge else 5e-7), (name, way)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_model_fits_every_layout(shape: Shape, layout: Parallel, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
    sizes = Parallel(**configuration(tmp_path, layout).trainer.parallel_sizes)

    chunks = chunks_of(shape.layers, sizes)

    assert [chunk.stage for chunk in chunks] == list(range(layout.pipeline))
    assert sum(chunk.num_layers for chunk in chunks) == shape.layers


def test_ways_of_a_later_pass_are_added_and_others_keep_their_figures() -> None:
    keys = ("medians_s", "tokens_per_s", "peak_mib", "rise_mib", "ratios", "agreement", "samples_s")
    first = {key: {"ours_tp1": 1, "padded": 2} for key in keys} | {"seconds": 10.0, "load_average_after": [1.0]}
    second = {key: {"ours_dp2": 3, "padded": 4} for key in keys} | {"seconds": 5.0, "load_average_after": [2.0]}

    found = _joined(first, second)

    assert all(found[key] == {"ours_tp1": 1, "padded": 2, "ours_dp2": 3} for key in keys)
    assert found["samples_s_apart"] == second["samples_s"]
    assert (found["seconds"], found["load_average_after"]) == (15.0, [2.0])


def test_a_pass_has_everything_that_its_ways_are_compared_with() -> None:
    passes = SHAPES["100m"].passes(list(WAYS))

    assert sorted(way for each in passes for way in each if way.startswith("ours")) == sorted(
        way for way in WAYS if way.startswith("ours")
    )
    assert all({"padded", "trl", "floor"} < set(each) for each in passes)
    assert SHAPES["10m"].passes(["ours_dp2", "padded"]) == [["ours_dp2", "padded"]]
