"""Measures one case: all methods in turn, each after a warm-up of its own."""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tools.bench_sync.methods.registry import BUSY, METHODS, WRITING
from tools.bench_sync.methods.session import Session, session
from tools.bench_sync.methods.stock import join_groups
from tools.bench_sync.processes.rig import running
from tools.bench_sync.report.figures import Samples, medians, more_ratios, ratios
from tools.bench_sync.shapes import Case
from weightsync.layouts.hf import hf_layout
from weightsync.model.spec import ModelSpec


async def measure(
    case: Case, model: Path, repetitions: int, bucket_mib: float, methods: Iterable[str]
) -> dict[str, Any]:
    """Measure a case.

    Args:
        model: model folder.
        repetitions: measured runs of each method.
        bucket_mib: largest message, in MiB.
        methods: names in METHODS.
    Returns: the case's entry in sync.json.
    Raises: RuntimeError: a method fails, or installs other weights than the others.
    """
    spec = ModelSpec.from_folder(model)
    before, start_s = os.getloadavg(), time.monotonic()
    async with running(model, case, int(bucket_mib * 2**20)) as rig, session(rig) as opened:
        try:
            await join_groups(opened)
            await _check_all(opened, [method for method in methods if method in WRITING])
            started, measured_s = os.getloadavg(), time.monotonic()
            samples = await _sample(opened, repetitions, list(methods))
        except Exception as error:
            raise RuntimeError(f"{case.name}: {error}\n{rig.post_mortem()}") from error
    conditions = {
        "load_average_before": list(before),
        "load_average_at_first_sample": list(started),
        "load_average_after": list(os.getloadavg()),
        "seconds": round(time.monotonic() - start_s, 1),
        "seconds_of_samples": round(time.monotonic() - measured_s, 1),
    }
    return conditions | _describe(samples, spec)


async def _check_all(opened: Session, methods: list[str]) -> None:
    """Run each method once over poisoned engines, and check that all install the same weights."""
    expected: list[dict[str, str]] | None = None
    for method in methods:
        await opened.poison()
        await METHODS[method](opened)
        found = await opened.checksums()
        expected = found if expected is None else expected
        if found != expected:
            names = [name for a, b in zip(found, expected, strict=True) for name in a if a[name] != b[name]]
            raise RuntimeError(f"{method} installs other weights than {methods[0]}: {', '.join(names[:5])}")


async def _sample(opened: Session, repetitions: int, methods: list[str]) -> Samples:
    samples: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
    for _ in range(repetitions):
        for method in methods:
            # Warm up the caches and links that another method has left cold.
            if method not in BUSY:
                await METHODS[method](opened)
            samples[method].append(await METHODS[method](opened))
    return samples


def _describe(samples: Samples, spec: ModelSpec) -> dict[str, Any]:
    layout = hf_layout(spec)
    parameters = sum(layout.elements_of(rank) for rank in range(layout.num_ranks))
    return {
        "parameters": parameters,
        "bytes": 2 * parameters,
        "repetitions": min(len(runs) for runs in samples.values()),
        "medians_s": medians(samples),
        "ratios": ratios(samples),
        "more_ratios": more_ratios(samples),
        "samples_s": {method: [_rounded(run) for run in runs] for method, runs in samples.items()},
    }


def _rounded(run: Mapping[str, float]) -> dict[str, float]:
    return {part: round(seconds, 6) for part, seconds in run.items()}


def merged(old: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Select the cases of an earlier sync.json, `old`, that are not measured again; `names` are."""
    with contextlib.suppress(KeyError):
        return {name: case for name, case in old["cases"].items() if name not in names}
    return {}
