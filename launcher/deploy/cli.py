"""The command line of `tandem deploy`."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.deploy import options
from launcher.view.cli import Level

if TYPE_CHECKING:
    from launcher.deploy.commands import Where

deploy = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Runs on Kubernetes: write an overlay for `kubectl apply -k`, check it, and follow the run from anywhere.

    \b
    tandem deploy new my-run -c my.yaml --namespace team ...    write its overlay
    tandem deploy fetch OWNER/MODEL ... a Job that downloads a model to the cluster
    tandem deploy check my-run          what is wrong with it, and for this cluster
    tandem deploy diff my-run           what applying it would change
    kubectl apply -k my-run             start it
    tandem deploy status my-run         how it stands, from anywhere that reaches the API
    tandem deploy logs my-run -f        what its pods log
    tandem deploy results my-run        its files, to this machine
    tandem deploy delete my-run         its objects; its claims stay""",
)

_Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the run.", show_default=False)
]
_Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", metavar="FILE", help="Default: as kubectl, KUBECONFIG or ~/.kube/config.")
]
_Context = Annotated[str, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")]
_Offline = Annotated[bool, typer.Option("--offline", help="Do not ask a cluster.")]
_Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")]
_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of `tandem deploy new`.")]


@deploy.command()
def new(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id: a DNS label of at most 37 characters.")],
    config: options.Config = None,
    namespace: _Namespace = None,
    registry: options.Registry = None,
    gpus_per_node: options.GpusPerNode = None,
    out: options.Out = None,
    overlay: options.Overlay = "cluster",
    component: options.Component = None,
    storage_class: options.StorageClass = "",
    run_claim: options.RunClaim = "run",
    models_claim: options.ModelsClaim = "models",
    node_selector: options.NodeSelector = None,
    toleration: options.Toleration = None,
    cpus_per_gpu: options.CpusPerGpu = 8,
    memory_gib_per_gpu: options.MemoryPerGpu = 64,
    tag: options.Tag = "",
    images: options.Images = None,
    manifests: options.Manifests = None,
    force: options.Force = False,
    offline: _Offline = False,
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Write the overlay of a run: a folder that `kubectl apply -k` takes and Git keeps; nothing is applied.

    Pods, GPUs and replicas follow from the run's YAML. Everything that can be seen before is an error here: GPUs that
    no node has, claims of the wrong mode, an id that is taken, an image without a registry, a namespace that would not
    admit the pods. What is missing is asked for on a terminal.

    \b
    Examples:
        tandem deploy new math -c my.yaml -n team -r registry.example.com/team --gpus-per-node 8
        tandem deploy new math -c my.yaml -n team -r localhost:5000 --gpus-per-node 4 --overlay single-node-gpu
        tandem deploy new demo -c run.yaml -n tandem --overlay dev-cpu --offline
    """
    from launcher.deploy.commands import new_command

    given = options.NewOptions(
        run=run,
        config=config,
        namespace=namespace,
        registry=registry,
        gpus_per_node=gpus_per_node,
        out=out,
        overlay=overlay,
        components=component or [],
        claims=(storage_class, run_claim, models_claim),
        nodes=(node_selector or [], toleration or []),
        per_gpu=(cpus_per_gpu, memory_gib_per_gpu),
        images=(tag, images),
        manifests=manifests,
        force=force,
    )
    raise typer.Exit(new_command(given.asked(), _where(None, kubeconfig, context, offline=offline)))


@deploy.command()
def check(folder: _Folder, offline: _Offline = False, kubeconfig: _Kubeconfig = None, context: _Context = "") -> None:
    """Report what is wrong with an overlay, in itself and for the cluster; nothing is changed. Exit code 2: errors.

    \b
    Examples:
        tandem deploy check math
        tandem deploy check math --offline
    """
    from launcher.deploy.commands import check_command

    raise typer.Exit(check_command(folder, _where(None, kubeconfig, context, offline=offline)))


@deploy.command()
def fetch(
    source: Annotated[
        str, typer.Argument(metavar="OWNER/NAME|s3://BUCKET/PREFIX", help="A Hugging Face repository, or S3 storage.")
    ],
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="The trainer's, which has `hf`; for S3 the coordinator's.")
    ],
    namespace: Annotated[str, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the claim.")],
    to: Annotated[str, typer.Option("--to", metavar="FOLDER", help="Below /models; default: the last name.")] = "",
    dataset: Annotated[bool, typer.Option("--dataset", help="The repository is a data set.")] = False,
    revision: Annotated[str, typer.Option("--revision", metavar="REV", help="Branch, tag or commit.")] = "main",
    endpoint: options.Endpoint = "",
    region: options.Region = "",
    secret: Annotated[
        str,
        typer.Option("--secret", metavar="NAME", help="With the key `token`; for S3 `access-key`, `secret-key`."),
    ] = "",
    models_claim: Annotated[str, typer.Option("--models-claim", metavar="NAME", help="The claim.")] = "models",
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Default: fetch-FOLDER.yaml.")] = None,
) -> None:
    """Write a Job that downloads a model or data set onto the claim of the models; nothing is applied.

    An attempt that fails is repeated and continues with the files that it lacks.

    \b
    Examples:
        tandem deploy fetch Qwen/Qwen2.5-7B -n team --image registry.example.com/tandem/trainer:0.2.0
        tandem deploy fetch s3://lab/data/math -n team --image registry.example.com/tandem/coordinator:0.2.0 --secret s3
    """
    from launcher.deploy.commands import fetch_command
    from launcher.deploy.models.job import FetchRequest

    request = FetchRequest(
        source=source,
        kind="dataset" if dataset else "model",
        revision=revision,
        folder=to or source.rstrip("/").rpartition("/")[2],
        namespace=namespace,
        image=image,
        claim=models_claim,
        endpoint=endpoint,
        secret=secret,
        region=region,
    )
    raise typer.Exit(fetch_command(request, out or Path(f"{request.name}.yaml")))


@deploy.command()
def diff(folder: _Folder, kubeconfig: _Kubeconfig = None, context: _Context = "") -> None:
    """Show what applying an overlay would change in the cluster, and what cannot be changed in place; changes nothing.

    \b
    Examples:
        tandem deploy diff math
    """
    from launcher.deploy.running_commands import diff_command

    raise typer.Exit(diff_command(folder, _where(None, kubeconfig, context)))


@deploy.command()
def status(run: _Run, namespace: _Namespace = None, kubeconfig: _Kubeconfig = None, context: _Context = "") -> None:
    """Show the state of a run: its Job, its pods and their troubles, and what its coordinator answers.

    The coordinator is asked through the API server, as by `kubectl port-forward`. Without --namespace all namespaces
    are searched, if this account may.

    \b
    Examples:
        tandem deploy status math
        tandem deploy status math -n team --context prod
    """
    from launcher.deploy.running_commands import status_command

    raise typer.Exit(status_command(run, _where(namespace, kubeconfig, context)))


@deploy.command()
def logs(
    run: _Run,
    services: Annotated[
        list[str] | None, typer.Argument(metavar="[SERVICE]...", help="coordinator, trainer, rollout, redis, or a pod.")
    ] = None,
    level: Annotated[Level, typer.Option("--level", help="Lowest level.")] = "info",
    since: Annotated[
        str, typer.Option("--since", metavar="TIME", help="Only later lines: 90s, 10m, 2h, 1d ago, or 14:30.")
    ] = "",
    newest: Annotated[int | None, typer.Option("--newest", min=1, metavar="N", help="Only the newest N.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print what is added too, until the run ends.")
    ] = False,
    previous: Annotated[
        bool, typer.Option("--previous", "-p", help="Of containers before their last restart.")
    ] = False,
    namespace: _Namespace = None,
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Print the logs of a run's pods as readable lines, by time: the newest 2,000 lines of each.

    \b
    Examples:
        tandem deploy logs math coordinator --follow
        tandem deploy logs math trainer --previous --level warning
    """
    from launcher.deploy.running_commands import logs_command

    where = _where(namespace, kubeconfig, context)
    wanted: dict[str, Any] = {"level": level, "since": since, "newest": newest, "follow": follow, "previous": previous}
    raise typer.Exit(logs_command(run, services or [], where, **wanted))


@deploy.command()
def results(
    run: _Run,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Default: runs/RUN. With --to the Job's file: results-RUN.yaml."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATH", help="A file or folder of the run's, e.g. hf; repeat for more."),
    ] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="The checkpoints too.")] = False,
    run_claim: options.DeletedRunsClaim = "",
    run_dir: options.DeletedRunsFolder = "",
    image: options.DeletedRunsImage = "",
    timeout_s: Annotated[float, typer.Option(min=1.0, max=7200.0, help="Until the pod that reads runs.")] = 600.0,
    to: options.To = "",
    endpoint: options.Endpoint = "",
    region: options.Region = "",
    secret: options.S3Secret = "",
    namespace: _Namespace = None,
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Copy the files of a run from its claim: the exported model, metrics, reports; without checkpoints by default.

    A pod that mounts the claim, read only, sends them through the API server; it is deleted at the end. Every file is
    compared by digest; what broke off continues where it ended, also when the command is repeated.

    With --to a Job is written, as by `fetch`, that copies them into S3-compatible storage; nothing is applied. Every
    file is compared with what the storage has, and listed in tandem-results.json there, at the end, with its SHA-256.

    \b
    Examples:
        tandem deploy results math --out math-results
        tandem deploy results math --only hf --only summary.json
        tandem deploy results math --to s3://lab/runs/math --endpoint https://minio.example.com --secret s3
        tandem deploy results math --run-claim run --image registry.example.com/tandem/coordinator:0.2.0
    """
    from launcher.deploy.results.commands import Destination, ResultsRequest, RunFiles, results_command

    if not to and (endpoint or region or secret):
        raise typer.BadParameter("--endpoint, --region and --secret are of --to s3://BUCKET/PREFIX")
    request = ResultsRequest(
        run=run,
        out=out or (Path(f"results-{run}.yaml") if to else Path("runs") / run),
        only=only or [],
        checkpoints=checkpoints,
        source=RunFiles(claim=run_claim, run_dir=run_dir, image=image),
        to=Destination(place=to, endpoint=endpoint, region=region, secret=secret) if to else None,
        timeout_s=timeout_s,
    )
    raise typer.Exit(results_command(request, _where(namespace, kubeconfig, context)))


@deploy.command()
def delete(
    run: _Run,
    claims: Annotated[
        bool, typer.Option("--claims", help="Also the claims that are labelled as the run's, with what is on them.")
    ] = False,
    files: Annotated[
        bool, typer.Option("--files", help="Also the run's folder on its claim: results, checkpoints, all of it.")
    ] = False,
    run_claim: options.DeletedRunsClaim = "",
    run_dir: options.DeletedRunsFolder = "",
    image: options.DeletedRunsImage = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout_s: Annotated[float, typer.Option(min=1.0, max=7200.0, help="Until its pods have ended.")] = 300.0,
    namespace: _Namespace = None,
    kubeconfig: _Kubeconfig = None,
    context: _Context = "",
) -> None:
    """Delete the objects of a run, found by their label; its files, claims and the namespace stay.

    With --files a pod that mounts the claim removes the run's folder, when the run's pods have ended: only if run.json
    in it says that it is this run's. Of a run whose objects are deleted give --run-claim and --image.

    \b
    Examples:
        tandem deploy delete math
        tandem deploy delete math --yes -n team
        tandem deploy delete math --files
    """
    from launcher.deploy.results.commands import RunFiles
    from launcher.deploy.running_commands import delete_command

    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("give --yes: there is no terminal to ask on")
    if not files and (run_claim or run_dir or image):
        raise typer.BadParameter("--run-claim, --run-dir and --image are of --files")
    where = _where(namespace, kubeconfig, context)
    confirm: Callable[[str], bool] = (lambda _: True) if yes else typer.confirm
    source = RunFiles(claim=run_claim, run_dir=run_dir, image=image) if files else None
    code = delete_command(run, where, claims=claims, files=source, timeout_s=timeout_s, confirm=confirm)
    raise typer.Exit(code)


def _where(namespace: str | None, kubeconfig: Path | None, context: str, *, offline: bool = False) -> "Where":
    from launcher.deploy.commands import Where

    return Where(namespace=namespace or "", kubeconfig=kubeconfig, context=context, offline=offline)
