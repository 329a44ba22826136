"""The reference policy in a real engine of one rank: what it computes, and that it leaves the policy alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from servicekit.errors import ConfigError, InvalidRequest
from tests.integration.trainer.reference import NUM_UPDATES, make_samples, token_logprobs
from tests.kit.models import load
from trainer_service.checkpoints.parts import values_of
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.step.reference import ReferencePolicy

SAMPLES = make_samples(16)
NEAR = 1e-5
Make = Callable[..., MegatronEngine]
# The first one imports transformers and writes models: a minute on a busy machine.
pytestmark = pytest.mark.timeout(240)


def state_of(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and step counts as the optimizer holds them, and weights as the model does: copies."""
    held = engine._adam.tensors() | {f"model/{name}": tensor for name, tensor in engine.tensors().items()}
    return {name: values_of(each).clone() for name, each in held.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def reference_logprobs(engine: MegatronEngine) -> np.ndarray[Any, Any]:
    return engine.logprobs(SAMPLES, reference=True)[0]


def of_transformers(folder: Path) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = token_logprobs(load(folder), SAMPLES, range(len(SAMPLES)), 0.9)[0].numpy()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measuring_another_model_leaves_every_bit_of_the_policy(make_engine: Make, models: Path, dtype: str) -> None:
    engine = make_engine(dtype, reference_path="other")
    engine.train_step(SAMPLES, NUM_UPDATES)
    before, storages = state_of(engine), {name: t.data_ptr() for name, t in engine.tensors().items()}
    own = engine.logprobs(SAMPLES)[0]
    measured = reference_logprobs(engine)
    if dtype == "float32":
        np.testing.assert_allclose(measured, of_transformers(models / "other"), rtol=0, atol=NEAR)
    assert np.abs(measured - own).max() > 0.1
    assert same(state_of(engine), before)
    assert {name: t.data_ptr() for name, t in engine.tensors().items()} == storages
    assert np.array_equal(engine.logprobs(SAMPLES)[0], own)


def test_a_measuring_pass_that_fails_puts_the_policy_back(make_engine: Make) -> None:
    engine = make_engine(reference_path="other")
    before = state_of(engine)
    assert engine._reference is not None
    with pytest.raises(RuntimeError, match="in between"):
        fail_in_between(engine._reference, before)
    assert same(state_of(engine), before)


def fail_in_between(reference: ReferencePolicy, before: dict[str, torch.Tensor]) -> None:
    with reference.in_place():
        norm = reference._parameters["decoder.final_layernorm.weight"]
        assert not torch.equal(norm, before["weights/decoder.final_layernorm.weight"])
        raise RuntimeError("in between")


def test_by_default_the_reference_is_the_policy_s_start_and_stays(make_engine: Make, models: Path) -> None:
    engine = make_engine()
    start = engine.logprobs(SAMPLES)[0]
    first = engine.train_step(SAMPLES, NUM_UPDATES)
    assert np.array_equal(reference_logprobs(engine), start)
    assert not np.array_equal(engine.logprobs(SAMPLES)[0], start)
    second = engine.train_step(SAMPLES, NUM_UPDATES)
    assert second.metrics["kl_reference"] > first.metrics["kl_reference"] > 0
    assert {"reference", "old_logprobs"} <= set(first.seconds)


def test_without_a_coefficient_there_is_no_reference(make_engine: Make) -> None:
    engine = make_engine(kl_coefficient=0.0)
    with pytest.raises(InvalidRequest, match=r"grpo\.kl_coefficient is 0"):
        reference_logprobs(engine)
    result = engine.train_step(SAMPLES, NUM_UPDATES)
    assert not {"kl_reference", "kl_loss", "reference"} & (set(result.metrics) | set(result.seconds))


def test_kl_in_the_reward_leaves_the_step_alone(make_engine: Make) -> None:
    without = make_engine(kl_coefficient=0.0).train_step(SAMPLES, NUM_UPDATES).metrics
    assert make_engine(kl_in="reward", reference_path="other").train_step(SAMPLES, NUM_UPDATES).metrics == without


def test_a_reference_of_another_shape_is_refused_before_anything_is_built(make_engine: Make) -> None:
    with pytest.raises(ConfigError, match=r"reference_path .*tied is a model of another shape.*family: qwen2, not"):
        make_engine(reference_path="tied")


def test_a_refreshed_reference_is_in_the_checkpoint(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine(reference_path="other", reference_refresh_every=2)
    other = reference_logprobs(engine)
    engine.train_step(SAMPLES, NUM_UPDATES)
    assert np.array_equal(reference_logprobs(engine), other)
    engine.train_step(SAMPLES, NUM_UPDATES)
    refreshed = engine.logprobs(SAMPLES)[0]
    assert np.array_equal(reference_logprobs(engine), refreshed)
    engine.train_step(SAMPLES, NUM_UPDATES)
    engine.save(tmp_path / "checkpoint")
    expected = engine.train_step(SAMPLES, NUM_UPDATES)

    resumed = make_engine(reference_path="other", reference_refresh_every=2)
    resumed.check_checkpoint(tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(resumed), refreshed)
    assert resumed.train_step(SAMPLES, NUM_UPDATES).metrics == expected.metrics
    # from here on it is never refreshed: that of the folder
    frozen = make_engine(reference_path="other")
    frozen.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(frozen), other)


def test_a_checkpoint_of_weights_alone_has_a_refreshed_reference(make_engine: Make, tmp_path: Path) -> None:
    engine = make_engine(optimizer=False, reference_path="other", reference_refresh_every=1)
    engine.train_step(SAMPLES, NUM_UPDATES)
    refreshed, policy = reference_logprobs(engine), engine.logprobs(SAMPLES)[0]
    engine.save(tmp_path / "checkpoint")
    resumed = make_engine(reference_path="other", reference_refresh_every=1)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(resumed), refreshed)
    assert np.array_equal(resumed.logprobs(SAMPLES)[0], policy)


def test_a_frozen_reference_is_in_no_checkpoint_and_is_read_again(
    make_engine: Make, models: Path, tmp_path: Path
) -> None:
    engine = make_engine()
    start = reference_logprobs(engine)
    engine.train_step(SAMPLES, NUM_UPDATES)
    engine.save(tmp_path / "checkpoint")
    with safe_open(tmp_path / "checkpoint" / "shard-tp00-pp00.safetensors", framework="pt") as file:
        assert not [name for name in set(file.keys()) if name.startswith("reference/")]
    expected = engine.train_step(SAMPLES, NUM_UPDATES)
    resumed = make_engine()
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(resumed), start)
    assert resumed.train_step(SAMPLES, NUM_UPDATES).metrics == expected.metrics
    # a run that refreshes continues from a checkpoint of one that did not
    refreshing = make_engine(reference_refresh_every=1)
    refreshing.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(refreshing), start)
    refreshing.load(models / "policy")
    assert np.array_equal(reference_logprobs(refreshing), start)
