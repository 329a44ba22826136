"""Experts whose parameters have the names of TransformerEngine's grouped product, computed by mcore's without it.

`linear_fc1.weight7` takes the place of `local_experts.7.linear_fc1.weight`.
"""

from typing import Any

import torch

from trainer_service.megatron_engine import layer_spec


def install() -> None:
    """Let the layers that this process builds from now on have such experts."""
    make = layer_spec._torch_layer

    def with_grouped_names(config: Any, num_experts: int | None) -> Any:
        spec = make(config, num_experts)
        if num_experts is not None:
            experts = spec.submodules.mlp.submodules.experts
            experts.module = _grouped(experts.module)
        return spec

    layer_spec._torch_layer = with_grouped_names


def _grouped(base: Any) -> type[torch.nn.Module]:
    """Make the class. base: mcore's SequentialMLP."""

    class GroupedNames(base):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            experts = list(self.local_experts)
            del self.local_experts
            self.__dict__["local_experts"] = experts  # computed with, but no submodules
            for layer in ("linear_fc1", "linear_fc2"):
                grouped = torch.nn.Module()
                for number, expert in enumerate(experts):
                    grouped.register_parameter(f"weight{number}", getattr(expert, layer).weight)
                self.add_module(layer, grouped)

    return GroupedNames
