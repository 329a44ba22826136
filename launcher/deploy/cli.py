"""The command line of `tandem deploy`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.deploy import options

if TYPE_CHECKING:
    from launcher.deploy.commands import Where

deploy = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Runs on Kubernetes: write an overlay for `kubectl apply -k`, and check it against the cluster.

    \b
    tandem deploy new my-run -c my.yaml --namespace team ...    write its overlay
    tandem deploy check my-run          what is wrong with it, and for this cluster
    kubectl apply -k my-run             start it""",
)

_Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace of the run.", show_default=False)
]
_Kubeconfig = Annotated[
    Path | None, typer.Option("--kubeconfig", metavar="FILE", help="Default: as kubectl, KUBECONFIG or ~/.kube/config.")
]
_Context = Annotated[str, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")]
_Offline = Annotated[bool, typer.Option("--offline", help="Do not ask a cluster.")]
_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder of `tandem deploy new`.")]


@deploy.command()
def new(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id: a DNS label of at most 40 characters.")],
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


def _where(namespace: str | None, kubeconfig: Path | None, context: str, *, offline: bool = False) -> "Where":
    from launcher.deploy.commands import Where

    return Where(namespace=namespace or "", kubeconfig=kubeconfig, context=context, offline=offline)
