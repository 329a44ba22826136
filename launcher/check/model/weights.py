"""Checks that a model folder's safetensors files are complete and hold numbers, in the tensors of its config.json."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from tandem_config.problems import ConfigProblem, problem
from tandem_files.model.safetensors_header import TRAINABLE, DamagedFile, TensorInfo, read_header
from weightsync.families.decoder import EMBEDDING, LM_HEAD
from weightsync.layouts.hf import hf_layout
from weightsync.model.config import UntiedHead
from weightsync.model.spec import ModelSpec

_INDEX = "model.safetensors.index.json"
_COMPARED_BYTES = 2**24
_SHOWN = 3
# Size and number of the blocks of a tensor that are searched for values that are no numbers.
_BLOCK_BYTES = 2**16
_BLOCKS = 4
# By type: unsigned integers of its size, and the exponent, all of whose bits are set in infinity and NaN.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}


def check_weights(folder: Path, spec: ModelSpec) -> list[ConfigProblem]:
    """Return what is wrong with the files and their tensors; if nothing is, what is wrong with the values."""
    return list(_check_files(folder, spec)) or list(_check_values(folder, spec))


def _check_files(folder: Path, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """Report missing, truncated and corrupt files, and tensors that are missing or have a wrong shape or type."""
    files = sorted(folder.glob("*.safetensors"))
    index = folder / _INDEX
    weight_map: dict[str, str] = {}
    if index.is_file():
        try:
            weight_map = _read_index(index)
        except ValueError as error:
            yield problem("model.path", index, f"is not a valid index: {error}", "download the model again")
            return
        yield from _missing_shards(folder, weight_map)
        files = sorted({folder / name for name in weight_map.values() if (folder / name).is_file()})
    elif not files:
        yield problem("model.path", folder, "has no *.safetensors file", _conversion_hint(folder))
        return
    tensors: dict[str, TensorInfo] = {}
    homes: dict[str, Path] = {}
    damaged = False
    for file in files:
        try:
            header = read_header(file)
            tensors.update(header)
            homes.update(dict.fromkeys(header, file))
        except (DamagedFile, OSError) as error:
            damaged = True
            yield problem("model.path", file, str(error), "download or copy the file again")
    unread = {name for name, file in weight_map.items() if not (folder / file).is_file()}
    # The tensors of a damaged or missing file are not reported a second time.
    if not damaged:
        yield from _check_tensors(folder, spec, tensors, unread)
        if spec.tied and {EMBEDDING, LM_HEAD} <= homes.keys():
            yield from _check_tied(folder, [(homes[name], tensors[name]) for name in (EMBEDDING, LM_HEAD)])


def _read_index(index: Path) -> dict[str, str]:
    weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("no weight_map")
    if any(Path(name).name != name for name in weight_map.values()):
        raise ValueError("weight_map names files outside the folder")
    return {str(name): str(file) for name, file in weight_map.items()}


def _missing_shards(folder: Path, weight_map: dict[str, str]) -> Iterator[ConfigProblem]:
    for name in sorted(set(weight_map.values())):
        if not (folder / name).is_file():
            count = sum(1 for file in weight_map.values() if file == name)
            message = f"is missing; {_INDEX} says that it holds {count} tensors"
            yield problem("model.path", folder / name, message, "download the missing file")


def _check_tensors(
    folder: Path, spec: ModelSpec, found: dict[str, TensorInfo], unread: set[str]
) -> Iterator[ConfigProblem]:
    layout = hf_layout(spec)
    expected = dict(zip(layout.params, layout.param_shapes, strict=True))
    missing = [name for name in expected if name not in found and name not in unread]
    if missing:
        yield problem(
            "model.path",
            folder,
            f"{_listed('tensor', missing)} not in any file",
            "config.json and weights do not belong together",
        )
    wrong = [name for name in expected if name in found and found[name].shape != expected[name]]
    if wrong:
        first = f"{wrong[0]} is {list(found[wrong[0]].shape)}, config.json implies {list(expected[wrong[0]])}"
        more = f" (and {len(wrong) - 1} more tensors)" if len(wrong) > 1 else ""
        yield problem("model.path", folder, f"{first}{more}", "config.json and weights do not belong together")
    odd = [name for name in expected if name in found and found[name].dtype not in TRAINABLE]
    if odd:
        kind = found[odd[0]].dtype
        yield problem(
            "model.path",
            folder,
            f"{_listed('tensor', odd)} of type {kind}",
            f"quantized weights cannot be trained; use {TRAINABLE}",
        )


def _check_tied(folder: Path, tensors: list[tuple[Path, TensorInfo]]) -> Iterator[ConfigProblem]:
    """Compare the bytes of embedding and head. Tensors of two types are left to the trainer, which compares values."""
    (_, embedding), (_, head) = tensors
    if embedding.dtype != head.dtype:
        return
    first, second = (
        np.memmap(file, np.uint8, "r", offset=info.begin, shape=info.end - info.begin) for file, info in tensors
    )
    cuts = range(0, max(len(first), len(second)), _COMPARED_BYTES)
    if not all(np.array_equal(first[cut : cut + _COMPARED_BYTES], second[cut : cut + _COMPARED_BYTES]) for cut in cuts):
        untied = UntiedHead()
        yield problem("model.path", folder, untied.problem, untied.advice)


def _check_values(folder: Path, spec: ModelSpec) -> Iterator[ConfigProblem]:
    """Report tensors with NaN or infinity, which a diverged training leaves. The files must be complete.

    Of large tensors a few blocks are read, so that a model of hundreds of gigabytes takes seconds.
    """
    wanted = set(hf_layout(spec).params)
    bad: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        tensors = {name: info for name, info in read_header(path).items() if name in wanted}
        with path.open("rb") as file:
            bad += [name for name, info in tensors.items() if not _is_finite(file, info)]
    if bad:
        advice = "use an earlier checkpoint of the model, or download it again: no log-prob of it is a number"
        yield problem("model.path", folder, f"holds NaN or infinity, in {_shown(bad)}", advice)


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


def _listed(noun: str, names: list[str]) -> str:
    return f"{noun}{'s' if len(names) > 1 else ''} {_shown(names)}"


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _conversion_hint(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin")):
        return (
            "pickled .bin weights are not read; load and save the model once with transformers, safe_serialization=True"
        )
    return "the folder must hold model.safetensors, or the shards that an index names"
