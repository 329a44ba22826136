"""A run with KL in the reward: what the trainer is asked for, and the rows that come of it."""

import asyncio
from collections import defaultdict

import numpy as np
import pytest

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import rows, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer


async def test_kl_is_taken_off_the_rewards_that_are_trained_on(
    config: RunConfig, environment: ServiceEnvironment
) -> None:
    # so much that the rewards, 0 to 1, are next to nothing beside it
    kl = {"kl_coefficient": 4000.0, "kl_in": "reward", "kl_estimator": "k1", "advantage_std": "none"}
    config = with_settings(config, grpo=kl, run={"iterations": 2})
    trainer = FakeTrainer(reference_logprob=-1.25, own_logprob=-1.0)
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    samples = config.grpo.prompts_per_iteration * config.grpo.group_size
    assert trainer.measured == [(samples, True), (samples, False)] * 2
    for row in rows(environment):
        length = row["response_length_mean"]
        assert row["kl_reference"] == pytest.approx(np.exp(-0.25) + 0.25 - 1, rel=1e-6)
        assert row["kl_reward"] == pytest.approx(1000 * length, rel=1e-6)
        # the passes are of the trainer's seconds, beside those of its step
        assert trainer.compute_s < row["trainer_compute_s"] <= trainer.compute_s + row["reference_s"]
        assert row["kl_loss"] is None
    for step in trainer.steps:
        groups = defaultdict(list)
        for chunk in step.chunks:
            for name, length, advantage in zip(
                chunk.sample_ids, chunk.completion_lengths, chunk.advantages, strict=True
            ):
                groups[name.partition("#")[0]].append((length, advantage))
        for members in groups.values():
            lengths, advantages = np.array(members).T
            np.testing.assert_allclose(advantages, -1000 * (lengths - lengths.mean()), rtol=0, atol=1.0)


async def test_a_trainer_without_a_reference_ends_the_run(config: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(config, grpo={"kl_coefficient": 0.5, "kl_in": "reward"})
    async with announced_fleet(environment.redis_url, environment.run_id, FakeTrainer()):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 1
    assert rows(environment) == []
