"""`tandem deploy delete`: a run's objects go, by their label; its claims stay unless asked for."""

import threading
import time
from collections.abc import Callable, Iterable

from launcher.deploy.running.api import OperatorApi, names, of_run
from launcher.deploy.running.kinds import CLAIM, KINDS, MAKES_PODS, Kind
from launcher.deploy.running.run import POD, LiveRun
from servicekit.errors import DeadlineExceeded, PermissionDenied, TandemError

_LOOK_AGAIN_S = 1.0


def delete_run(
    api: OperatorApi, run: LiveRun, say: Callable[[str], None], *, claims: bool, timeout_s: float
) -> list[TandemError]:
    """Delete a run: what makes pods, then, when the pods are gone, the rest.

    Args:
        say: prints a line.
        claims: delete the claims that are labelled as the run's, with what is on them.
    Returns: what could not be deleted, and why.
    Raises: DeadlineExceeded: pods are still there after `timeout_s`; names them.
    """
    # GPUs would stay behind. Of other kinds, as of Secrets, most runs have none.
    errors: list[TandemError] = [error for kind, error in run.unread.items() if kind in MAKES_PODS]

    def delete(kinds: Iterable[Kind]) -> None:
        for kind in kinds:
            for name in names(run.objects.get(kind, [])):
                try:
                    if api.delete(kind, name):
                        say(f"{kind.name}/{name} deleted")
                except PermissionDenied as error:
                    errors.append(error)

    delete(kind for kind in MAKES_PODS if kind is not POD)
    _await_no_pods(api, run, timeout_s)
    delete(kind for kind in KINDS if kind not in MAKES_PODS and (claims or kind is not CLAIM))
    unseen = ", ".join(kind.plural for kind in run.unread if kind not in MAKES_PODS)
    if unseen:
        say(f"not looked for: {unseen} (this account may not list them)")
    kept = [] if claims else names(run.objects.get(CLAIM, []))
    if kept:
        say(f"kept: claim {', '.join(kept)} (--claims deletes what is on them too)")
    return errors


def _await_no_pods(api: OperatorApi, run: LiveRun, timeout_s: float) -> None:
    """Delete pods of no controller, and wait for all others, which end as their grace periods allow."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while pods := api.find(POD, of_run(run.run)):
        for pod in pods:
            if not pod["metadata"].get("ownerReferences") and not pod["metadata"].get("deletionTimestamp"):
                api.delete(POD, str(pod["metadata"]["name"]))
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(
                f"pods of run {run.run} have not ended in {timeout_s:g} s: {', '.join(names(pods))}; "
                f"kubectl describe pod --namespace {api.namespace} says why; then delete again"
            )
        pause.wait(_LOOK_AGAIN_S)
