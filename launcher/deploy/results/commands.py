"""Implements `tandem deploy results`: a run's files come to this machine, or a Job takes them to S3."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from coordinator.fleet.kubernetes.api.pods import RUN_LABEL
from launcher.deploy.commands import Where, write_job
from launcher.deploy.results.fetch import fetch, list_files
from launcher.deploy.results.helper_pod import helper_pod
from launcher.deploy.results.selection import is_chosen, skipped_folders
from launcher.deploy.running.api import OperatorApi
from launcher.deploy.running.kinds import BY_NAME
from launcher.deploy.running.run import JOB, RUN_ROOT, LiveRun, find_run
from launcher.deploy.transfer import SECRET_KEYS, FileJob, job_name, s3_place, s3_variables
from launcher.report import make_console, reporting
from servicekit.errors import ConfigError, NotReady, PermissionDenied
from servicekit.lifecycle.exit_codes import EXIT_OK

SECRET = BY_NAME["", "Secret"]


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """Where a run's files are, as far as the command line says it; "": as the run's Job says.

    Attributes:
        claim: that has the folder.
        run_dir: the folder, as pods have it.
        image: the coordinator's.
    """

    claim: str = ""
    run_dir: str = ""
    image: str = ""


@dataclass(frozen=True, kw_only=True)
class Destination:
    """S3-compatible storage; "": the default, or none. place: s3://BUCKET/PREFIX; secret: with the keys of S3."""

    place: str
    endpoint: str
    region: str
    secret: str


@dataclass(frozen=True, kw_only=True)
class ResultsRequest:
    """What `tandem deploy results` copies.

    Attributes:
        out: folder of this machine; with `to`, file for the Job.
        only: files and folders below the run's; empty: all.
        checkpoints: copy them too.
        to: None: this machine.
    """

    run: str
    out: Path
    only: Sequence[str]
    checkpoints: bool
    source: RunFiles
    to: Destination | None
    timeout_s: float


def find_files(run: str, source: RunFiles, where: Where) -> tuple[OperatorApi, LiveRun, RunFiles]:
    """Find where a run's files are. Raises: ConfigError: there is no such run, and the command line does not say it."""
    api = where.api()
    live = LiveRun(run=run, namespace=api.namespace)
    try:
        live = find_run(api, run, searched=not where.namespace)
    except ConfigError:
        if not (source.claim and source.image):  # else: the run is deleted, its claim is not
            raise
    image = source.image or str((live.container() or {}).get("image", ""))
    if not image:
        raise ConfigError(
            f"the Job of run {run} is deleted, so that its image is unknown: give --image and --run-claim"
        )
    return (
        api,
        live,
        RunFiles(claim=source.claim or live.claim(), run_dir=source.run_dir or live.run_dir(), image=image),
    )


@reporting()
def results_command(request: ResultsRequest, where: Where) -> int:
    """Run `tandem deploy results`."""
    console = make_console(ends_with_reader=True)
    api, _, source = find_files(request.run, request.source, where)
    if request.to is not None:
        job = upload_job(request, request.to, api.namespace, source)
        for line in _before_applying(api, job, request.to.secret):
            console.print(Text(line, style="bold yellow"))
        write_job(request.out, job, f"{source.run_dir} of claim {source.claim} to {request.to.place}")
        return EXIT_OK
    skipped = skipped_folders(checkpoints=request.checkpoints)
    with helper_pod(api, request.run, source.image, source.claim, read_only=True, timeout_s=request.timeout_s) as pod:
        there = list_files(api, pod, source.run_dir, skipped)
        files = [file for file in there if is_chosen(file.path, request.only)]
        if not files:
            raise NotReady(f"claim {source.claim} has no {', '.join(request.only) or 'files'} in {source.run_dir} yet")
        done = fetch(api, pod, source.run_dir, files, request.out, lambda line: console.print(Text(line)))
    text = f"{request.out}: {done.files} files, {done.size:,} bytes, digests compared; {done.kept} were there already"
    console.print(Text(text, style="bold"))
    return EXIT_OK


def _before_applying(api: OperatorApi, job: dict[str, Any], secret: str) -> Iterator[str]:
    """Yield what is in the way of a Job. Raises: ConfigError: the Secret has not the keys."""
    name = str(job["metadata"]["name"])
    if api.get(JOB, name) is not None:
        yield f"! Job {name} is there already: kubectl delete --namespace {api.namespace} job/{name}"
    try:
        found = api.get(SECRET, secret) if secret else {"data": SECRET_KEYS}
    except PermissionDenied:
        return
    if found is None:
        yield f"! Secret {secret} is not in namespace {api.namespace}: the Job waits for it"
    elif lacking := sorted(SECRET_KEYS.keys() - (found.get("data") or {}).keys()):
        raise ConfigError(f"Secret {secret} in namespace {api.namespace} has no {', '.join(lacking)}")


def upload_job(request: ResultsRequest, to: Destination, namespace: str, source: RunFiles) -> dict[str, Any]:
    """Make the manifest of the Job that copies to S3. Raises: ConfigError: no such place or address."""
    command = ["python", "-m", "launcher.deploy.results.upload", request.run, source.run_dir, s3_place(to.place)]
    command += ["--checkpoints"] if request.checkpoints else []
    return FileJob(
        what="results",
        name=job_name("results", request.run),
        namespace=namespace,
        image=source.image,
        command=[*command, *(word for path in request.only for word in ("--only", path))],
        variables=s3_variables(to.endpoint, to.region, to.secret),
        claim=source.claim,
        volume="run",
        mount=RUN_ROOT,
        read_only=True,
        near={RUN_LABEL: request.run},
    ).manifest()
