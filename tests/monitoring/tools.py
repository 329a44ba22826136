"""Prometheus' own tools, where the machine has them."""

import shutil
from pathlib import Path

import pytest

from tests.house.repository import REPO

MONITORING = REPO / "deploy" / "monitoring"
RULES = MONITORING / "rules" / "tandem.yaml"
DASHBOARDS = MONITORING / "dashboards"


def tool(name: str) -> str:
    """Path of `promtool`, `prometheus` or `chromium`; without it the test is skipped, loudly and counted."""
    found = shutil.which(name)
    if found is None:
        package = {"promtool": "prometheus"}.get(name, name)
        pytest.skip(f"NOT CHECKED: there is no {name} on this machine (Debian: apt-get install {package})")
    return str(Path(found))
