"""The folder `profile/` of a run: `step-000002/rank-000.json` (the table) and `rank-000.trace.json.gz` (the trace)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from tandem_files.atomic import write_json_atomic

FOLDER = "profile"


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What a rank spent time on.

    Attributes:
        seconds: without those of the operators that it calls.
    """

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RankProfile:
    """A train step of a rank; seconds are wall seconds, profiling included.

    Those from `compute_s` to `idle_s`, and the operators', are of what was recorded.

    Attributes:
        step: number of the step in the run, from 1.
        timeline: the device's name, "cuda" (its kernels) or "cpu" (the host's operators).
        recorded_s: seconds of the step that were recorded: the first micro-batches of each part, and a last one.
        compute_s: seconds in which something was computed.
        communication_s: seconds in which a collective or a message was under way.
        exposed_s: those of them in which nothing was computed.
        idle_s: seconds with neither: Python, dispatch, waiting for another rank outside a collective.
        parts: seconds by part of the step (pack, old_logprobs, ...).
        operators: those that took most, longest first.
    """

    step: int
    rank: int
    world_size: int
    timeline: str
    seconds: float
    recorded_s: float
    compute_s: float
    communication_s: float
    exposed_s: float
    idle_s: float
    parts: Mapping[str, float]
    operators: tuple[Operator, ...]


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of a step's profiles."""
    return run_dir / FOLDER / f"step-{step:06d}"


def trace_path(run_dir: Path, step: int, rank: int) -> Path:
    """Return the file of a rank's trace, for chrome://tracing and Perfetto."""
    return step_folder(run_dir, step) / f"rank-{rank:03d}.trace.json.gz"


def table_path(run_dir: Path, step: int, rank: int) -> Path:
    """Return the file of a rank's table."""
    return step_folder(run_dir, step) / f"rank-{rank:03d}.json"


def write_profile(run_dir: Path, profile: RankProfile) -> None:
    """Write a rank's table; the step's folder must exist. Raises: OSError."""
    write_json_atomic(table_path(run_dir, profile.step, profile.rank), asdict(profile), durable=False)


def read_profiles(run_dir: Path) -> list[RankProfile]:
    """Read all tables of a run, by step and rank. Raises: ConfigError: a file is not one that `write_profile` wrote."""
    return [_read(path) for path in sorted((run_dir / FOLDER).glob("step-*/rank-*[0-9].json"))]


def _read(path: Path) -> RankProfile:
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        fields.setdefault("recorded_s", fields["seconds"])  # older releases recorded all of it
        operators = tuple(Operator(**entry) for entry in fields.pop("operators"))
        return RankProfile(**fields, operators=operators)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is no table of a profiled step ({error}); remove it") from None
