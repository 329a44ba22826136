"""The trainer chooses the experts that transformers and SGLang choose, in bfloat16 too."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.kit.stores import tiny_spec
from trainer_service.megatron_engine import build
from trainer_service.megatron_engine.layer_spec import decoder_spec
from weightsync.layouts.layout import Parallel


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    build.initialize_parallel(Parallel(), 0, 60.0)
    yield
    build.destroy_parallel()
    torch.distributed.destroy_process_group()


def router_of(num_experts: int, chosen: int, *, normalised: bool) -> Any:
    """The router that the trainer's layers have."""
    from megatron.core.process_groups_config import ProcessGroupCollection  # after the trainer has prepared megatron

    spec = tiny_spec(
        "qwen3_moe",
        num_experts=num_experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=12,
        norm_topk_prob=normalised,
    )
    config = build.transformer_config(spec, Parallel(), torch.bfloat16, sequence_parallel=False)
    layer: Any = decoder_spec(config, None).layer_specs[0]
    return layer.submodules.mlp.submodules.router(
        config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )


def as_transformers(logits: torch.Tensor, chosen: int, *, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts by the rule of transformers' Qwen3MoeTopKRouter, which is SGLang's."""
    weights, experts = logits.float().softmax(-1).topk(chosen, -1)
    if normalised:
        weights = weights / weights.sum(-1, keepdim=True)
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    dense = torch.zeros(logits.shape, dtype=logits.dtype)
    return dense.scatter(1, experts, weights.to(logits.dtype)), mask.scatter(1, experts, value=True)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "chosen", "scale"), [(128, 8, 1.0), (128, 8, 0.3), (64, 8, 0.05), (64, 6, 4.0), (8, 2, 1.0)]
)
def test_no_token_uses_other_experts(num_experts: int, chosen: int, scale: float, normalised: bool) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(8000, num_experts) * scale).bfloat16()
    weights, experts = router_of(num_experts, chosen, normalised=normalised).routing(logits[:, None])
    dense, wanted = as_transformers(logits, chosen, normalised=normalised)
    # equal logits at the border may be chosen either way
    ordered = logits.float().sort(-1, descending=True).values
    clear = ordered[:, chosen - 1] != ordered[:, chosen]
    assert int(((experts != wanted).any(-1) & clear).sum()) == 0
    assert weights.dtype == torch.bfloat16
    torch.testing.assert_close(weights[clear], dense[clear], rtol=2**-7, atol=0.0)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_router_s_gradient_is_that_of_the_chosen_probabilities(normalised: bool) -> None:
    torch.manual_seed(1)
    logits = torch.randn(500, 16).bfloat16()
    upstream = torch.randn(500, 16).bfloat16()
    ours, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    weights, experts = router_of(16, 4, normalised=normalised).routing(ours[:, None])
    (weights * upstream).float().sum().backward()
    expected = theirs.softmax(-1) * experts
    if normalised:
        expected = expected / expected.sum(-1, keepdim=True)
    (expected * upstream.double()).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    # one rounding to bfloat16
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2**-7, atol=1e-4)
