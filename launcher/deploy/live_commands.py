"""Implements the commands of `tandem deploy` that find a run in a cluster; every function returns the exit code."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launcher.deploy.commands import Where, guarded, overlay_of
from launcher.deploy.live.api import OperatorApi
from launcher.deploy.live.delete import delete_run
from launcher.deploy.live.diff import changes, left_over, not_compared
from launcher.deploy.live.logs import show_logs
from launcher.deploy.live.run import LiveRun, find_run
from launcher.deploy.live.status import describe_run, is_over
from launcher.deploy.results.fetch import chosen, fetch, list_files
from launcher.deploy.results.helper_pod import helper_pod
from launcher.view.logs.show import WantedLines, time_of
from servicekit.errors import ConfigError, NotReady
from servicekit.life.exit_codes import EXIT_FAILED, EXIT_OK

_CHECKPOINTS = "checkpoints"
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@dataclass(frozen=True, kw_only=True)
class ResultsRequest:
    """What `tandem deploy results` copies.

    Attributes:
        only: files and folders below the run's; empty: all.
        checkpoints: copy them too.
        claim, run_dir, image: where the run's Job is deleted, which would say it; "": as the Job says.
    """

    run: str
    out: Path
    only: Sequence[str]
    checkpoints: bool
    claim: str
    run_dir: str
    image: str
    timeout_s: float


def diff_command(folder: Path, where: Where) -> int:
    """Run `tandem deploy diff`. Returns: 0 also if something would change."""
    return guarded(lambda console: _diff(console, folder, where))


def status_command(run: str, where: Where) -> int:
    """Run `tandem deploy status`."""
    return guarded(lambda console: _status(console, run, where))


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

    def show(console: Console) -> int:
        since_s = time_of(since, time.time()) if since else 0.0
        api, _ = _found(run, where)
        wanted = WantedLines(services=services, level=level, since_s=since_s, newest=newest)
        ends = (lambda: is_over(api, run)) if follow else None
        with suppress(KeyboardInterrupt):
            show_logs(api, run, console, wanted, previous=previous, is_over=ends)
        return EXIT_OK

    return guarded(show)


def delete_command(run: str, where: Where, *, claims: bool, timeout_s: float, confirm: Callable[[str], bool]) -> int:
    """Run `tandem deploy delete`. confirm: asks before anything is deleted."""

    def delete(console: Console) -> int:
        api, live = _found(run, where)
        count = sum(len(objects) for objects in live.objects.values())
        lost = " and its claims with what is on them" if claims else ""
        if not confirm(
            f"delete {count} objects of run {run} in namespace {live.namespace} (context {api.context}){lost}?"
        ):
            return EXIT_FAILED
        errors = delete_run(api, live, lambda line: console.print(Text(line)), claims=claims, timeout_s=timeout_s)
        for error in errors:
            console.print(Text(str(error), style="bold red"))
        return EXIT_FAILED if errors else EXIT_OK

    return guarded(delete)


def results_command(request: ResultsRequest, where: Where) -> int:
    """Run `tandem deploy results`."""
    return guarded(lambda console: _results(console, request, where))


def _found(run: str, where: Where) -> tuple[OperatorApi, LiveRun]:
    """Connect, and find a run. Raises: ConfigError."""
    api = where.api()
    return api, find_run(api, run, searched=not where.namespace)


def _status(console: Console, run: str, where: Where) -> int:
    lines = describe_run(*_found(run, where))
    width = max(len(name) for name, _ in lines)
    for name, text in lines:
        console.print(Text(f"{name.rjust(width)}  {text}"))
    return EXIT_OK


def _diff(console: Console, folder: Path, where: Where) -> int:
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


def _results(console: Console, request: ResultsRequest, where: Where) -> int:
    api = where.api()
    live = LiveRun(run=request.run, namespace=api.namespace)
    try:
        live = find_run(api, request.run, searched=not where.namespace)
    except ConfigError:
        if not (request.claim and request.image):  # else: the run is deleted, its claim is not
            raise
    container = live.container() or {}
    image = request.image or str(container.get("image", ""))
    if not image:
        raise ConfigError(
            f"the Job of run {request.run} is deleted, so that its image is unknown: give --image and --run-claim"
        )
    claim, root = request.claim or live.claim(), request.run_dir or live.run_dir()
    skipped = [] if request.checkpoints else [_CHECKPOINTS]
    with helper_pod(api, request.run, image, claim, read_only=True, timeout_s=request.timeout_s) as pod:
        files = list(chosen(list_files(api, pod, root, skipped), request.only))
        if not files:
            raise NotReady(f"claim {claim} has no {', '.join(request.only) or 'files'} in {root} yet")
        done = fetch(api, pod, root, files, request.out, lambda line: console.print(Text(line)))
    text = f"{request.out}: {done.files} files, {done.size:,} bytes, digests compared; {done.kept} were there already"
    console.print(Text(text, style="bold"))
    return EXIT_OK
