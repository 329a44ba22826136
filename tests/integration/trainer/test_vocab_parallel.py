"""The output layer over a split, padded vocabulary, in one chunk and in many, against log_softmax over the whole one.

As a module, this is one tensor-parallel rank. Arguments: rank, world size, folder with input.pt.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.kit.processes import zygote
from trainer_service.megatron_engine.head.logprobs import VocabShard, logprob_entropy

pytestmark = pytest.mark.integration
TOKENS, HIDDEN, VOCAB, TEMPERATURE = 33, 12, 101, 0.7
CHUNKS = {"one": TOKENS, "many": 8}
# the last of four ranks has padding only
PADDED = {1: 101, 2: 102, 4: 136}


def run_ranks(folder: Path) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """All ranks of all world sizes at once; what each of them computed."""
    module, stderr = "tests.integration.trainer.test_vocab_parallel", 2
    workers = [
        zygote("trainer_service").start([module, str(rank), str(size), str(folder)], os.environ, stderr)
        for size in PADDED
        for rank in range(size)
    ]
    try:
        assert [worker.wait(timeout=120) for worker in workers] == [0] * len(workers)
    finally:
        for worker in workers:
            worker.kill()
    return {
        (size, chunks): [torch.load(folder / f"out-{size}-{rank}-{chunks}.pt") for rank in range(size)]
        for size in PADDED
        for chunks in CHUNKS
    }


def test_equals_log_softmax_at_tp_1_2_and_4(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    factors = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    torch.save({"hidden": hidden, "weight": weight, "targets": targets, "factors": factors}, tmp_path / "input.pt")
    results = run_ranks(tmp_path)

    hidden.requires_grad_()
    weight.requires_grad_()
    full = (hidden @ weight.t() / TEMPERATURE).log_softmax(-1)
    logprobs = full.gather(-1, targets[:, None])[:, 0]
    entropies = -(full.exp() * full).sum(-1)
    ((logprobs * factors[0]).sum() + (entropies * factors[1]).sum()).backward()
    for outs in results.values():
        for out in outs:
            torch.testing.assert_close(out["logprobs"], logprobs.detach(), rtol=0, atol=1e-12)
            torch.testing.assert_close(out["entropies"], entropies.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(sum(out["hidden"] for out in outs), hidden.grad, rtol=0, atol=1e-12)
        rows = torch.cat([out["weight"] for out in outs])
        torch.testing.assert_close(rows[:VOCAB], weight.grad, rtol=0, atol=1e-12)
        # the padding of 1e4 would have swallowed every probability
        assert not rows[VOCAB:].any()


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / f"store-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    data = torch.load(folder / "input.pt", weights_only=True)
    padded = torch.full((PADDED[world_size], HIDDEN), 1e4, dtype=torch.float64)
    padded[:VOCAB] = data["weight"]
    columns = PADDED[world_size] // world_size
    group = dist.group.WORLD
    assert group is not None
    shard = VocabShard.of(group, columns, VOCAB, TEMPERATURE)
    for name, chunk in CHUNKS.items():
        hidden = data["hidden"].clone().requires_grad_()
        weight = padded[rank * columns : (rank + 1) * columns].clone().requires_grad_()
        # as mcore's DDP has it, which adds `grad` in the end
        weight.main_grad = torch.zeros_like(weight, requires_grad=False)
        logprobs, entropies = logprob_entropy(hidden, weight, data["targets"], shard, chunk)
        ((logprobs * data["factors"][0]).sum() + (entropies * data["factors"][1]).sum()).backward()
        result = {"logprobs": logprobs.detach(), "entropies": entropies.detach(), "hidden": hidden.grad}
        result["weight"] = weight.grad + weight.main_grad
        torch.save(result, folder / f"out-{world_size}-{rank}-{name}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
