"""Whole steps of a real engine of one rank: KL, entropy, epochs, and updates that are left out."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servicekit.errors import InvalidRequest, NotFinite
from tests.integration.trainer.optimizer_step import reference_step
from tests.integration.trainer.reference import CONFIG, NUM_UPDATES, make_samples, masked
from tests.kit.models import load
from tests.unit.trainer.conftest import KL
from tests.unit.trainer.test_reference_policy import same, state_of
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.micro_batches.checks import check
from trainer_service.micro_batches.samples import Samples, reordered

SAMPLES = make_samples(16)
HALF = len(SAMPLES) // 2
Make = Callable[..., MegatronEngine]
# The first one imports transformers and writes models: a minute on a busy machine.
pytestmark = pytest.mark.timeout(240)
SETTINGS: dict[str, dict[str, Any]] = {
    "k1": {"kl_estimator": "k1"},
    "k2": {"kl_estimator": "k2"},
    "k3, with all terms": {**{name: CONFIG["grpo"][name] for name in KL if name != "kl_coefficient"}},
    "k3, three epochs": {"epochs": 3, "kl_coefficient": 0.5},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_step_equals_that_of_transformers(make_engine: Make, models: Path, settings: dict[str, Any]) -> None:
    engine = make_engine(reference_path="other", **settings)
    found = engine.train_step(SAMPLES, NUM_UPDATES).metrics
    policy: Any = load(models / "policy")
    grpo = CONFIG["grpo"] | KL | {"kl_estimator": "k3"} | settings
    expected = reference_step(policy, SAMPLES, grpo, reference=load(models / "other"))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    norm = engine.tensors()["decoder.final_layernorm.weight"]
    torch.testing.assert_close(norm, policy.model.norm.weight.detach(), rtol=0, atol=1e-5)
    assert found["trained_tokens"] == settings.get("epochs", 1) * SAMPLES.per_token(SAMPLES.trainable).sum()


@pytest.mark.parametrize(
    "settings", [{"epochs": 2}, {"objective": "gspo", "dual_clip": None, "aggregation": "seq-mean-token-mean"}], ids=str
)
def test_a_step_of_masked_samples_equals_that_of_transformers(
    make_engine: Make, models: Path, settings: dict[str, Any]
) -> None:
    samples = masked(SAMPLES)
    found = make_engine(reference_path="other", **settings).train_step(samples, NUM_UPDATES).metrics
    policy, grpo = load(models / "policy"), CONFIG["grpo"] | KL | {"kl_estimator": "k3"} | settings
    expected = reference_step(policy, samples, grpo, reference=load(models / "other"))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    whole = reference_step(load(models / "policy"), SAMPLES, grpo, reference=load(models / "other"))
    assert abs(whole["loss"] - expected["loss"]) > 1e-3
    assert found["tokens"] == samples.loss_mask.sum()
    trained = samples.loss_mask & samples.per_token(samples.trainable)
    assert found["trained_tokens"] == settings.get("epochs", 1) * trained.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 2, "aggregation": "seq-mean-token-mean"},
        {"aggregation": "dr-grpo", "max_new_tokens": 40},
        {"objective": "gspo", "dual_clip": None, "aggregation": "seq-mean-token-mean"},
    ],
    ids=str,
)
def test_a_step_of_episodes_of_several_sequences_equals_that_of_transformers(
    make_engine: Make, models: Path, settings: dict[str, Any]
) -> None:
    continues = np.arange(len(SAMPLES)) % HALF % 3 > 0
    owner = np.flatnonzero(~continues)[np.cumsum(~continues) - 1]
    samples = replace(
        masked(SAMPLES),
        continues=continues,
        advantages=SAMPLES.advantages[owner],
        trainable=SAMPLES.trainable[owner],
    )
    found = make_engine(reference_path="other", **settings).train_step(samples, NUM_UPDATES).metrics
    grpo = CONFIG["grpo"] | KL | {"kl_estimator": "k3"} | settings
    expected = reference_step(load(models / "policy"), samples, grpo, reference=load(models / "other"))
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
    apart = replace(samples, continues=np.empty(0, np.bool_))
    other = reference_step(load(models / "policy"), apart, grpo, reference=load(models / "other"))
    assert abs(other["loss"] - expected["loss"]) > 1e-4
    assert found["samples"] == (~continues).sum()


def test_epochs_keep_the_sequences_of_an_episode_together() -> None:
    samples = replace(SAMPLES, continues=np.arange(len(SAMPLES)) % 3 > 0)
    for divide in ("samples", "prompts"):
        order = reordered(samples, 2, [7, 0, 1], divide).update_index
        assert set(order.tolist()) == {0, 1}
        assert (order[samples.continues] == order[np.flatnonzero(samples.continues) - 1]).all()


def test_adamw_runs_as_one_kernel(make_engine: Make) -> None:
    groups = make_engine()._backend.optimizer.param_groups
    assert groups
    assert all(group["fused"] for group in groups)


def test_epochs_have_other_orders_and_the_same_ones_again() -> None:
    orders = [reordered(SAMPLES, 3, [7, step, epoch]).update_index for step in (0, 1) for epoch in (1, 2)]
    assert all(np.bincount(order).tolist() == [6, 5, 5] for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert np.array_equal(reordered(SAMPLES, 3, [7, 0, 1]).update_index, orders[0])


def test_epochs_that_divide_prompts_keep_groups_whole() -> None:
    orders = [reordered(SAMPLES, 3, [7, 0, epoch], "prompts").update_index for epoch in (1, 2)]
    for order in orders:
        assert set(order.tolist()) == {0, 1, 2}
        assert all(len(set(order[SAMPLES.prompt_index == prompt].tolist())) == 1 for prompt in range(4))
    assert not np.array_equal(orders[0], orders[1])
    # fewer prompts than updates: none is empty
    assert set(reordered(SAMPLES, 6, [7, 0, 1], "prompts").update_index.tolist()) == set(range(6))


def test_every_step_has_orders_of_its_own(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_service.step import runner

    keys: list[list[int]] = []

    def note(samples: Samples, num_updates: int, key: list[int], divide: str) -> Samples:
        keys.append(key)
        assert divide == "samples"
        return reordered(samples, num_updates, key)

    monkeypatch.setattr(runner, "reordered", note)
    engine = make_engine(epochs=2)
    for _ in range(2):
        engine.train_step(SAMPLES, NUM_UPDATES)
    assert keys == [[0, 0, 1], [0, 1, 1]]


def overflowing(*rows: int) -> Samples:
    """The samples, some with a finite advantage whose loss or gradient is not."""
    advantages = SAMPLES.advantages.copy()
    advantages[list(rows)] = 3e38
    return replace(SAMPLES, advantages=advantages)


def first_half() -> Samples:
    """The samples of the first update alone."""
    tokens, completions = int(SAMPLES.lengths[:HALF].sum()), int(SAMPLES.completion_lengths[:HALF].sum())
    ends = {"token_ids": tokens, "rollout_logprobs": completions}
    names = ("sample_ids", "update_index", "prompt_lengths", "completion_lengths", "advantages", "trainable", *ends)
    return Samples(**{name: getattr(SAMPLES, name)[: ends.get(name, HALF)] for name in names})


@pytest.mark.parametrize("how", ["advantage", "log-prob"])
def test_an_update_that_is_not_finite_is_left_out(make_engine: Make, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(kl_coefficient=0.0)
    engine.train_step(first_half(), 1)
    expected = state_of(engine)
    engine = make_engine(on_non_finite="skip", kl_coefficient=0.0)
    bad = overflowing(14)
    if how == "log-prob":  # found when the step begins, before any update
        bad = SAMPLES
        spoil_token(monkeypatch, int(SAMPLES.completion_starts[13]))
    found = engine.train_step(bad, NUM_UPDATES).metrics
    assert found["skipped_updates"] == 1
    assert np.isfinite(list(found.values())).all()
    assert same(state_of(engine), expected)


def spoil_token(monkeypatch: pytest.MonkeyPatch, token: int) -> None:
    """Make a token's log-prob NaN wherever it is computed."""
    from trainer_service.megatron_engine.backend import MegatronBackend

    run = MegatronBackend._loss

    def loss(self: Any, on_tokens: Any, batch: Any, found: Any) -> Any:
        logprobs, entropies = found
        spoilt = torch.where(batch.token_index == token, torch.nan, logprobs)
        return run(self, on_tokens, batch, (spoilt, entropies))

    monkeypatch.setattr(MegatronBackend, "_loss", loss)


def test_the_budget_is_the_run_s_and_ends_it(make_engine: Make, tmp_path: Path) -> None:
    skip = {"on_non_finite": "skip", "non_finite_budget": 2, "kl_coefficient": 0.0}
    engine = make_engine(**skip)
    start = state_of(engine)
    found = engine.train_step(overflowing(1, 14), NUM_UPDATES).metrics
    assert (found["skipped_updates"], engine.policy_version) == (2, 1)
    assert np.isnan([found["loss"], found["grad_norm"]]).all()
    assert same(state_of(engine), start)
    engine.save(tmp_path / "checkpoint")

    resumed = make_engine(**skip)
    resumed.load_checkpoint(tmp_path / "checkpoint")
    assert resumed.train_step(SAMPLES, NUM_UPDATES).metrics["skipped_updates"] == 0
    before = state_of(resumed)
    with pytest.raises(NotFinite, match=r"update 1 .*s15; grpo\.non_finite_budget \(2\) is spent; the weights are un"):
        resumed.train_step(overflowing(14), NUM_UPDATES)
    assert same(state_of(resumed), before)


def test_by_default_the_step_is_undone(make_engine: Make) -> None:
    engine = make_engine(kl_coefficient=0.0, epochs=2)
    before = state_of(engine)
    with pytest.raises(NotFinite, match=r"update 1 is not finite; samples: s8, .*s15; the weights are unchanged"):
        engine.train_step(overflowing(14), NUM_UPDATES)
    assert same(state_of(engine), before)


@pytest.mark.parametrize("trained", [False, True])
def test_a_closed_engine_leaves_no_threads(make_engine: Make, trained: bool) -> None:
    def threads() -> int:
        engine = make_engine()  # closes the one before
        gc.collect()
        if trained:
            engine.train_step(SAMPLES, NUM_UPDATES)
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    first = threads()

    assert [threads() for _ in range(2)] == pytest.approx([first] * 2, abs=10)  # a process group has three


# One that is trained on.
TOKEN = int(np.flatnonzero(SAMPLES.per_token(SAMPLES.trainable))[5])


def without_logprob(value: float) -> Samples:
    """The samples, of which the engine gave one trained token no log-prob."""
    logprobs = SAMPLES.rollout_logprobs.copy()
    logprobs[TOKEN] = value
    return replace(SAMPLES, rollout_logprobs=logprobs)


@pytest.mark.parametrize(
    ("level", "value"),
    [("none", np.nan), ("none", -np.inf), ("token", -np.inf), ("sequence", np.inf), ("geometric", np.nan)],
)
def test_a_token_without_a_log_prob_of_the_engine_is_as_if_both_agreed(
    make_engine: Make, level: str, value: float
) -> None:
    correction = {} if level == "none" else {"correction": "importance", "correction_level": level}
    settings = {"kl_coefficient": 0.0, "aggregation": "seq-mean-token-mean"} | correction
    engine = make_engine(**settings)
    samples = without_logprob(value)
    check(samples, engine.limits)
    agreed, _ = engine.logprobs(samples)
    found = dict(engine.train_step(samples, 1).metrics)
    expected = make_engine(**settings).train_step(without_logprob(agreed[TOKEN]), 1).metrics
    assert found.pop("engine_logprobs_not_finite") == 1.0
    assert expected["engine_logprobs_not_finite"] == 0.0
    # The token is left out of the mean, in which it is a zero where both agree.
    mean = expected["logprob_abs_diff_mean"] * expected["measured_tokens"] / (expected["measured_tokens"] - 1)
    assert found == pytest.approx(
        {name: number for name, number in expected.items() if name in found} | {"logprob_abs_diff_mean": mean}, abs=1e-6
    )


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_such_a_token_costs_an_update_where_its_log_prob_is_pi_old(make_engine: Make, value: float) -> None:
    engine = make_engine(old_logprobs="rollout", on_non_finite="skip", kl_coefficient=0.0, correction="none")
    samples = without_logprob(value)
    check(samples, engine.limits)
    found = engine.train_step(samples, NUM_UPDATES).metrics
    assert (found["skipped_updates"], found["engine_logprobs_not_finite"]) == (1.0, 1.0)
    assert np.isfinite(list(found.values())).all()
    engine = make_engine(old_logprobs="rollout", kl_coefficient=0.0, correction="none")
    with pytest.raises(InvalidRequest, match=r"sample 's\d': rollout log-prob (nan|-inf) of completion token"):
        check(samples, engine.limits)
