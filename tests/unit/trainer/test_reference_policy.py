"""The reference policy in a real engine of one rank: what it computes, and that it leaves the policy alone."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from servicekit.errors import ConfigError, NotFinite
from tandem_config.schema import RunConfig
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, make_samples, token_logprobs
from tests.kit.models import save_model
from trainer_service.batch.samples import Samples
from trainer_service.megatron_engine.engine import MegatronEngine

SAMPLES = make_samples(16)
NEAR = 1e-5
Make = Callable[..., MegatronEngine]
# Beside these, the terms of reference.CONFIG.
KL = {"kl_coefficient": 0.1, "entropy_coefficient": 0.0, "correction": "none", "correction_high": None}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `policy`, `other` (the same sizes), `tied` (not the same)."""
    folder = tmp_path_factory.mktemp("models")
    save_model("qwen3-moe", folder / "policy")
    save_model("qwen3-moe", folder / "other", seed=1)
    save_model("qwen2-tied", folder / "tied")
    return folder


@pytest.fixture
def make(models: Path) -> Iterator[Make]:
    """Make engines, one after the other, which have loaded `policy`."""
    with ExitStack() as stack:

        def engine(dtype: str = "float32", **grpo: Any) -> MegatronEngine:
            stack.close()
            paths = {name: models / value for name, value in grpo.items() if name == "reference_path"}
            sections = {
                "model": {"path": models / "policy", "dtype": dtype},
                "grpo": CONFIG["grpo"] | KL | grpo | paths,
            }
            made = MegatronEngine(RunConfig.model_validate(CONFIG | sections), torch.device("cpu"))
            stack.callback(made.close)
            made.load(models / "policy")
            return made

        yield engine


def state_of(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Weights, masters, moments and step counts: copies."""
    return {name: tensor.clone() for name, tensor in engine._adam.tensors().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def reference_logprobs(engine: MegatronEngine) -> np.ndarray[Any, Any]:
    return engine.logprobs(SAMPLES, reference=True)[0]


def of_transformers(folder: Path) -> np.ndarray[Any, Any]:
    from tests.kit.models import load

    with torch.no_grad():
        found: np.ndarray[Any, Any] = token_logprobs(load(folder), SAMPLES, range(len(SAMPLES)), 0.9)[0].numpy()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_measuring_another_model_leaves_every_bit_of_the_policy(make: Make, models: Path, dtype: str) -> None:
    engine = make(dtype, reference_path="other")
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


def test_a_measuring_pass_that_fails_puts_the_policy_back(make: Make) -> None:
    engine = make(reference_path="other")
    before = state_of(engine)
    assert engine._reference is not None
    with pytest.raises(RuntimeError, match="in between"), engine._reference.in_place():
        assert not torch.equal(engine.tensors()["decoder.final_layernorm.weight"], before["weights/decoder.final_layernorm.weight"])
        raise RuntimeError("in between")
    assert same(state_of(engine), before)


def test_by_default_the_reference_is_the_policy_s_start_and_stays(make: Make, models: Path) -> None:
    engine = make()
    start = engine.logprobs(SAMPLES)[0]
    first = engine.train_step(SAMPLES, NUM_UPDATES)
    assert np.array_equal(reference_logprobs(engine), start)
    assert not np.array_equal(engine.logprobs(SAMPLES)[0], start)
    second = engine.train_step(SAMPLES, NUM_UPDATES)
    assert second.metrics["kl_reference"] > first.metrics["kl_reference"] > 0
    assert {"reference", "old_logprobs"} <= set(first.seconds)


def test_without_a_coefficient_there_is_no_reference(make: Make) -> None:
    engine = make(kl_coefficient=0.0)
    with pytest.raises(ConfigError, match=r"grpo\.kl_coefficient is 0"):
        reference_logprobs(engine)
    result = engine.train_step(SAMPLES, NUM_UPDATES)
    assert not {"kl_reference", "kl_loss", "reference"} & (set(result.metrics) | set(result.seconds))


def test_kl_in_the_reward_leaves_the_step_alone(make: Make) -> None:
    without = make(kl_coefficient=0.0).train_step(SAMPLES, NUM_UPDATES).metrics
    assert make(kl_in="reward", reference_path="other").train_step(SAMPLES, NUM_UPDATES).metrics == without


def test_a_reference_of_another_shape_is_refused_before_anything_is_built(make: Make) -> None:
    with pytest.raises(ConfigError, match=r"reference_path .*tied is a model of another shape.*family: qwen2, not"):
        make(reference_path="tied")


def test_a_refreshed_reference_is_in_the_checkpoint(make: Make, tmp_path: Path) -> None:
    engine = make(reference_path="other", reference_refresh_every=2)
    other = reference_logprobs(engine)
    engine.train_step(SAMPLES, NUM_UPDATES)
    assert np.array_equal(reference_logprobs(engine), other)
    engine.train_step(SAMPLES, NUM_UPDATES)
    refreshed = engine.logprobs(SAMPLES)[0]
    assert np.array_equal(reference_logprobs(engine), refreshed)
    engine.train_step(SAMPLES, NUM_UPDATES)
    engine.save(tmp_path / "checkpoint")
    expected = engine.train_step(SAMPLES, NUM_UPDATES)

    resumed = make(reference_path="other", reference_refresh_every=2)
    resumed.check_checkpoint(tmp_path / "checkpoint")
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(resumed), refreshed)
    assert resumed.train_step(SAMPLES, NUM_UPDATES).metrics == expected.metrics
    # from here on it is never refreshed: that of the folder
    frozen = make(reference_path="other")
    frozen.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(frozen), other)


def test_a_frozen_reference_is_in_no_checkpoint_and_is_read_again(make: Make, models: Path, tmp_path: Path) -> None:
    engine = make()
    start = reference_logprobs(engine)
    engine.train_step(SAMPLES, NUM_UPDATES)
    engine.save(tmp_path / "checkpoint")
    with safe_open(tmp_path / "checkpoint" / "shard-tp00-pp00.safetensors", framework="pt") as file:
        assert not [name for name in set(file.keys()) if name.startswith("reference/")]
    expected = engine.train_step(SAMPLES, NUM_UPDATES)
    resumed = make()
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(resumed), start)
    assert resumed.train_step(SAMPLES, NUM_UPDATES).metrics == expected.metrics
    # a run that refreshes goes on from a checkpoint of one that did not
    refreshing = make(reference_refresh_every=1)
    refreshing.load_checkpoint(tmp_path / "checkpoint")
    assert np.array_equal(reference_logprobs(refreshing), start)
    refreshing.load(models / "policy")
    assert np.array_equal(reference_logprobs(refreshing), start)


def overflowing(samples: Samples, rows: list[int]) -> Samples:
    """Finite advantages whose loss or gradient is not."""
    advantages = samples.advantages.copy()
    advantages[rows] = 3e38
    return replace(samples, advantages=advantages)


def test_an_update_that_is_not_finite_is_left_out_within_the_budget(make: Make, tmp_path: Path) -> None:
    engine = make(on_non_finite="skip", non_finite_budget=2, kl_coefficient=0.0)
    bad = overflowing(SAMPLES, [len(SAMPLES) - 1])
    good = replace(bad, trainable=bad.trainable & (bad.update_index == 0))
    found = engine.train_step(bad, NUM_UPDATES).metrics
    skipped = state_of(engine)
    assert found["skipped_updates"] == 1
    assert np.isfinite(list(found.values())).all()
    # what the other update alone does
    alone = make(kl_coefficient=0.0)
    alone.train_step(replace(good, update_index=np.zeros_like(good.update_index)), 1) if False else None
    engine.save(tmp_path / "checkpoint")
    resumed = make(on_non_finite="skip", non_finite_budget=2, kl_coefficient=0.0)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert same(state_of(resumed), skipped)
    assert resumed.train_step(bad, NUM_UPDATES).metrics["skipped_updates"] == 1
    before = state_of(resumed)
    with pytest.raises(NotFinite, match=r"update 1 .*s15; grpo\.non_finite_budget \(2\) is spent; the weights are un"):
        resumed.train_step(bad, NUM_UPDATES)
    assert same(state_of(resumed), before)
