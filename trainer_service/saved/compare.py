"""Compares a policy with a Hugging Face folder: names, shapes, and how far the numbers are apart."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from servicekit.errors import ConfigError
from weightsync.model.mapping import EMBEDDING, LM_HEAD

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        faults: tensors that only one side has, or that have two shapes, as text.
        num_tensors: tensors that were compared.
        num_equal: of these, bitwise equal ones.
        largest: the largest absolute difference, computed in float32; `where`: its tensor, "" if all are equal.
    """

    faults: list[str]
    num_tensors: int
    num_equal: int
    largest: float
    where: str

    def __str__(self) -> str:
        """Describe it in a sentence."""
        if self.faults:
            more = f" and {len(self.faults) - _SHOWN} more" if len(self.faults) > _SHOWN else ""
            return f"other tensors: {'; '.join(self.faults[:_SHOWN])}{more}"
        if self.num_equal == self.num_tensors:
            return f"{self.num_tensors} tensors, all bitwise equal"
        return (
            f"{self.num_tensors} tensors with the same names and shapes, {self.num_equal} bitwise equal; the largest "
            f"absolute difference is {self.largest:.3g}, in {self.where}"
        )


def compare(policy: Mapping[str, torch.Tensor], reference: Path) -> Comparison:
    """Compare tensor by tensor; two are in memory at a time.

    Args:
        policy: canonical tensors; a tied model has no output layer, and the reference may have it.
    Raises: ConfigError: the reference has no safetensors files, or one cannot be read.
    """
    with ExitStack() as stack:
        theirs = _open(reference, stack)
        ours = {name: name for name in policy}
        if LM_HEAD in theirs and LM_HEAD not in ours:
            ours[LM_HEAD] = EMBEDDING
        faults = [f"{name} is not in {reference}" for name in ours if name not in theirs]
        faults += [f"{name} is in {reference} only" for name in sorted(theirs) if name not in ours]
        largest, where, num_equal = 0.0, "", 0
        both = [name for name in ours if name in theirs]
        for name in both:
            mine, other = policy[ours[name]], theirs[name].get_tensor(name)
            if mine.shape != other.shape:
                faults.append(f"{name} has shape {list(mine.shape)}, {list(other.shape)} in {reference}")
                continue
            num_equal += int(mine.dtype == other.dtype and torch.equal(mine, other))
            apart = float((mine.float() - other.float()).abs().max())
            if not apart <= largest:  # a NaN is the largest
                largest, where = apart, name
    return Comparison(faults=faults, num_tensors=len(both), num_equal=num_equal, largest=largest, where=where)


def _open(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the open file of each tensor of a folder, by name."""
    files: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        files |= dict.fromkeys(set(file.keys()), file)
    if not files:
        raise ConfigError(f"{folder} has no *.safetensors file to compare with")
    return files
