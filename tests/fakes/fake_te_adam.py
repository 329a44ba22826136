"""TransformerEngine's FusedAdam as far as its state goes: the step count in `group["step"]`, moments per parameter.

The real one needs a CUDA library to be imported; `tests/integration/trainer/test_te_adam.py` compares this one with the
real one's own Python step, from its wheel.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def multi_tensor_adam(
    chunk_size: int,
    overflow: Tensor,
    lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """The arithmetic of TransformerEngine's CUDA kernel of that name, in decoupled mode."""
    corrected = bool(bias_correction)
    first = 1 - beta1**step if corrected else 1.0
    second = 1 - beta2**step if corrected else 1.0
    for gradient, parameter, moment, square in zip(*lists, strict=True):
        moment.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = (moment / first) / ((square / second).sqrt() + eps) + weight_decay * parameter
        parameter.sub_(lr * update)


class FakeFusedAdam(torch.optim.Optimizer):
    """Arguments as FusedAdam's."""

    def __init__(self, params: Any, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """As FusedAdam's: groups count, also empty ones; moments are made for a parameter without any state."""
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            lists: list[list[Tensor]] = [[], [], [], []]
            for parameter in group["params"]:
                state = self.state[parameter]
                if len(state) == 0:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                if parameter.grad is not None:
                    row = (parameter.grad, parameter, state["exp_avg"], state["exp_avg_sq"])
                    for each, tensor in zip(lists, row, strict=True):
                        each.append(tensor)
            beta1, beta2 = group["betas"]
            multi_tensor_adam(
                2048, torch.zeros(1), lists, group["lr"], beta1, beta2, group["eps"], group["step"], 1, 1,
                group["weight_decay"],
            )  # fmt: skip
