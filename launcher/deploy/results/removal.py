"""Removes the folder of a run from its claim, through a pod that mounts it; never another run's."""

import json
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from launcher.deploy.results.commands import RunFiles
from launcher.deploy.results.helper_pod import CONTAINER, helper_pod
from launcher.deploy.running.api import OperatorApi
from launcher.deploy.running.run import JOB, RUN_ROOT
from launcher.deploy.running.streams import answer_of
from launcher.deploy.transfer import job_name
from servicekit.errors import ConfigError, NotReady, Unavailable

_SCRIPT = Path(__file__).with_name("remote_removal.py")
# A stream through an API server breaks now and then; what is removed already is not there the next time.
TRIES = 3


def check_removable(api: OperatorApi, run: str, source: RunFiles) -> None:
    """Check what can be seen before a pod has the claim.

    Raises: ConfigError: the folder is not one below the claim; NotReady: a Job still copies from it.
    """
    folder = PurePosixPath(source.run_dir)
    if folder == PurePosixPath(RUN_ROOT) or not folder.is_relative_to(RUN_ROOT) or ".." in folder.parts:
        raise ConfigError(
            f"{folder} is not a folder of its own below {RUN_ROOT}, where claim {source.claim} is mounted"
        )
    copying = api.get(JOB, job_name("results", run)) or {}
    if (copying.get("status") or {}).get("active"):
        raise NotReady(
            f"Job {copying['metadata']['name']} still copies the files of run {run}: wait for it, or delete it"
        )


def remove_files(api: OperatorApi, run: str, source: RunFiles, say: Callable[[str], None], *, timeout_s: float) -> None:
    """Remove the folder, whose run has no pods any more; one that is gone is fine.

    Args:
        timeout_s: until the pod runs.
    Raises: NotReady: the pod cannot start; ConfigError: it is not this run's folder; DeadlineExceeded; Unavailable: it
        broke off, and can be repeated.
    """
    with helper_pod(api, run, source.image, source.claim, read_only=False, timeout_s=timeout_s) as pod:
        for left in reversed(range(TRIES)):
            try:
                text = _remove(api, pod, source.run_dir, run)
                break
            except Unavailable:
                if not left:
                    raise
    say(f"{source.run_dir} of claim {source.claim}: {text}")


def _remove(api: OperatorApi, pod: str, folder: str, run: str) -> str:
    """Run the script in the pod. Returns: what it removed. Raises: ConfigError: it refuses; Unavailable."""
    command = ["python", "-c", _SCRIPT.read_text(encoding="utf-8"), RUN_ROOT, folder, run]
    done = json.loads(answer_of(api, pod, CONTAINER, command).splitlines()[-1])
    return f"{done['files']} files, {done['bytes']:,} bytes deleted" if done["files"] else "nothing is left"
