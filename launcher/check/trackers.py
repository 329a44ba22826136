"""Checks that the configured trackers can work: library installed, login there, server answering."""

import contextlib
import importlib.util
import io
import os
from collections.abc import Iterator

from coordinator.record.trackers.settings import without_login
from launcher.check.host import is_writable
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from tandem_config.sections.trackers import MlflowTracker, Tracker, WandbTracker

_INSTALL = "pip install 'tandem[trackers]', or remove the entry"
# Most characters of a message of MLflow's, which has the cause first and advice behind it.
_CHARACTERS = 400


def check_trackers(config: RunConfig) -> Iterator[ConfigProblem]:
    """Check each tracker. A server that does not answer is a warning: it may be back when the first iteration ends."""
    for place, tracker in enumerate(config.trackers):
        key = "trackers" if len(config.trackers) == 1 else f"trackers[{place}]"
        yield from _check(key, tracker)


def _check(key: str, tracker: Tracker) -> Iterator[ConfigProblem]:
    if importlib.util.find_spec(tracker.kind) is None:
        yield problem(key, tracker.kind, f"the Python package {tracker.kind} is not installed", _INSTALL)
    elif isinstance(tracker, WandbTracker):
        yield from _check_wandb(key, tracker)
    elif isinstance(tracker, MlflowTracker):
        yield from _check_mlflow(key, tracker)


def _check_wandb(key: str, tracker: WandbTracker) -> Iterator[ConfigProblem]:
    if tracker.dir is not None:
        existing = next(parent for parent in (tracker.dir, *tracker.dir.parents) if parent.exists())
        if not existing.is_dir() or not is_writable(existing):
            yield problem(
                f"{key}.dir",
                tracker.dir,
                f"{existing} is not a folder that can be written to",
                "leave dir out: W&B's files then lie in the run's folder",
            )
    if (tracker.mode or os.environ.get("WANDB_MODE") or "online") != "online":
        return
    why = _wandb_login()
    if why:
        yield problem(
            f"{key}.mode",
            tracker.mode or "online",
            why,
            "run `wandb login` or set WANDB_API_KEY; or set mode: offline, and `wandb sync` it later",
        )


def _wandb_login() -> str:
    """Look for W&B's login; whether its server knows it shows later. Returns: what is wrong with it, or ""."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            found = wandb.login(prompt=False, verify=False)
        except wandb.Error as error:
            return f"there is no usable login to W&B: {error}"
        finally:
            wandb.teardown()
    return "" if found else "there is no login to W&B on this machine"


def _check_mlflow(key: str, tracker: MlflowTracker) -> Iterator[ConfigProblem]:
    uri = tracker.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
    if not uri:
        yield problem(
            f"{key}.uri",
            "null",
            "there is no tracking server: MLFLOW_TRACKING_URI is not set either",
            "set uri, e.g. http://mlflow:5000",
        )
        return
    # Imported here: MLflow takes seconds.
    from mlflow.exceptions import MlflowException

    from coordinator.record.trackers.mlflow import client_of

    try:
        client_of(tracker).search_experiments(max_results=1)
    except (MlflowException, ImportError, OSError) as error:
        yield _refused(f"{key}.uri", uri, error)


def _refused(key: str, uri: str, error: Exception) -> ConfigProblem:
    """Describe why MLflow does not take an address: a server that does not answer may do so later."""
    status = getattr(error, "get_http_status_code", lambda: 0)()
    no_login, remote = status in (401, 403), uri.startswith(("http:", "https:"))
    if no_login:
        advice = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
    elif remote:
        advice = "start the server; a run starts without it, and sends what it lacks later"
    else:
        advice = "give a tracking server, http://...; a local store needs all of MLflow (pip install mlflow)"
    return problem(
        key,
        without_login(uri),
        " ".join(without_login(f"MLflow does not take it: {error}").split())[:_CHARACTERS],
        advice,
        severity="warning" if remote and not no_login else "error",
    )
