"""Failed renewals are counted by their reason; the run folder's disk is told, or NaN."""

import math
from pathlib import Path
from typing import Literal

import pytest
from prometheus_client import REGISTRY

from servicekit.errors import AlreadyExists, TandemError, Unavailable
from servicekit.metrics import export_disk_of
from servicekit.redis.lease import Lease
from tests.kit.waiting import until


def failures(kind: str, reason: str) -> float:
    value = REGISTRY.get_sample_value("tandem_lease_renewals_failed_total", {"kind": kind, "reason": reason})
    assert value is not None
    return value


@pytest.mark.parametrize("kind", ["record", "slot"])
def test_failed_renewals_are_counted(kind: Literal["record", "slot"]) -> None:
    before = {reason: failures(kind, reason) for reason in ("unavailable", "lost", "expired")}
    errors: list[TandemError] = [Unavailable("Redis is away"), Unavailable("still"), AlreadyExists("another has it")]

    def renew() -> None:
        raise errors.pop(0)

    lost: list[str] = []
    lease = Lease("x", 0.03, renew, lost.append, kind)
    lease.start()
    until(lambda: lost != [])
    lease.stop()
    after = {reason: failures(kind, reason) - before[reason] for reason in before}
    assert after == {"unavailable": 2, "lost": 1, "expired": 0}


def test_the_disk_is_told(tmp_path: Path) -> None:
    def told(name: str) -> float:
        value = REGISTRY.get_sample_value(f"tandem_run_dir_{name}_bytes")
        assert value is not None
        return value

    export_disk_of(tmp_path)
    assert 0 < told("free") <= told("size")
    export_disk_of(tmp_path / "gone")
    assert math.isnan(told("free"))
