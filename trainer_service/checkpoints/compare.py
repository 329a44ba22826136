"""Compares a policy with a Hugging Face folder: names, shapes, and how far the numbers are apart."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from servicekit.errors import ConfigError
from weightsync.families.decoder import EMBEDDING, LM_HEAD

_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        faults: tensors that only one side has, or that have two shapes, as text.
        num_tensors: tensors that were compared.
        num_equal: of these, bitwise equal ones.
        largest: the largest absolute difference, computed in float32; `where`: its tensor, "" if there is none.
        unlike_nan: tensors that have a NaN where the other side has a number; `largest` is of their other elements.
    """

    faults: list[str]
    num_tensors: int
    num_equal: int
    largest: float
    where: str
    unlike_nan: list[str]

    def is_within(self, tolerance: float) -> bool:
        """Whether both have the same tensors, and no two numbers are further apart than `tolerance`."""
        return not self.faults and not self.unlike_nan and self.largest <= tolerance

    def __str__(self) -> str:
        """Describe it in a sentence."""
        if self.faults:
            return f"other tensors: {_some(self.faults, '; ')}"
        if self.num_equal == self.num_tensors:
            return f"{self.num_tensors} tensors, all bitwise equal"
        place = f", in {self.where}" if self.where else ""
        nan = f"; NaN on one side only in {_some(self.unlike_nan, ', ')}" if self.unlike_nan else ""
        return (
            f"{self.num_tensors} tensors with the same names and shapes, {self.num_equal} bitwise equal; the largest "
            f"absolute difference is {self.largest:.3g}{place}{nan}"
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
        unlike_nan: list[str] = []
        both = [name for name in ours if name in theirs]
        for name in both:
            mine, other = policy[ours[name]], theirs[name].get_tensor(name)
            if mine.shape != other.shape:
                faults.append(f"{name} has shape {list(mine.shape)}, {list(other.shape)} in {reference}")
                continue
            num_equal += int(_same_bytes(mine, other))
            apart, same_nan = _apart(mine.float(), other.float())
            if not same_nan:
                unlike_nan.append(name)
            if apart > largest:
                largest, where = apart, name
    return Comparison(
        faults=faults,
        num_tensors=len(both),
        num_equal=num_equal,
        largest=largest,
        where=where,
        unlike_nan=unlike_nan,
    )


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape are bitwise equal: NaN equals NaN, and 0.0 not -0.0."""
    if one.dtype != other.dtype:
        return False
    first, second = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(first, second))


def _apart(one: torch.Tensor, other: torch.Tensor) -> tuple[float, bool]:
    """Return the largest absolute difference, NaN aside, and whether both have NaN at the same places."""
    nan, other_nan = one.isnan(), other.isnan()
    # infinity equals itself, and their difference is NaN
    apart = (one - other).abs().masked_fill_((one == other) | nan | other_nan, 0.0)
    return float(apart.max()) if apart.numel() else 0.0, torch.equal(nan, other_nan)


def _some(texts: list[str], separator: str) -> str:
    """Join the first few of a list, and say how many more there are."""
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return f"{separator.join(texts[:_SHOWN])}{more}"


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
