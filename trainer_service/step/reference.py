"""The reference policy: a copy of this rank's shard in host memory, which is computed with in the parameters' place.

The modules are those of the policy, so a reference costs a device nothing while it is not measured. While it is, it
costs one more shard of weights, when there are neither gradients nor activations to keep. The policy's own tensors are
put aside by reference and put back: no bit of them is written, nor of the optimizer's masters and moments.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from servicekit.errors import ConfigError
from tandem_config.schema import RunConfig
from trainer_service.host_memory import host_like
from trainer_service.step.offload import EngineState, Offload
from weightsync.layouts.layout import Layout
from weightsync.model.spec import ModelSpec
from weightsync.transfer.hf_files import load_shards

# Prefix of its values in a checkpoint.
REFERENCE = "reference/"


class ReferencePolicy:
    """Other values for the parameters of this rank.

    Args:
        parameters: of the policy, by name.
        offload: with the policy's parameters, where the host is the device, the reference's are offloaded too.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], offload: Offload) -> None:
        self._parameters, self._offload = parameters, offload
        values = host_like(parameter.data for parameter in parameters.values())
        # zeros: padding of the vocabulary is in no file
        self._values = {name: value.zero_() for name, value in zip(parameters, values, strict=True)}
        on_host = all(parameter.device.type == "cpu" for parameter in parameters.values())
        if EngineState.PARAMETERS in offload and on_host:
            offload.add(EngineState.REFERENCE, self._values.values())

    def load(self, folder: Path, spec: ModelSpec, layout: Layout) -> None:
        """Load this rank's slices of a Hugging Face folder. Raises: ConfigError: as load_shards."""
        with self._offload.use(EngineState.REFERENCE):
            load_shards(folder, spec, layout, dist.get_rank(), self._values)

    def take(self) -> None:
        """Make the present policy the reference; its parameters must be in memory."""
        with self._offload.use(EngineState.REFERENCE), torch.no_grad():
            for name, value in self._values.items():
                value.copy_(self._parameters[name])

    def tensors(self) -> dict[str, Tensor]:
        """Return the live values by their names in a checkpoint (of EngineState.REFERENCE)."""
        return {f"{REFERENCE}{name}": value for name, value in self._values.items()}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model compute the reference policy inside of a `with` block; the policy may be offloaded."""
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        with self._offload.use(EngineState.REFERENCE, changes=False):
            try:
                for name, parameter in self._parameters.items():
                    # no copy where the host is the device
                    parameter.data = self._values[name].to(parameter.device, non_blocking=True)
                yield
            finally:
                for name, parameter in self._parameters.items():
                    parameter.data = own[name]


def check_reference(config: RunConfig, spec: ModelSpec) -> None:
    """Check, before anything is built, that the reference can take the policy's place. Raises: ConfigError."""
    folder = config.grpo.reference_path
    if config.grpo.kl_coefficient == 0 or folder is None:
        return
    different = ModelSpec.from_folder(folder).differences(spec)
    if different:
        raise ConfigError(
            f"grpo.reference_path {folder} is a model of another shape than model.path {config.model.path}: "
            f"{'; '.join(different)}"
        )
