"""AdamW's state by parameter name: what a checkpoint holds, and a copy to go back to."""

from collections.abc import Mapping

import torch
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

_STATES = ("exp_avg", "exp_avg_sq", "step")


class AdamState:
    """The parameters of this rank, their float32 masters (bfloat16 only) and AdamW's moments and step counts."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: ChainedOptimizer) -> None:
        self._tensors: dict[str, Tensor] = {}
        states = _states_by_parameter(optimizer)
        for name, parameter in parameters.items():
            # mcore hangs the float32 copy of a bfloat16 parameter on the parameter
            main = getattr(parameter, "main_param", None)
            trained = parameter if main is None else main
            state = states[trained]
            _fill_in(state, trained)
            self._tensors[f"weights/{name}"] = parameter.data
            if main is not None:
                self._tensors[f"main/{name}"] = main.data
            self._tensors |= {f"{kind}/{name}": state[kind] for kind in _STATES}
        self._copies: list[Tensor] | None = None

    def tensors(self) -> dict[str, Tensor]:
        """Live tensors by "weights/", "main/", "exp_avg/", "exp_avg_sq/" or "step/" and the parameter's name."""
        return dict(self._tensors)

    def forget(self) -> None:
        """As before the first step."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if name.partition("/")[0] in _STATES:
                    tensor.zero_()

    def remember(self) -> None:
        """Copy everything, to host memory, so that a step of several updates can be undone."""
        live = list(self._tensors.values())
        if self._copies is None:
            self._copies = [torch.empty_like(t, device="cpu") for t in live]
        torch._foreach_copy_(self._copies, live)

    def restore(self) -> None:
        """Undo everything since `remember`."""
        if self._copies is None:
            raise RuntimeError("restore without remember")
        with torch.no_grad():
            torch._foreach_copy_(list(self._tensors.values()), self._copies)


def _states_by_parameter(optimizer: ChainedOptimizer) -> dict[Tensor, dict[str, Tensor]]:
    """AdamW's state of each tensor that it changes; mcore has an optimizer of their own for experts."""
    return {
        trained: each.optimizer.state[trained]
        for each in optimizer.chained_optimizers
        for group in each.optimizer.param_groups
        for trained in group["params"]
    }


def _fill_in(state: dict[str, Tensor], trained: Tensor) -> None:
    """AdamW makes its state at the first step; make it now, so that it can be saved and restored at any time."""
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32)
        state["exp_avg"] = torch.zeros_like(trained)
        state["exp_avg_sq"] = torch.zeros_like(trained)


def masters_from_weights(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """After weights were loaded: the float32 masters of bfloat16 parameters take their values."""
    with torch.no_grad():
        for parameter in parameters.values():
            main = getattr(parameter, "main_param", None)
            if main is not None:
                main.copy_(parameter)
