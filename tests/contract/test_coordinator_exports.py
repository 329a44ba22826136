"""The policy as a Hugging Face folder every n iterations and at the end; an export that fails costs itself only."""

import asyncio
import json
from collections import deque

import pytest
from prometheus_client import REGISTRY

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.errors import DeadlineExceeded, Internal, InvalidRequest, TandemError, Unavailable
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import rows, saved_state, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer

FULL = "cannot write it: No space left on device"


async def run(config: RunConfig, environment: ServiceEnvironment, *faults: TandemError | None) -> tuple[int, list[str]]:
    """Runs six iterations with exports after 2 and 4, and the final one. Returns: exit code, and what was exported."""
    config = with_settings(config, run={"export_every": 2, "keep_exports": 1})
    trainer = FakeTrainer(export_faults=deque(faults))
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        code = await conduct(config, environment, resume=False, stop=asyncio.Event())
    return code, [str(folder.relative_to(environment.run_dir)) for folder in trainer.exported]


async def test_the_newest_exports_and_the_final_one_are_there(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    code, exported = await run(config, environment)
    assert (code, exported) == (0, ["exports/iteration-000002", "exports/iteration-000004", "hf"])
    assert [path.name for path in (environment.run_dir / "exports").iterdir()] == ["iteration-000004"]
    table = rows(environment)
    assert [row["export_s"] > 0 for row in table] == [False, True, False, True, False, False]
    for row in table:
        busy = row["iteration_s"] - row["evaluate_s"] - row["checkpoint_s"] - row["export_s"]
        assert abs(busy - row["engine_s"] - row["trainer_compute_s"] - row["overhead_s"]) < 1e-9


@pytest.mark.parametrize("error", [Internal(FULL), InvalidRequest("not ours"), DeadlineExceeded("1800 s")], ids=repr)
async def test_an_export_that_fails_is_warned_of_and_the_run_goes_on(
    config: RunConfig, environment: ServiceEnvironment, error: TandemError, caplog: pytest.LogCaptureFixture
) -> None:
    before = warnings()
    code, exported = await run(config, environment, error)
    assert (code, exported) == (0, ["exports/iteration-000004", "hf"])
    assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6]
    assert f"exports/iteration-000002 not written: trainer: {error}" in caplog.text
    assert (warnings() - before, saved_state(environment)["troubles"]) == (1, [])


def warnings() -> float:
    return REGISTRY.get_sample_value("tandem_warnings_total", {"kind": "export"}) or 0.0


async def test_a_final_export_that_fails_is_the_last_word_with_the_command_that_makes_it(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    code, exported = await run(config, environment, None, None, Internal(FULL))
    assert (code, exported) == (0, ["exports/iteration-000002", "exports/iteration-000004"])
    state = saved_state(environment)
    assert state["status"] == "finished"
    (trouble,) = state["troubles"]
    assert trouble.startswith(f"hf not written: trainer: {FULL}; ")
    assert trouble.endswith(f"tandem export {environment.run_dir} --out DIR")
    assert json.loads((environment.run_dir / "summary.json").read_text())["troubles"] == [trouble]


async def test_a_trainer_that_is_lost_ends_the_run(config: RunConfig, environment: ServiceEnvironment) -> None:
    code, _ = await run(config, environment, Unavailable("socket closed"))
    assert code != 0
    assert "trainer" in saved_state(environment)["error"]


async def test_an_old_export_that_cannot_be_removed_is_warned_of(
    config: RunConfig,
    environment: ServiceEnvironment,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("coordinator.record.exporting.prune_exports", fail)
    code, exported = await run(config, environment)
    assert (code, len(exported)) == (0, 3)
    assert "Old exports cannot be removed" in caplog.text
    assert "Read-only file system" in caplog.text
