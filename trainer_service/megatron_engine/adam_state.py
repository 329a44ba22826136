"""AdamW's state by parameter name, for checkpoints, and a copy in host memory, to undo a step.

Two optimizers have one form on disk (a step count per parameter), so that each reads what the other has written:

    torch.optim.AdamW                      its step count is a tensor in each parameter's state, and on its device, as
                                           the fused kernel wants it
    TransformerEngine's (and apex's)       it is a number in each parameter group, `group["step"]`; mcore takes this one
    FusedAdam                              wherever TransformerEngine is installed

Under the distributed optimizer (options/zero.py) each of them has parts of parameters only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from servicekit.errors import ConfigError
from trainer_service.checkpoints.parts import FlatPart, Held, values_of
from trainer_service.host_memory import host_like
from trainer_service.megatron_engine.zero import finish_gathering, gather_again, gather_next, own_parts

_STATES = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True, kw_only=True)
class _GroupSteps:
    """A parameter group with a step count of its own, and the tensors that represent the count per parameter."""

    group: dict[str, Any]
    tensors: list[Tensor]

    def read(self) -> None:
        """Set the tensors to the group's count, which exists from its first step on."""
        count = int(self.group.get("step", 0))
        for tensor in self.tensors:
            tensor.fill_(count)

    def write(self) -> None:
        """Set the group's count to that of the tensors. Raises: ConfigError: its parameters have different counts."""
        count = one_count(int(tensor) for tensor in self.tensors)
        held = self.group.get("step")
        # capturable: a tensor on the GPU, whose address CUDA graphs have
        if isinstance(held, Tensor):
            held.fill_(count)
        else:
            self.group["step"] = count


def one_count(counts: Iterable[int]) -> int:
    """Return the step count that parameters of a group share. Raises: ConfigError: they have different ones."""
    found = sorted(set(counts))
    if len(found) > 1:
        raise ConfigError(
            f"AdamW's step counts differ among parameters ({', '.join(map(str, found))}), and this optimizer has "
            "one for all: resume with the optimizer that wrote the checkpoint (with TransformerEngine, or without)"
        )
    return found[0]


class AdamState:
    """The parameters of this rank, their float32 masters (bfloat16 only) and AdamW's moments and step counts."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], optimizer: ChainedOptimizer) -> None:
        self._tensors: dict[str, Held] = {}
        # bfloat16 parameters (or parts of them) and their masters, whose rounding they always are
        self._rounded: list[tuple[Tensor, Tensor]] = []
        self._remembered: list[Tensor] = []
        states = _states_by_parameter(optimizer)
        counting = _groups_that_count(optimizer)
        in_counting = {trained for group in counting for trained in group["params"]}
        steps = {t: _fill_in(state, t, counts=t not in in_counting) for t, state in states.items()}
        self._group_steps = [
            _GroupSteps(group=group, tensors=[steps[trained] for trained in group["params"]]) for group in counting
        ]
        parts = own_parts(optimizer)
        # whose parameters are gathered from parts
        self._chunks: Sequence[Any] = [] if parts is None else optimizer.model_chunks
        for name, parameter in parameters.items():
            # mcore's float32 copy of a bfloat16 parameter, or of a part of it, is an attribute of the parameter
            has_main = hasattr(parameter, "main_param")
            part = None if parts is None else parts.get(parameter)
            if parts is not None and part is None:
                self._keep(name, parameter, _nothing(parameter, has_main=has_main), 0)
                continue
            if part is not None:
                trained, own = part.trained, part.of(parameter.data)
            else:
                trained, own = (parameter.main_param if has_main else parameter), parameter.data
            kept = {"exp_avg": states[trained]["exp_avg"], "exp_avg_sq": states[trained]["exp_avg_sq"]}
            kept |= {"step": steps[trained]} | ({"main": trained.data} if has_main else {})
            self._keep(name, parameter, kept, None if part is None else part.start)
            self._remembered += [*kept.values(), *([] if has_main else [trained.data])]
            if has_main:
                self._rounded.append((own, trained.data))
        self._copies: list[Tensor] | None = None

    def _keep(self, name: str, parameter: torch.nn.Parameter, kept: Mapping[str, Tensor], start: int | None) -> None:
        """Keep the tensors of a parameter by their names in a checkpoint. start: of parts; None: they are whole."""
        self._tensors[f"weights/{name}"] = parameter.data
        for kind, tensor in kept.items():
            if start is None or kind == "step":
                self._tensors[f"{kind}/{name}"] = tensor
            else:
                self._tensors[f"{kind}/{name}"] = FlatPart(shape=tuple(parameter.shape), start=start, values=tensor)

    def tensors(self) -> dict[str, Held]:
        """Return the live tensors by "weights/", "main/", "exp_avg/", "exp_avg_sq/" or "step/" and parameter name.

        After writing to them, call `written`. Weights are whole, the others this rank's parts under ZeRO-1.
        """
        for steps in self._group_steps:
            steps.read()
        return dict(self._tensors)

    def check_counts(self, numbers: Sequence[tuple[Tensor, float]]) -> None:
        """Check step counts before they are written.

        Args:
            numbers: tensors among those of `tensors()`, and what they are to hold.
        Raises: ConfigError: this optimizer cannot hold them.
        """
        coming = {id(tensor): int(number) for tensor, number in numbers}
        for steps in self._group_steps:
            counts = [coming[id(tensor)] for tensor in steps.tensors if id(tensor) in coming]
            if counts:
                one_count(counts)

    def written(self) -> None:
        """Make the optimizer continue from the values that were written to `tensors`.

        Raises: ConfigError: step counts that this optimizer cannot hold.
        """
        for steps in self._group_steps:
            steps.write()

    def forget(self) -> None:
        """Reset the state to that before the first step."""
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if name.partition("/")[0] in _STATES:
                    values_of(tensor).zero_()
        self.written()

    def remember(self) -> None:
        """Copy everything to host memory, so that a step of several updates can be undone.

        12 bytes per parameter of this rank (a master or a float32 parameter, two moments; a bfloat16 parameter is its
        master, rounded), allocated once; page-locked with a GPU, because only then copies are fast.
        """
        for steps in self._group_steps:
            steps.read()
        if self._copies is None:
            self._copies = host_like(self._remembered)
        # No wait: the copies are in the order of the GPU's stream, as everything that changes these tensors.
        torch._foreach_copy_(self._copies, self._remembered, non_blocking=True)

    def release_copies(self) -> None:
        """Free what `remember` has copied, until it copies again."""
        self._copies = None

    def restore(self) -> None:
        """Undo everything since `remember`."""
        if self._copies is None:
            raise RuntimeError("restore without remember")
        with torch.no_grad():
            torch._foreach_copy_(self._remembered, self._copies, non_blocking=True)
            for weights, main in self._rounded:
                weights.copy_(main)
        self.written()
        gather_again(self._chunks)

    def stepped(self) -> None:
        """Note that AdamW has stepped: with trainer.overlap_param_gather parameters are to be gathered."""
        gather_next(self._chunks)

    def gather(self) -> None:
        """Wait until parameters are whole (trainer.overlap_param_gather); every rank must call it.

        It ends whatever changes them, while they are in memory: a gather that is left to the next forward pass would
        find the reference policy in their place, and their own memory freed (trainer.offload).
        """
        finish_gathering(self._chunks)

    def masters_from_weights(self) -> None:
        """Copy loaded weights to the float32 masters of bfloat16 parameters."""
        with torch.no_grad():
            for weights, main in self._rounded:
                main.copy_(weights)


def _nothing(parameter: Tensor, *, has_main: bool) -> dict[str, Tensor]:
    """Make the state of a parameter of which this rank trains no part."""
    kinds = ("exp_avg", "exp_avg_sq", *(["main"] if has_main else []))
    return {kind: torch.empty(0, device=parameter.device) for kind in kinds} | {"step": torch.zeros(())}


def _states_by_parameter(optimizer: ChainedOptimizer) -> dict[Tensor, dict[str, Tensor]]:
    """Return AdamW's state by tensor, of all optimizers: mcore has a separate one for experts."""
    return {
        trained: part.optimizer.state[trained]
        for part in optimizer.chained_optimizers
        for group in part.optimizer.param_groups
        for trained in group["params"]
    }


def _groups_that_count(optimizer: ChainedOptimizer) -> list[dict[str, Any]]:
    """Return the parameter groups with a step count of their own: those of optimizers other than torch's."""
    return [
        group
        for part in optimizer.chained_optimizers
        if not isinstance(part.optimizer, torch.optim.Adam)
        for group in part.optimizer.param_groups
        if group["params"]
    ]


def _fill_in(state: dict[str, Tensor], trained: Tensor, *, counts: bool) -> Tensor:
    """Make AdamW's state, which AdamW makes at its first step, so that it can be saved and restored at any time.

    Args:
        counts: the optimizer keeps the parameter's step count in `state`.
    Returns: the tensor of the parameter's step count.
    """
    step = state.get("step", torch.zeros((), dtype=torch.float32, device=trained.device if counts else "cpu"))
    state.setdefault("exp_avg", torch.zeros_like(trained))
    state.setdefault("exp_avg_sq", torch.zeros_like(trained))
    if counts:
        state["step"] = step
    return step
