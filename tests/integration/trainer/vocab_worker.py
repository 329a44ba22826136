"""One tensor-parallel rank of test_vocab_parallel: rank, world size, folder with input.pt."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from trainer_service.megatron_engine.vocab_parallel import logprob_entropy


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
