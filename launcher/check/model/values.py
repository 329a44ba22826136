"""Looks for values that are not numbers in a model's tensors: a diverged training leaves them, and a run fails late.

Large tensors are sampled: a few blocks of each, so that a model of hundreds of gigabytes takes seconds.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tandem_config.problems import ConfigProblem
from tandem_files.model.safetensors_header import TensorInfo, read_header
from weightsync.layouts.hf import hf_layout
from weightsync.model.spec import ModelSpec

_BLOCK_BYTES = 2**16
_BLOCKS = 4
_SHOWN = 3
# By type: unsigned integers of its size, and the exponent, all of whose bits are set in infinity and NaN.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}


def check_values(folder: Path, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """Report tensors with NaN or infinity. The files must have passed check_weights."""
    wanted = set(hf_layout(spec).params)
    bad: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        tensors = {name: info for name, info in read_header(path).items() if name in wanted}
        with path.open("rb") as file:
            bad += [name for name, info in tensors.items() if not _is_finite(file, info)]
    if bad:
        more = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        yield ConfigProblem(
            key="model.path",
            value=str(folder),
            message=f"holds NaN or infinity, in {', '.join(bad[:_SHOWN])}{more}",
            suggestion="use an earlier checkpoint of the model, or download it again: no log-prob of it is a number",
        )


def _is_finite(file: BinaryIO, info: TensorInfo) -> bool:
    """Whether all values of a tensor, or of the blocks of a large one, are finite."""
    if info.dtype not in _EXPONENTS:
        return True
    kind, exponent = _EXPONENTS[info.dtype]
    size = info.end - info.begin
    step = max(_BLOCK_BYTES, size // _BLOCKS // _BLOCK_BYTES * _BLOCK_BYTES)
    for offset in range(0, size, step):
        file.seek(info.begin + offset)
        values = np.frombuffer(file.read(min(_BLOCK_BYTES, size - offset)), kind)
        if ((values & exponent) == exponent).any():
            return False
    return True
