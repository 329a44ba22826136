"""`tandem status`: the answer of a running run's coordinator, else the contents of the run's folder.

The coordinator's address is in the launcher's notes or, where the services' variables are set (in a pod, a container),
in the registry.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path

from launcher.view.evaluation import describe_evaluation, is_evaluation
from launcher.view.summary import rewards_text, summary_lines
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError, TandemError, rpc_errors
from servicekit.redis.records import COORDINATOR, Failure
from servicekit.redis.registry import Registry
from servicekit.rpc.channel import open_channel
from servicekit.security.tls import operator_identity
from tandem_api.coordinator.v1 import coordinator_pb2 as pb
from tandem_api.coordinator.v1 import coordinator_pb2_grpc as pb_grpc
from tandem_files.checkpoints import newest_iteration
from tandem_files.ledger.life import cost, read_life
from tandem_files.metrics_file import Heldout, Row
from tandem_files.metrics_table import ACCURACY, METRICS
from tandem_files.run_config import RESOLVED_CONFIG
from tandem_files.run_folder import (
    is_locked,
    metrics_rows,
    noted_troubles,
    read_notes,
    read_state,
    read_summary,
    read_token,
)

_ANSWER_S = 10.0
_LIFE_SHOWN = 10
_RUN_DIR = "TANDEM_RUN_DIR"


def newest_run(output_dir: Path) -> Path:
    """Find the run folder in `output_dir` that was written to last; an evaluation's only where no run has trained.

    Raises: ConfigError: there is none.
    """
    runs = [file.parent for file in output_dir.glob(f"*/{RESOLVED_CONFIG}")]
    if not runs:
        raise ConfigError(f"no runs in {output_dir}; give a run's folder, e.g. `tandem status runs/arithmetic`")
    trained = [run for run in runs if not is_evaluation(run)]
    return max(trained or runs, key=lambda run: max(path.stat().st_mtime for path in (run, *run.glob("*.json*"))))


def current_run(environ: Mapping[str, str] = os.environ) -> Path:
    """Find the run to show by default: that of TANDEM_RUN_DIR, else the newest in ./runs.

    Raises: ConfigError: there is none.
    """
    own = environ.get(_RUN_DIR, "")
    return Path(own) if own else newest_run(Path("runs"))


def find_coordinator(run_dir: Path, environ: Mapping[str, str] = os.environ) -> tuple[str, str, list[Failure]]:
    """Find the run's coordinator.

    Returns: its address, empty if none runs; the state of the run without its answer; failures that services reported.
    Raises: ConfigError: the folder is not a run's, or the environment is not a service's.
    """
    if (own := environ.get(_RUN_DIR, "")) and Path(own).absolute() == run_dir.absolute():
        return _announced(ServiceEnvironment.from_env(environ))
    if not (run_dir / RESOLVED_CONFIG).is_file():
        raise ConfigError(f"{run_dir} is not a run's folder: it has no {RESOLVED_CONFIG}")
    running, notes = is_locked(run_dir), read_notes(run_dir)
    address = notes.coordinator if notes is not None and running else ""
    return address, "running" if running else "not running", []


def describe(run_dir: Path, environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Describe the run as (name, text) pairs. Raises: ConfigError: as find_coordinator."""
    address, state, failures = find_coordinator(run_dir, environ)
    if is_evaluation(run_dir):
        return describe_evaluation(run_dir)
    answer = asyncio.run(ask_coordinator(address, read_token(run_dir))) if address else [("state", state)]
    if not address and (words := last_outcome(run_dir)):
        answer.append(("ended", words))
    lines = [("run", str(run_dir)), *answer, *(("failed", str(failure)) for failure in failures)]
    life = read_life(run_dir, _LIFE_SHOWN)
    lines += [("life", str(entry)) for entry in life]
    for kind, (times, seconds, tokens) in life[-1].totals.items() if life else ():
        lines.append(("so far", f"{kind}: {times:.0f}x{cost(seconds, tokens)}"))
    newest = newest_iteration(run_dir)
    if newest is not None:
        lines.append(("last checkpoint", f"iteration {newest}"))
    lines += [("damaged", text) for text in read_state(run_dir).get("damaged_checkpoints", [])]
    summary = read_summary(run_dir)
    rows = metrics_rows(run_dir)
    if not address:
        lines += [("trouble", text) for text in noted_troubles(run_dir)]
    if summary is not None:
        return lines + summary_lines(summary, rows, run_dir)
    return lines + _last_row(rows, Heldout.of_state(read_state(run_dir)))


def last_outcome(run_dir: Path) -> str:
    """Read how the coordinator ended, e.g. `failed: why`, from the run's folder; "" if it recorded nothing."""
    state = read_state(run_dir)
    return ": ".join(text for text in (state.get("status", ""), state.get("error", "")) if text)


def _announced(environment: ServiceEnvironment) -> tuple[str, str, list[Failure]]:
    """Look the coordinator up in the registry; returns as find_coordinator."""
    try:
        registry = Registry(environment.redis_url, environment.run_id)
    except TandemError as error:
        return "", f"unknown: {error}", []
    try:
        address = next((record.address for record in registry.list(COORDINATOR)), "")
        why = "no coordinator is announced: it has not started, or the run is over"
        return address, why, registry.failures()
    except TandemError as error:
        return "", f"unknown: {error}", []
    finally:
        registry.close()


async def ask_status(address: str, token: str) -> pb.GetStatusResponse:
    """Ask a coordinator for its status. Raises: TandemError: it does not answer."""
    async with open_channel(address, identity=operator_identity(), peer=COORDINATOR, token=token) as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        with rpc_errors():
            answer: pb.GetStatusResponse = await stub.GetStatus(pb.GetStatusRequest(), timeout=_ANSWER_S)
    return answer


async def ask_coordinator(address: str, token: str) -> list[tuple[str, str]]:
    """Ask a coordinator how its run stands; a coordinator that does not answer is an answer too."""
    try:
        status = await ask_status(address, token)
    except TandemError as error:
        return [("state", f"running, but the coordinator at {address} does not answer: {error}")]
    state = pb.RunState.Name(status.state).removeprefix("RUN_STATE_").lower()
    quiet_s = time.time() - status.last_progress.seconds
    return [
        ("state", state + (f": {status.error}" if status.error else "")),
        ("iteration", f"{status.iteration} of {status.total_iterations}"),
        ("policy version", str(status.policy_version)),
        *([("last progress", f"{quiet_s:.0f} s ago")] if status.last_progress.seconds else []),
        ("coordinator", address),
        ("serving", ", ".join(status.serving_replicas) or "no replica yet"),
        *(("trouble", text) for text in status.troubles),
    ]


def _last_row(rows: list[Row], heldout: Heldout) -> list[tuple[str, str]]:
    """Describe the last iteration: the figures at the head of the page."""
    tiles = {metric.name: metric.tile for metric in METRICS if metric.tile}
    shown = {"iteration": "last iteration", **tiles, ACCURACY: heldout.title}
    last: Row = rows[-1] if rows else {}
    found = [(title, f"{value:.4g}") for name, title in shown.items() if (value := last.get(name)) is not None]
    rewards = rewards_text(rows)
    return [*found, ("rewards", rewards)] if rewards else found
