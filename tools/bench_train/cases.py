"""Measures a model: all ways in turn, on samples of each kind of lengths, and how far their results agree."""

import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tools.bench_train.report.figures import Runs, ratios
from tools.bench_train.shapes import SHAPES, make_samples, step_flops
from tools.bench_train.workers.handle import Handle, running
from weightsync.model.spec import ModelSpec

Weights = Mapping[str, NDArray[np.float32]]
Agreement = dict[str, dict[str, float]]


async def measure(
    shape: str, lengths: Sequence[str], ways: Sequence[str], model: Path, *, repetitions: int, threads: int, trl: Path
) -> dict[str, dict[str, Any]]:
    """Measure a model.

    Args:
        model: its folder.
        repetitions: measured steps of each way and kind of lengths.
        threads: of a way.
        trl: interpreter of TRL's environment.
    Returns: the entries of train.json, by "shape, lengths".
    """
    out: dict[str, dict[str, Any]] = {}
    for some in SHAPES[shape].passes(ways):
        for name, found in (await _measure(shape, lengths, some, model, repetitions, threads, trl)).items():
            out[name] = _joined(out[name], found) if name in out else found
    return out


async def _measure(
    shape: str, lengths: Sequence[str], ways: Sequence[str], model: Path, repetitions: int, threads: int, trl: Path
) -> dict[str, dict[str, Any]]:
    """Measure ways whose processes are open at the same time."""
    out = {}
    async with running(ways, shape, model, threads, trl) as handles:
        for kind in lengths:
            start_s, before = time.monotonic(), os.getloadavg()
            first = {handle.name: await _step(handle, kind) for handle in handles}  # the warm-up
            agreement = await _agreement(handles, first, model)
            runs: Runs = {handle.name: [] for handle in handles}
            for _ in range(repetitions):
                for handle in handles:
                    runs[handle.name].append(await _step(handle, kind))
            conditions = {
                "load_average_before": list(before),
                "load_average_after": list(os.getloadavg()),
                "seconds": round(time.monotonic() - start_s, 1),
            }
            flops = step_flops(ModelSpec.from_folder(model), make_samples(SHAPES[shape], kind))
            out[f"{shape}, {kind}"] = (
                _describe(shape, kind, runs) | {"flops": flops} | {"agreement": agreement} | conditions
            )
    return out


def _joined(first: dict[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Add to an entry what a later pass measured: ways that it has already keep their figures, of their own pass."""
    out = dict(first)
    for key in ("medians_s", "tokens_per_s", "peak_mib", "rise_mib", "ratios", "agreement", "samples_s"):
        out[key] = first[key] | {way: value for way, value in second[key].items() if way not in first[key]}
    out["samples_s_apart"] = second["samples_s"]
    out["seconds"] = round(first["seconds"] + second["seconds"], 1)
    out["load_average_after"] = second["load_average_after"]
    return out


async def _step(handle: Handle, lengths: str) -> dict[str, float]:
    """Run a step. Returns: seconds of its slowest rank, memory of all together."""
    answers = await handle.call("step", lengths=lengths)
    found = {
        "seconds": max(answer["seconds"] for answer in answers),
        "peak_mib": sum(answer["peak_mib"] for answer in answers),
        "held_mib": sum(answer["held_mib"] for answer in answers),
    }
    return found | {name: answers[0][name] for name in ("loss", "flops_per_s") if answers[0].get(name) is not None}


async def _agreement(handles: Sequence[Handle], first: Mapping[str, Mapping[str, float]], model: Path) -> Agreement:
    """Compare loss and weights with those of `padded`, after the same steps from the same weights."""
    ours = [handle for handle in handles if handle.name.startswith("ours")]
    padded = [handle for handle in handles if handle.name == "padded"]
    if not padded:
        return {}
    before, theirs = load_file(model / "model.safetensors"), await _weights(padded[0])
    change = _largest_difference(theirs, before)
    return {
        handle.name: {
            "loss_difference": abs(first[handle.name]["loss"] - first["padded"]["loss"]),
            "weight_difference": _largest_difference(await _weights(handle), theirs),
            "largest_weight_change": change,
        }
        for handle in ours
    }


async def _weights(handle: Handle) -> Weights:
    """Return a way's weights, by their names in Hugging Face folders."""
    with tempfile.TemporaryDirectory(dir=handle.log.parent) as parent:
        folder = Path(parent) / "weights"  # ours replaces no folder that it has not written
        await handle.call("export", folder=str(folder))
        return load_file(folder / "model.safetensors")


def _largest_difference(weights: Weights, others: Weights) -> float:
    return max(float(np.abs(weights[name] - others[name]).max()) for name in others)


def _describe(shape: str, lengths: str, runs: Runs) -> dict[str, Any]:
    samples = make_samples(SHAPES[shape], lengths)
    tokens = int(samples.lengths.sum())
    medians = {way: median(run["seconds"] for run in of_way) for way, of_way in runs.items()}
    rates = [run["flops_per_s"] for run in runs.get("floor", [])]
    return {
        "parameters": SHAPES[shape].parameters(),
        "samples": len(samples),
        "tokens": tokens,
        "longest": int(samples.lengths.max()),
        "repetitions": min(map(len, runs.values())),
        "medians_s": {way: round(seconds, 6) for way, seconds in medians.items()},
        "tokens_per_s": {way: round(tokens / seconds, 1) for way, seconds in medians.items()},
        "peak_mib": {way: round(median(run["peak_mib"] for run in of_way), 1) for way, of_way in runs.items()},
        "rise_mib": {
            way: round(median(run["peak_mib"] - run["held_mib"] for run in of_way), 1) for way, of_way in runs.items()
        },
        "flops_per_s": round(median(rates)) if rates else None,
        "ratios": ratios(runs),
        "samples_s": {way: [round(run["seconds"], 6) for run in of_way] for way, of_way in runs.items()},
    }
