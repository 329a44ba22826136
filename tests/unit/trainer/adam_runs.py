"""Short trainings with an optimizer of choice, interrupted or not, as AdamState's tests need them."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.fakes.fake_te_adam import FakeFusedAdam
from trainer_service.checkpoints.parts import values_of
from trainer_service.megatron_engine.adam_state import AdamState

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
NUM_WEIGHTS = 64
Make = Callable[[list[Any]], torch.optim.Optimizer]


def torch_adam(groups: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, **SETTINGS)


def te_adam(groups: list[Any]) -> torch.optim.Optimizer:
    return FakeFusedAdam(groups, **SETTINGS)


@dataclass(kw_only=True)
class Training:
    """Two parameters in two groups, as mcore makes them for weight decay, or in one; bf16: each has a master."""

    make: Make
    bf16: bool = False
    one_group: bool = False

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {}
        self.trained = []
        for name in ("w", "norm"):
            values = torch.randn(NUM_WEIGHTS, generator=generator)
            parameter = torch.nn.Parameter(values.bfloat16() if self.bf16 else values)
            if self.bf16:
                parameter.main_param = parameter.detach().float()
            self.parameters[name] = parameter
            self.trained.append(parameter.main_param if self.bf16 else parameter)
        apart = [{"params": [self.trained[0]]}, {"params": [self.trained[1]], "weight_decay": 0.0}, {"params": []}]
        self.optimizer = self.make([{"params": self.trained}] if self.one_group else apart)
        chained: Any = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=self.optimizer)])
        self.adam = AdamState(self.parameters, chained)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for tensor in self.trained:
            tensor.grad = torch.randn(NUM_WEIGHTS, generator=generator) + 0.3
        self.optimizer.step()
        if self.bf16:
            with torch.no_grad():
                for parameter in self.parameters.values():
                    parameter.copy_(parameter.main_param)

    def steps(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.step(number)

    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint would hold."""
        return {name: values_of(held).clone() for name, held in self.adam.tensors().items()}

    def resumed(self, make: Make) -> "Training":
        """Another process, with an optimizer of `make`, that has loaded this one's checkpoint."""
        other = Training(make=make, bf16=self.bf16)
        with torch.no_grad():
            for name, held in other.adam.tensors().items():
                values_of(held).copy_(self.saved()[name])
        other.adam.written()
        return other


def assert_same(one: Training, other: Training) -> None:
    expected = one.saved()
    for name, tensor in other.saved().items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=0.0, atol=0.0, msg=lambda text, at=name: f"{at}: {text}"
        )
