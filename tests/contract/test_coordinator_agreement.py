"""A mixture of configurations in one run is refused by name, before anything is changed."""

import asyncio
from typing import Any

import pytest

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigurationSkew
from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.redis.registry import Registry
from tandem_config.comparing.agreeing import agreed_settings
from tandem_config.schema import RunConfig
from tandem_files.checkpoints import list_complete
from tests.contract.coordinator_runs import rows, saved_state, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.waiting import until


def settings_of(config: RunConfig, **changes: Any) -> AgreedSettings:
    return AgreedSettings(agreed_settings(with_settings(config, **changes)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"trainer": {"learning_rate": 1e-7}}, r"trainer\.learning_rate: \S+ here, 1e-07 there"),
        ({"grpo": {"temperature": 0.7}}, r"grpo\.temperature: 1\.0 here, 0\.7 there"),
    ],
)
async def test_a_coordinator_is_not_announced_beside_services_with_another_configuration(
    config: RunConfig, environment: ServiceEnvironment, changes: dict[str, Any], told: str
) -> None:
    config = with_settings(config, sync={"lease_ttl_s": 0.2})
    theirs = settings_of(config, **changes)
    async with announced_fleet(environment.redis_url, environment.run_id, settings=theirs) as fleet:
        with pytest.raises(ConfigurationSkew, match=rf"coordinator has read .* than trainer at .*: {told}: restart"):
            await conduct(config, environment, resume=True, stop=asyncio.Event())
    assert (fleet.trainer_service.steps, fleet.trainer_service.restored) == ([], [])
    assert not (environment.run_dir / "state.json").exists()


async def test_services_with_the_same_configuration_or_another_of_the_coordinators_own_run_to_the_end(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    theirs = settings_of(config, run={"keep_checkpoints": 7}, samples={"enabled": False})
    async with announced_fleet(environment.redis_url, environment.run_id, settings=theirs):
        assert await conduct(config, environment, resume=True, stop=asyncio.Event()) == 0


async def test_what_a_status_says_counts_too_and_nothing_is_lost(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    """The trainer of the finished run has been restarted with another configuration, past the registry."""
    async with announced_fleet(environment.redis_url, environment.run_id):
        assert await conduct(config, environment, resume=True, stop=asyncio.Event()) == 0
    before = [folder.name for _, folder in list_complete(environment.run_dir)]
    other = settings_of(config, grpo={"temperature": 0.7})
    trainer = FakeTrainer(policy_version=9, settings_digest=other.digest)
    longer = with_settings(config, run={"iterations": 8})
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(longer, environment, resume=True, stop=asyncio.Event()) == 1
    told = f"trainer: it has read another configuration: the digest of its settings is {other.digest[:12]}"
    assert saved_state(environment)["error"].startswith(f"start of the run: {told}")
    assert (trainer.steps, trainer.restored) == ([], [])
    assert [folder.name for _, folder in list_complete(environment.run_dir)] == before
    assert [row["iteration"] for row in rows(environment)] == [1, 2, 3, 4, 5, 6]


async def test_a_replica_that_joins_with_another_configuration_is_refused_and_the_run_goes_on(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    holds = asyncio.Event()

    async def hold(step: int) -> None:
        if step == 3:
            await asyncio.wait_for(holds.wait(), 60)

    trainer = FakeTrainer(before_step=hold)
    async with announced_fleet(environment.redis_url, environment.run_id, trainer) as fleet:
        running = asyncio.create_task(conduct(config, environment, resume=True, stop=asyncio.Event()))
        await asyncio.to_thread(until, lambda: len(trainer.steps) == 2, 60.0)
        joiner = Registry(
            environment.redis_url, environment.run_id, settings=settings_of(config, grpo={"temperature": 0.7})
        )
        record = ServiceRecord(role="rollout", name="rollout-2", address=fleet.addresses["rollout-1"], worker_id="j")
        with pytest.raises(ConfigurationSkew, match=r"rollout-2 has read another .* than coordinator at .*temperature"):
            await asyncio.to_thread(joiner.announce, record, 30)
        joiner.close()
        holds.set()
        assert await asyncio.wait_for(running, 60) == 0
    assert len(rows(environment)) == 6
