"""Over NCCL a rank receives hundreds of pieces of MiB size, not tens of thousands of small ones."""

import numpy as np
import pytest

from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout
from weightsync.model.spec import preset
from weightsync.plans.cost import MessageSizes
from weightsync.plans.limits import DEFAULT_BUCKET_BYTES
from weightsync.plans.messages import cut_messages
from weightsync.plans.plan import make_plan


@pytest.mark.parametrize(
    ("model", "trainer", "rollout", "at_most", "on_cpus"),
    [
        ("qwen3-30b-a3b", Parallel(tensor=4, expert=8, data=4), Parallel(tensor=4), 400, 18_000),
        ("qwen2.5-7b", Parallel(tensor=4, data=2), Parallel(), 1000, 700),
    ],
)
def test_pieces_that_a_rank_receives(
    model: str, trainer: Parallel, rollout: Parallel, at_most: int, on_cpus: int
) -> None:
    spec = preset(model)
    plan = make_plan(megatron_layout(spec, trainer), sglang_layout(spec, rollout))
    messages = [m for m in cut_messages(plan, DEFAULT_BUCKET_BYTES["cuda"] // 2) if m.dst == 0]
    sizes = MessageSizes.of(plan, messages, 2)
    assert sizes.segments.sum() <= at_most
    assert sizes.num_bytes.sum() / sizes.segments.sum() >= 4 * 2**20
    assert np.all(sizes.staged_dst <= sizes.num_bytes)
    assert MessageSizes.of(plan, messages, 2, "cpu").segments.sum() >= on_cpus
