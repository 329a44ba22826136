"""Processes of real SGLang ranks: forks of their service, or where that is impossible, new ones, as on GPUs."""

import json
from pathlib import Path

import pytest

from tests.kit.models import make_model
from tests.kit.replicas import lone_replica

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

MODULE = "tests.integration.rollout.noted_ranks"
NOT_FORKED = "ranks: not forked, because this process has threads"


@pytest.mark.parametrize("forked", [True, False], ids=["forked", "spawned"])
def test_a_rank_never_collects_what_its_start_has_made(forked: bool, tmp_path: Path, module_redis: str) -> None:
    variables = {"NOTES": str(tmp_path)} | ({} if forked else {"NOTES_THREAD": "1"})
    replica = lone_replica(tmp_path, make_model(tmp_path / "m"), module_redis, variables, MODULE)
    try:
        replica.wait_up()
        (rank,) = [child for child in replica.family() if "sglang::scheduler" in " ".join(child.cmdline())]
        note = json.loads((tmp_path / str(rank.pid)).read_text(encoding="utf-8"))
    finally:
        replica.close()
    assert note["frozen"] > 500_000
    assert note["full_collections"] <= 2  # 10, if garbage is collected while it imports
    assert any("spawn_main" in word for word in note["command"]) == (not forked)
    assert (NOT_FORKED in replica.log.read_text(encoding="utf-8")) == (not forked)
