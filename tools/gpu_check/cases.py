"""The cases of gpu-check's speed part, by the number of GPUs."""

from dataclasses import dataclass

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
MULTI_RANK_NCCL = (2, 31)
EXPERTS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    """A trainer of TP `trainer` and one replica of TP `rollout`, over a transport; ranks get GPUs in turn.

    Attributes:
        experts: experts of each layer, whose many small matrices are as many segments; 0: a dense model.
    """

    name: str
    transport: str
    trainer: int
    rollout: int
    install: str
    num_gpus: int
    device: str = "cuda"
    experts: int = 0


def cases(
    num_gpus: int, nccl: tuple[int, ...], *, multi_rank: bool, device: str = "cuda"
) -> tuple[list[Case], list[str]]:
    """Select the cases for a number of GPUs.

    Args:
        nccl: NCCL's version.
        multi_rank: several ranks may share a GPU.
    Returns: the cases, and a line per case that is skipped.
    """
    chosen, skipped = [], []
    for trainer, rollout in ((1, 1), (2, 1), (2, 2)):
        ranks = trainer + rollout
        name = f"collective TP{trainer} -> TP{rollout}"
        if num_gpus >= ranks or multi_rank:
            gpus = min(num_gpus, ranks)
            chosen += [
                Case(
                    name=f"{name} {install}{f', {experts} experts' if experts else ''}",
                    transport="collective",
                    trainer=trainer,
                    rollout=rollout,
                    install=install,
                    num_gpus=gpus,
                    device=device,
                    experts=experts,
                )
                for install, experts in (("in_place", 0), ("staged", 0), ("in_place", EXPERTS))
                if experts == 0 or ranks == 2
            ]
        else:
            skipped.append(
                f"{name}: {num_gpus} GPUs for {ranks} ranks, and several ranks per GPU need NCCL >= 2.31 "
                f"(this is {'.'.join(map(str, nccl))}) with {MULTI_RANK}=1"
            )
    chosen += [
        Case(
            name=f"colocated TP{trainer} -> TP{rollout} {install}",
            transport="colocated",
            trainer=trainer,
            rollout=rollout,
            install=install,
            num_gpus=1,
            device=device,
        )
        for trainer, rollout in ((1, 1), (2, 2))
        for install in ("in_place", "staged")
    ]
    if num_gpus > 1:
        skipped.append(f"colocated between GPUs: all ranks of those cases are on the first of {num_gpus}")
    return chosen, skipped
