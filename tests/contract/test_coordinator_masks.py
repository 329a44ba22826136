"""A rollout service whose completions have turns of others: what trainer, metrics and stored samples get."""

import asyncio
from itertools import islice

import pytest

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from servicekit.rpc.arrays import packed
from tandem_api.rollout.v1 import rollout_pb2
from tandem_config.schema import RunConfig
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import MaskedSpan
from tests.contract.coordinator_runs import rows, with_settings
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer

MASK = [True, False, True]


def a_tool_answers(result: rollout_pb2.GroupResult) -> None:
    """The second of a completion's three tokens is a tool's, in the second completion of each group."""
    for completion in result.completions[1:2]:
        completion.loss_mask_u8 = bytes(MASK)
        completion.logprobs_f32 = packed("logprobs_f32", [-0.125, float("nan"), -0.125])


@pytest.mark.parametrize("masked", [True, False])
async def test_masks_reach_the_trainer_and_the_samples(
    config: RunConfig, environment: ServiceEnvironment, masked: bool
) -> None:
    config, trainer = with_settings(config, run={"iterations": 2}), FakeTrainer()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer) as fleet:
        for service in fleet.rollout_services:
            service.damage = a_tool_answers if masked else lambda result: None
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    found: dict[str, list[bool]] = {}
    for chunk in (chunk for step in trainer.steps for chunk in step.chunks):
        left = map(bool, chunk.loss_mask_u8)
        found |= {name: list(islice(left, 3)) for name in chunk.sample_ids}
    of_others = [True] * 3 if masked else []
    assert found == {name: MASK if masked and name.endswith("#1") else of_others for name in found}
    assert len(found) == 2 * 32
    assert [row["generated_tokens"] for row in rows(environment)] == [32 * 3 - 8 * masked] * 2
    samples = SampleFolder(environment.run_dir).load(1, "train", range(32))
    span = (MaskedSpan(start=1, end=2, text_start=1, text_end=2),) if masked else ()
    assert {(sample.sample, sample.masked_spans) for sample in samples} == {(0, ()), (1, span), (2, ()), (3, ())}
    assert {sample.num_tokens for sample in samples} == {3}
