"""A constant duration reads as what it is in every quantile that Prometheus computes from the exported buckets."""

import json
import math
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring.boards import ALL
from tests.monitoring.promql import selectors
from tests.monitoring.test_rules import promtool

CONSTANTS_S = ("0.0105", "0.049", "0.45", "1.37", "11.0", "290.0")
SHARES = (0.5, 0.95, 0.99)
WITHIN = 0.1
MODULES = {
    "coordinator": "coordinator.watch.metrics",
    "trainer": "trainer_service.metrics",
    "rollout": "rollout_service.metrics",
}
# Dozens of methods in every service: a series each per bucket is too much. No panel shows their quantiles.
COARSE = {"tandem_rpc_seconds"}

Counts = Mapping[str, float]


@cache
def exported(module: str) -> dict[str, dict[str, Counts]]:
    """Cumulative counts by upper bound, by histogram and constant."""
    command = [sys.executable, "-m", "tests.monitoring.quantiles", module, *CONSTANTS_S]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, dict[str, Counts]] = json.loads(done.stdout)
    return found


def histogram_quantile(share: float, counts: Counts) -> float:
    """As promql/quantile.go computes it: by interpolation within the bucket that holds the quantile."""
    by_bound = sorted((float(bound), count) for bound, count in counts.items())
    rank = share * by_bound[-1][1]
    place = next(place for place, (_, count) in enumerate(by_bound) if count >= rank)
    start, before = by_bound[place - 1] if place else (0.0, 0.0)
    bound, count = by_bound[place]
    return start if math.isinf(bound) else start + (bound - start) * (rank - before) / (count - before)


@pytest.mark.parametrize("job", MODULES)
def test_every_quantile_of_a_constant_is_right_within_a_tenth(job: str) -> None:
    fine = {name: by_constant for name, by_constant in exported(MODULES[job]).items() if name not in COARSE}
    assert len(fine) >= 2
    wrong = [
        f"{name}: p{share * 100:g} of {constant} s reads {value:.4g} s"
        for name, by_constant in fine.items()
        for constant, counts in by_constant.items()
        for share in SHARES
        if abs((value := histogram_quantile(share, counts)) / float(constant) - 1) > WITHIN
    ]
    assert wrong == []


def test_prometheus_reads_the_same(tmp_path: Path) -> None:
    """The review's figures, by promtool: every sync takes exactly so long, one a minute."""
    cases = [_case(constant, counts) for constant, counts in exported(MODULES["coordinator"])[SYNC].items()]
    path = tmp_path / "quantiles.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": cases}))
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


SYNC = "tandem_weight_sync_seconds"


def _case(constant: str, counts: Counts) -> dict[str, Any]:
    """A case of promtool: 1 where Prometheus' quantile is within a tenth of the constant, for each of SHARES."""
    observed = max(counts.values())
    series = [
        {"series": f'{SYNC}_bucket{{stage="total", le="{bound}"}}', "values": f"0+{count / observed:g}x60"}
        for bound, count in counts.items()
    ]
    quantile = f"histogram_quantile({{}}, sum by (le) (rate({SYNC}_bucket[15m])))"
    checks = [
        {
            "expr": f"abs({quantile.format(share)} / {constant} - 1) < bool {WITHIN}",
            "eval_time": "50m",
            "exp_samples": [{"labels": "{}", "value": 1}],
        }
        for share in SHARES
    ]
    return {"interval": "1m", "input_series": series, "promql_expr_test": checks}


def test_no_panel_shows_quantiles_of_coarse_buckets() -> None:
    shown = {
        selector.name.removesuffix("_bucket")
        for query in ALL
        if "histogram_quantile" in query.expr
        for selector in selectors(query.expr)
    }
    assert SYNC in shown
    assert shown & COARSE == set()
