"""Megatron on packed rows: log-probs of transformers, and the same results however the samples are packed."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem_config.schema import RunConfig
from tests.integration.trainer.reference import CONFIG, make_samples, masked, token_logprobs
from tests.kit.models import save_model
from trainer_service.megatron_engine.backend import MicroBatchTensors, to_device
from trainer_service.megatron_engine.engine import MegatronEngine
from trainer_service.micro_batches.packed import PackedRow, pack
from trainer_service.micro_batches.samples import Samples

pytestmark = pytest.mark.timeout(120)  # models are made, and compute, in each test
CPU = torch.device("cpu")
TOLERANCE = 1e-5
SAMPLES = make_samples()
MASKED = masked(SAMPLES)
NUM = len(SAMPLES)


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    """The group of a single rank."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@contextmanager
def engine_of(folder: Path) -> Iterator[MegatronEngine]:
    config = RunConfig.model_validate(CONFIG | {"model": {"path": str(folder), "dtype": "float32"}})
    engine = MegatronEngine(config, CPU)
    try:
        engine.load(folder)
        yield engine
    finally:
        engine.close()


def set_limits(engine: MegatronEngine, tokens: int, share_prompts: bool) -> None:
    """Change trainer.max_tokens_per_micro_batch and share_prompts of an engine."""
    engine._ranks = replace(engine._ranks, max_tokens=tokens, share_prompts=share_prompts)
    engine._runner = replace(engine._runner, ranks=engine._ranks)


@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3", "qwen3-moe", "llama", "qwen2-yarn"])
def test_logprobs_equal_transformers_at_every_budget(kind: str, tmp_path: Path) -> None:
    model = save_model(kind, tmp_path)
    with torch.no_grad():
        expected = token_logprobs(model, SAMPLES, range(NUM), CONFIG["grpo"]["temperature"])
    with engine_of(tmp_path) as engine:
        for budget, share in itertools.product((19, 64, 16384), (False, True)):
            set_limits(engine, budget, share)
            for got, other in zip(engine.logprobs(SAMPLES), expected, strict=True):
                assert np.abs(got - other.numpy()).max() <= TOLERANCE
            for got, other in zip(engine.logprobs(MASKED), expected, strict=True):
                assert np.abs(got - other.numpy() * MASKED.loss_mask).max() <= TOLERANCE
                assert not got[~MASKED.loss_mask].any()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    save_model("qwen3", folder)
    return folder


def results(engine: MegatronEngine, batches: Sequence[PackedRow]) -> dict[str, Tensor]:
    """Log-probs, entropies and all gradients of a sum of both, with a factor for each token."""
    factors = torch.randn(2, SAMPLES.num_completion_tokens, generator=torch.Generator().manual_seed(0)) / NUM
    out = {"logprobs": torch.zeros(SAMPLES.num_completion_tokens), "loss": torch.zeros(())}
    out["entropies"] = out["logprobs"].clone()

    def on_tokens(batch: MicroBatchTensors, logprobs: Tensor, entropies: Tensor) -> Tensor:
        if not batch.counted:
            return logprobs.sum() * 0
        index = batch.token_index
        out["logprobs"][index], out["entropies"][index] = logprobs.detach(), entropies.detach()
        loss = (factors[0, index] * logprobs + factors[1, index] * entropies).sum()
        out["loss"] += loss.detach()
        return loss

    engine._backend.train([to_device(batch, CPU) for batch in batches], on_tokens)
    grads = {name: parameter.main_grad.clone() for name, parameter in engine._parameters.items()}
    return out | grads


def test_order_cuts_padding_stand_ins_and_shared_prompts_change_nothing(model: Path) -> None:
    with engine_of(model) as engine:
        expected = results(engine, [pack(SAMPLES, np.array([i])) for i in range(NUM)])
        assert min(float(each.abs().max()) for each in expected.values()) > 100 * TOLERANCE

        @settings(max_examples=10, deadline=None)
        @given(
            order=st.permutations(range(NUM)),
            ends=st.sets(st.integers(1, NUM - 1), max_size=6),
            multiples=st.sampled_from([(1, 1), (1, 8), (4, 4), (4, 16)]),
            stand_in=st.booleans(),
            share=st.booleans(),
        )
        def packed(order: list[int], ends: set[int], multiples: tuple[int, int], stand_in: bool, share: bool) -> None:
            options: dict[str, Any] = {"sequence_multiple": multiples[0], "row_multiple": multiples[1]}
            options["share_prompts"] = share
            parts = np.split(np.array(order), sorted(ends))
            batches = [pack(SAMPLES, part, **options) for part in parts]
            if stand_in:
                batches.append(pack(SAMPLES, parts[0], **options, counted=False))
            got = results(engine, batches)
            assert max(float((got[name] - expected[name]).abs().max()) for name in got) <= TOLERANCE

        packed()


@pytest.mark.parametrize("samples", [SAMPLES, MASKED], ids=["whole", "masked"])
def test_a_step_is_the_same_at_every_budget(model: Path, samples: Samples) -> None:
    """Loss, gradient norm and weights of a GRPO step of two updates, in the samples' order and another."""
    with engine_of(model) as engine:

        def step(samples: Samples, budget: int, share: bool = False) -> dict[str, Any]:
            set_limits(engine, budget, share)
            engine.load(model)
            metrics = engine.train_step(samples, 2).metrics
            weights = {name: weight.clone() for name, weight in engine.tensors().items()}
            return {"metrics": dict(metrics), "weights": weights}

        expected = step(samples, 64)
        assert expected["metrics"].pop("prompt_sharing") == 1.0
        for budget, share in itertools.product((19, 30, 1000), (False, True)):
            got = step(reversed_within_updates(samples), budget, share)
            assert (got["metrics"].pop("prompt_sharing") < 1) == share
            assert got["metrics"] == pytest.approx(expected["metrics"], abs=TOLERANCE)
            for name, weight in got["weights"].items():
                assert float((weight - expected["weights"][name]).abs().max()) <= TOLERANCE
    assert expected["metrics"]["packing_efficiency"] == 1.0


def reversed_within_updates(samples: Samples) -> Samples:
    order = np.concatenate([samples.of_update(update)[::-1] for update in range(2)])

    def of_tokens(values: Any, starts: Any, lengths: Any) -> Any:
        return np.concatenate([values[starts[i] : starts[i] + lengths[i]] for i in order])

    mask = {"loss_mask": samples.loss_mask} if samples.loss_mask.size else {}
    return replace(
        samples,
        sample_ids=tuple(samples.sample_ids[i] for i in order),
        token_ids=of_tokens(samples.token_ids, samples.token_starts, samples.lengths),
        **{
            name: of_tokens(values, samples.completion_starts, samples.completion_lengths)
            for name, values in {"rollout_logprobs": samples.rollout_logprobs, **mask}.items()
        },
        **{
            name: getattr(samples, name)[order]
            for name in ("prompt_lengths", "completion_lengths", "advantages", "trainable")
        },
    )
