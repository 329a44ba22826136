"""Implements the commands of `tandem deploy` that find a run in a cluster; every function returns the exit code."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from launcher.deploy.commands import Where, overlay_of
from launcher.deploy.results.commands import RunFiles, find_files
from launcher.deploy.results.removal import check_removable, remove_files
from launcher.deploy.running.api import OperatorApi, names, of_run
from launcher.deploy.running.diff import changes, left_over, not_compared
from launcher.deploy.running.kinds import CLAIM, KINDS, MAKES_PODS, Kind
from launcher.deploy.running.logs import show_logs
from launcher.deploy.running.run import POD, LiveRun, find_run
from launcher.deploy.running.status import describe_run, is_over
from launcher.report import make_console, print_pairs, reporting
from launcher.view.logs.show import WantedLines, time_of
from servicekit.errors import ConfigError, DeadlineExceeded, PermissionDenied, TandemError
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_OK

_LOOK_AGAIN_S = 1.0
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@reporting()
def status_command(run: str, where: Where) -> int:
    """Run `tandem deploy status`."""
    print_pairs(make_console(ends_with_reader=True), describe_run(*_found(run, where)))
    return EXIT_OK


@reporting()
def logs_command(
    run: str,
    services: Sequence[str],
    where: Where,
    *,
    level: str,
    since: str,
    newest: int | None,
    follow: bool,
    previous: bool,
) -> int:
    """Run `tandem deploy logs`."""
    since_s = time_of(since, time.time()) if since else 0.0
    api, _ = _found(run, where)
    wanted = WantedLines(services=services, level=level, since_s=since_s, newest=newest)
    running = (lambda: not is_over(api, run)) if follow else None
    with suppress(KeyboardInterrupt):
        show_logs(api, run, make_console(ends_with_reader=True), wanted, previous=previous, is_running=running)
    return EXIT_OK


@reporting()
def delete_command(
    run: str, where: Where, *, claims: bool, files: RunFiles | None, timeout_s: float, confirm: Callable[[str], bool]
) -> int:
    """Run `tandem deploy delete`.

    Args:
        files: delete the run's folder too, once its pods are gone; None: it stays.
        confirm: asks before anything is deleted.
    """
    if files is None:
        api, live = _found(run, where)
        source = None
    else:
        api, live, source = find_files(run, files, where)
        check_removable(api, run, source)
    count = sum(len(objects) for objects in live.objects.values())
    lost = " and its claims with what is on them" if claims else ""
    lost += "" if source is None else f" and its folder {source.run_dir} on claim {source.claim}"
    if not confirm(f"delete {count} objects of run {run} in namespace {live.namespace} (context {api.context}){lost}?"):
        return EXIT_FAILED
    console = make_console(ends_with_reader=True)
    errors = delete_run(api, live, lambda line: console.print(Text(line)), claims=claims, timeout_s=timeout_s)
    for error in errors:
        console.print(Text(str(error), style="bold red"))
    if source is not None and not errors:
        remove_files(api, run, source, lambda line: console.print(Text(line)), timeout_s=timeout_s)
    return EXIT_FAILED if errors else EXIT_OK


def delete_run(
    api: OperatorApi, run: LiveRun, say: Callable[[str], None], *, claims: bool, timeout_s: float
) -> list[TandemError]:
    """Delete a run's objects, by their label: what makes pods, then, when the pods are gone, the rest.

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


def _found(run: str, where: Where) -> tuple[OperatorApi, LiveRun]:
    """Connect, and find a run. Raises: ConfigError."""
    api = where.api()
    return api, find_run(api, run, searched=not where.namespace)


@reporting()
def diff_command(folder: Path, where: Where) -> int:
    """Run `tandem deploy diff`. Returns: 0 also if something would change."""
    console = make_console(ends_with_reader=True)
    answers, _, built = overlay_of(folder)
    api = where.api(answers.namespace)
    counts = {"new": 0, "changed": 0, "same": 0}
    stays = []
    for change in changes(api, built):
        counts[change.what] += 1
        if change.what == "new":
            console.print(Text(f"new      {change.kind}/{change.name}", style="green"))
        for line in change.text.splitlines():
            console.print(Text(line, style=_STYLES.get(line[:1], "")))
        for warning in change.warnings:
            console.print(Text(f"! {change.kind}/{change.name}: {warning}", style="bold yellow"))
        stays += [change] if change.warnings else []
    live = LiveRun(run=answers.run, namespace=api.namespace)
    with suppress(ConfigError):
        live = find_run(api, answers.run, searched=False)
    for name in left_over(live, built):
        console.print(Text(f"! {name}: no longer in the overlay; applying does not delete it", style="bold yellow"))
    for name in not_compared(built):
        console.print(Text(f"? {name}: not compared", style="dim"))
    if stays:
        workloads = sorted(
            {f"{item.kind.lower()}/{item.name}" for item in stays if item.kind != "PersistentVolumeClaim"}
        )
        console.print(
            Text("to change them, take the services away first, all together; the run resumes from its checkpoint:")
        )
        console.print(Text(f"  kubectl delete --namespace {api.namespace} --cascade=foreground {' '.join(workloads)}"))
        console.print(Text(f"  kubectl apply -k {folder}"))
    console.print(Text(", ".join(f"{number} {what}" for what, number in counts.items()), style="bold"))
    return EXIT_OK
