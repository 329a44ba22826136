"""Log-probs and entropies over a split, padded vocabulary against log_softmax over the whole one.

As a module, this is one tensor-parallel rank. Arguments: rank, world size, folder with input.pt.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer_service.megatron_engine.vocab_parallel import logprob_entropy

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[3]
TOKENS, VOCAB = 33, 101


def run_ranks(folder: Path, world_sizes: list[int]) -> dict[int, list[dict[str, Any]]]:
    """All ranks of all world sizes at once; what each of them computed."""
    command = [sys.executable, "-m", "tests.integration.trainer.test_vocab_parallel"]
    workers = [
        subprocess.Popen([*command, str(rank), str(size), str(folder)], cwd=REPOSITORY)
        for size in world_sizes
        for rank in range(size)
    ]
    try:
        assert [worker.wait(timeout=60) for worker in workers] == [0] * len(workers)
    finally:
        for worker in workers:
            worker.kill()
    return {
        size: [torch.load(folder / f"out-{size}-{rank}.pt", weights_only=True) for rank in range(size)]
        for size in world_sizes
    }


def test_equals_log_softmax_at_tp_1_and_2(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCAB, generator=generator) * 3
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    weights = torch.randn(2, TOKENS, generator=generator)
    torch.save({"logits": logits, "targets": targets, "weights": weights}, tmp_path / "input.pt")
    results = run_ranks(tmp_path, [1, 2])

    logits.requires_grad_()
    full = logits.log_softmax(-1)
    logprobs = full.gather(-1, targets[:, None])[:, 0]
    entropies = -(full.exp() * full).sum(-1)
    ((logprobs * weights[0]).sum() + (entropies * weights[1]).sum()).backward()
    assert logits.grad is not None
    for outs in results.values():
        gradient = torch.cat([out["gradient"] for out in outs], -1)
        for out in outs:
            assert torch.allclose(out["logprobs"], logprobs.detach(), atol=2e-6)
            assert torch.allclose(out["entropies"], entropies.detach(), atol=2e-6)
        assert torch.allclose(gradient[:, :VOCAB], logits.grad, atol=2e-6)
        # the padding of 1e4 would have swallowed every probability
        assert not gradient[:, VOCAB:].any()


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    store = dist.FileStore(str(folder / f"store-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    data = torch.load(folder / "input.pt", weights_only=True)
    true_vocab = data["logits"].shape[1]
    columns = -(-true_vocab // world_size)
    padded = torch.full((data["logits"].shape[0], columns * world_size), 1e4)
    padded[:, :true_vocab] = data["logits"]
    mine = padded[:, rank * columns : (rank + 1) * columns].clone().requires_grad_()
    logprobs, entropies = logprob_entropy(mine, data["targets"], group=dist.group.WORLD, true_vocab=true_vocab)
    ((logprobs * data["weights"][0]).sum() + (entropies * data["weights"][1]).sum()).backward()
    result = {"logprobs": logprobs.detach(), "entropies": entropies.detach(), "gradient": mine.grad}
    torch.save(result, folder / f"out-{world_size}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
