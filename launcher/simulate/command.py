"""`tandem simulate`: what a schedule would do, from a configuration and how fast its services are."""

import heapq
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.report import make_console, reporting
from launcher.simulate.plot import plot
from launcher.simulate.world import Figures, ServiceSpeeds, simulate
from servicekit.errors import ConfigError
from servicekit.lifecycle.exit_codes import EXIT_OK
from tandem_config.loading import load_config
from tandem_config.schema import ASYNC_DEFAULTS, RunConfig
from tandem_files.metrics_file import METRICS_FILE, MetricsFile
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.samples.folder import SampleFolder
from tandem_files.samples.schema import TRAIN

# Lengths that a formula is turned into.
_DRAWS = 20_000
# What --compare shows, besides the configuration's own schedule.
_COMPARED: Mapping[str, Mapping[str, Any]] = {
    "sync": {"kind": "sync"},
    "one_step_off": {"kind": "one_step_off"},
    "async, S=1": {"kind": "async", "max_staleness": 1},
    "async, S=2": {"kind": "async"},
    "async, S=4, depth 2": {"kind": "async", "max_staleness": 4, "depth": 2},
    "async, S=2, tokens older than 1 dropped": {"kind": "async", "stale": "drop", "max_token_age": 1},
}
_WITH_CORRECTION = "grpo.preset=decoupled"


@dataclass(frozen=True, kw_only=True)
class Given:
    """The options of the command. None: measured in `runs`, or a guess, which the output names."""

    runs: Sequence[Path]
    against: Path | None
    lengths: str | None
    slots: int | None
    step_ms: float | None
    row_ms: float | None
    train_s: float | None
    sync_s: float | None
    reward_s: float | None
    iterations: int
    compare: bool


@reporting(usage=(OSError,))
def simulate_command(config: Path, overrides: Sequence[str], given: Given, *, as_json: bool) -> int:
    """Run `tandem simulate`. Returns: the exit code."""
    own = load_config(config, overrides)
    speeds, remarks = speeds_of(own, given)
    named = {f"schedule.kind: {own.schedule.kind}": own}
    if given.compare:
        named |= {name: _with(config, overrides, schedule) for name, schedule in _COMPARED.items()}
    rows = [] if given.against is None else _steps_of(given.against, at_least=2)[1:]
    figures = [
        simulate(one, speeds, len(rows) or given.iterations, name, begins=bool(rows)) for name, one in named.items()
    ]
    measured = [_measured(f"measured in {given.against}", rows)] if rows else []
    console = make_console()
    plain = {name: value for name, value in asdict(speeds).items() if name != "lengths"}
    plain |= {"length_mean": float(speeds.lengths.mean()), "length_p99": float(np.quantile(speeds.lengths, 0.99))}
    if as_json:
        result = {
            "speeds": plain,
            "remarks": remarks,
            "schedules": [_finite(asdict(one)) for one in figures + measured],
        }
        console.file.write(json.dumps(result) + "\n")
        return EXIT_OK
    for line in remarks:
        console.print(line, style="dim", markup=False)
    console.print("  ".join(f"{name} {value:.4g}" for name, value in plain.items()), style="dim", markup=False)
    for line in (*_table(figures + measured), *plot(figures, console.width, ascii_only=console.options.ascii_only)):
        console.print(line, markup=False, highlight=False)
    return EXIT_OK


def _with(config: Path, overrides: Sequence[str], schedule: Mapping[str, Any]) -> RunConfig:
    """Read the configuration with another schedule, of which everything else is the default."""
    defaults = {"kind": "sync", "depth": 1, "max_staleness": 2, "window": 1.0, "stale": "mask", "max_token_age": "null"}
    changes = [f"schedule.{name}={value}" for name, value in {**defaults, **schedule}.items()]
    if schedule["kind"] != "sync":
        changes.append(_WITH_CORRECTION)
    if schedule["kind"] == "async":
        changes += [f"sync.{name}={value}" for name, value in ASYNC_DEFAULTS["sync"].items()]
    return load_config(config, [*overrides, *changes])


def speeds_of(config: RunConfig, given: Given) -> tuple[ServiceSpeeds, list[str]]:
    """Return how fast the services are, by options, else as a run was, else by guesses; and sentences about the latter.

    Raises: ConfigError: an option or the run cannot be used.
    """
    measured, remarks = measured_in(given.runs) if given.runs else ({}, [])
    lengths = None if given.lengths is None else read_lengths(given.lengths)
    lengths = measured.pop("lengths", None) if lengths is None else lengths
    if lengths is None:
        raise ConfigError("give the lengths of completions: --run RUN_DIR of a run that stored samples, or --lengths")
    slots = given.slots or config.rollout.max_running_requests
    guessed = {"step_s": 0.01, "row_s": 1e-4, "sync_s": 1.0, "reward_s": 0.0}
    options = {"step_s": given.step_ms, "row_s": given.row_ms}
    values = {name: value / 1e3 for name, value in options.items() if value is not None}
    values |= {name: value for name in ("train_s", "sync_s", "reward_s") if (value := getattr(given, name)) is not None}
    values = {**guessed, **measured, **values}
    remarks += [
        f"guessed: {name} {value:g}"
        for name, value in guessed.items()
        if name not in measured and values[name] == value
    ]
    if "train_s" not in values:
        batch = config.grpo.prompts_per_iteration * config.grpo.group_size
        mean = np.minimum(lengths, config.grpo.max_new_tokens).mean()
        step_s = values["step_s"] + slots * values["row_s"]
        values["train_s"] = float(batch * mean * step_s / (slots * config.rollout.replicas))
        remarks.append(f"guessed: train_s {values['train_s']:.4g}, as long as the engines need with all slots busy")
    if not all(map(math.isfinite, values.values())) or values["step_s"] + values["row_s"] <= 0:
        shown = ", ".join(f"{name} {value:g}" for name, value in values.items())
        raise ConfigError(f"{shown}: need finite seconds, and a step that takes some (--step-ms, --row-ms)")
    return ServiceSpeeds(slots=slots, lengths=lengths, **values), remarks


def read_lengths(given: str) -> NDArray[np.int64]:
    """Read a file of lengths, one a line, or draw from `lognormal:MEDIAN,P99[,MOST]` or `constant:N`.

    Raises: ConfigError: it is neither.
    """
    kind, _, numbers = given.partition(":")
    try:
        if kind in ("lognormal", "constant"):
            values = [float(number) for number in numbers.split(",")]
            if not all(math.isfinite(value) and value >= 1 for value in values):
                raise ValueError("lengths are numbers of tokens from 1 on")
            middle, p99, most = [*values, *values[:1], math.inf][:3] if len(values) < 3 else values[:3]
            spread = max(0.0, math.log(p99 / middle) / 2.3263) if kind == "lognormal" else 0.0
            drawn = middle * np.exp(spread * np.random.default_rng(0).standard_normal(_DRAWS))
            return np.clip(drawn, 1, min(most, 2**31)).astype(np.int64)
        lengths = np.array([int(line) for line in Path(given).read_text().split()], np.int64)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"--lengths {given}: no file of whole numbers, and not lognormal:MEDIAN,P99[,MOST] or constant:N ({error})"
        ) from error
    if not lengths.size or lengths.min() < 1:
        raise ConfigError(f"--lengths {given}: needs lengths of at least one token")
    return lengths


def measured_in(runs: Sequence[Path]) -> tuple[dict[str, Any], list[str]]:
    """Return how fast the services of runs were, all together. Raises: ConfigError: one of them does not say."""
    seconds: dict[str, list[float]] = {"train_s": [], "sync_s": [], "reward_s": []}
    lengths: list[NDArray[np.int64]] = []
    table: list[NDArray[np.float64]] = []
    for run_dir in runs:
        rows = _steps_of(run_dir)
        ran, by_iteration = _config_of(run_dir), _lengths_of(run_dir)
        for row in rows[1:] or rows:
            compute_s, others = row["trainer_compute_s"], ("reward_s", "batch_s", "train_s")
            seconds["train_s"].append(compute_s)
            seconds["sync_s"].append(row.get("sync_s") or 0.0)
            seconds["reward_s"].append(max(0.0, sum(row.get(name) or 0.0 for name in others) - compute_s))
        lengths += by_iteration.values()
        if ran.schedule.kind != "async":  # each batch begins with idle slots
            table += _engine_table(
                rows[1:] or rows, by_iteration, ran.rollout.replicas, ran.rollout.max_running_requests
            )
    measured: dict[str, Any] = {name: median(values) for name, values in seconds.items()}
    measured["train_s"] = fmean(seconds["train_s"])  # it depends on the lengths of the batch, so no median
    names = ", ".join(map(str, runs))
    if not lengths:
        return measured, [f"{names} has no stored samples: its engines' speeds and lengths are not known"]
    measured["lengths"] = np.concatenate(lengths)
    if not table:
        return measured, [f"{names} has schedule.kind async: its engines' speeds are not known"]
    return measured | _engine_fit(np.concatenate(table)), []


def _steps_of(run_dir: Path, *, at_least: int = 1) -> list[dict[str, Any]]:
    rows = MetricsFile(run_dir / METRICS_FILE).rows()
    steps = [
        row for row in rows if row.get("iteration") and row.get("trainer_compute_s") and row.get("generated_tokens")
    ]
    if len(steps) < at_least:
        raise ConfigError(
            f"{run_dir}: has {len(steps) or 'no'} finished iterations with a train step; {at_least} needed"
        )
    return steps


def _config_of(run_dir: Path) -> RunConfig:
    import yaml

    try:
        return RunConfig.model_validate(yaml.safe_load((run_dir / RESOLVED_CONFIG).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run_dir / RESOLVED_CONFIG} cannot be read: {error}") from error


def _lengths_of(run_dir: Path) -> dict[int, NDArray[np.int64]]:
    folder, found = SampleFolder(run_dir), {}
    for iteration in [iteration for iteration, kinds in folder.iterations().items() if TRAIN in kinds]:
        found[iteration] = np.array([sample.num_tokens for sample in folder.heads(iteration, TRAIN)], np.int64)
    return found


def _whole_s(row: Mapping[str, Any]) -> float:
    """Return the seconds of an iteration without evaluation, checkpoint and report: what idle shares are shares of."""
    return float(row["trainer_compute_s"] / (1.0 - row["trainer_idle_ratio"]))


def _measured(name: str, rows: Sequence[Mapping[str, Any]]) -> Figures:
    """Return the figures of a run's iterations, as those of a simulation."""
    whole_s = np.array([_whole_s(row) for row in rows])
    compute_s, idle, tokens, ages, masked, ratios = (
        np.array([row.get(column) or instead for row in rows], np.float64)
        for column, instead in (
            ("trainer_compute_s", 0.0),
            ("rollout_idle_ratio", 0.0),
            ("generated_tokens", 0.0),
            ("token_age_mean", 0.0),
            ("masked_tokens", 0.0),
            ("trained_length_ratio", 1.0),
        )
    )
    return Figures(
        schedule=name,
        iteration_s=float(whole_s.mean()),
        trainer_idle=1.0 - float(compute_s.sum() / whole_s.sum()),
        slots_idle=float(idle @ whole_s / whole_s.sum()),
        age_mean=float(ages @ tokens / tokens.sum()),
        age_max=max(int(row.get("staleness_max") or 0) for row in rows),
        wasted=float(masked.sum() / tokens.sum()),
        length_ratio=float(ratios.mean()),
        beat_s=0.0,
        trainer_busy=(),
        slots_busy=(),
    )


def _engine_table(
    rows: Sequence[Mapping[str, Any]], lengths: Mapping[int, NDArray[np.int64]], replicas: int, slots: int
) -> list[NDArray[np.float64]]:
    """Return steps, rows, tokens in the KV cache and seconds of each generation, and of a replica.

    In a second table the same are weighted by the rows of a step, so that seconds are those of busy slots. That tells
    the cost of a step from that of its rows where lengths vary little. Both tables are shares of their mean seconds.
    """
    generated, busy = [], []
    for row in rows:
        if (found := lengths.get(row["iteration"])) is None:
            continue
        steps, weighted = _queued(found, slots * replicas, replicas)
        generated.append((*steps, row["engine_s"]))
        if row.get("rollout_idle_ratio"):
            busy.append((*weighted, (1.0 - row["rollout_idle_ratio"]) * slots * replicas * _whole_s(row)))
    tables = [np.array(table, np.float64) for table in (generated, busy) if table]
    return [table / table[:, 3].mean() for table in tables]


def _engine_fit(table: NDArray[np.float64]) -> dict[str, float]:
    """Fit seconds of a step, of each row and of each token in the KV cache to `_engine_table`; none is below 0.

    A step in which completions begin takes as long as one without rows.
    """
    known, seconds = table[:, :3], table[:, 3]
    fits = []
    for columns in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        fit = np.zeros(3)
        fit[columns] = np.linalg.lstsq(known[:, columns], seconds, rcond=None)[0]
        fits += [fit] if (fit >= 0).all() else []
    step_s, row_s, kv_s = min(fits, key=lambda fit: float(((known @ fit - seconds) ** 2).sum())).tolist()
    return {"step_s": step_s, "row_s": row_s, "kv_s": kv_s, "prefill_s": step_s}


def _queued(lengths: NDArray[np.int64], slots: int, replicas: int) -> NDArray[np.float64]:
    """Return steps, rows and tokens in the KV cache of a replica until all have run, and the same by rows of all."""
    ends = [0] * slots
    begun: Counter[int] = Counter()
    ended: dict[int, list[int]] = {}
    for length in lengths.tolist():
        begin = heapq.heapreplace(ends, ends[0] + length)
        begun[begin] += 1
        ended.setdefault(begin + length, []).append(length)
    found, rows, tokens = np.zeros((2, 3)), 0, 0
    times = sorted({*begun, *ended})
    for time, until in pairwise(times):
        rows += begun[time] - len(ended.get(time, ()))
        tokens -= sum(ended.get(time, ()))
        steps = until - time
        prefills = 1.0 - (1.0 - 1.0 / replicas) ** begun[time]  # of a replica
        kv_tokens = steps * tokens + rows * steps * (steps - 1) / 2
        one = np.array([steps + prefills, steps * rows / replicas, kv_tokens / replicas])
        found += np.outer((1, rows), one)
        tokens += steps * rows
    return found


def _finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def _table(figures: Sequence[Figures]) -> Iterator[str]:
    """Yield the lines of a table."""
    width = max(len(one.schedule) for one in figures)
    yield f"{'schedule':{width}}  iteration s  trainer idle  slots idle  age mean  max  not trained  trained length"
    for one in figures:
        yield (
            f"{one.schedule:{width}}  {one.iteration_s:11.3f}  {one.trainer_idle:12.2f}  {one.slots_idle:10.2f}  "
            f"{one.age_mean:8.2f}  {one.age_max:3}  {one.wasted:11.1%}  {one.length_ratio:14.2f}"
        )
