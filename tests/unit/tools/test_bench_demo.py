"""The benchmark of the demo's iterations, its pure parts: ratios are of the same turn, and what is written."""

import pytest

from tools.bench_train.demo import PARTS, page, summarise


def run(iteration_s: float, overhead_s: float | None = None) -> dict[str, list[float]]:
    """Three iterations, of which the last is an outlier."""
    parts = {} if overhead_s is None else dict.fromkeys(PARTS, [overhead_s] * 3)
    return {"iteration_s": [iteration_s, iteration_s, 100.0]} | parts


# The machine was twice as slow in the second turn.
RUNS = {"trl": [run(1.0), run(2.0), run(1.0)], "default": [run(0.5, 0.05), run(1.0, 0.2), run(0.8, 0.08)]}


def test_a_run_is_compared_with_trl_of_the_same_turn() -> None:
    found = summarise(RUNS)

    assert found["default"]["vs_trl_of_each_turn"] == pytest.approx([2.0, 2.0, 1.25])
    assert found["default"]["vs_trl"] == pytest.approx(2.0)
    assert found["trl"]["vs_trl"] == 1.0
    assert found["default"]["added"] == pytest.approx(0.1)
    assert "added" not in found["trl"]


def test_the_page_has_a_row_for_each_way() -> None:
    results = {
        "run": "now",
        "commit": "",
        "host": {"cpu": "a cpu", "cores": 2},
        "turns": 3,
        "iterations": 5,
        "load_average_before": [0.25, 0.0, 0.0],
        "ways": summarise(RUNS),
    }

    rows = [line for line in page(results).splitlines() if line.startswith("| ")][1:]

    assert rows == [
        "| trl | 1.000 | 1.00 | - | - | - | - |",
        "| default | 0.800 | 2.00 | 0.080 | 0.080 | 0.080 | 10.0% |",
    ]
