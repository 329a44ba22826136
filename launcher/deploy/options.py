"""The options of `tandem deploy`, and what `new` asks for where they are missing."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from launcher.deploy.commands import NewRequest

T = TypeVar("T", str, int)

Config = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="The run's YAML, with paths as pods have them.")
]
Registry = Annotated[
    str | None,
    typer.Option("--registry", "-r", metavar="HOST[/PATH]", help="Images are HOST/PATH/tandem/trainer and so on."),
]
GpusPerNode = Annotated[
    int | None, typer.Option("--gpus-per-node", metavar="N", min=1, max=1024, help="GPUs of a node, for pods.")
]
Out = Annotated[Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder to write; default: RUN.")]
Overlay = Annotated[
    str, typer.Option("--overlay", metavar="cluster|single-node-gpu|dev-cpu", help="What it is made of.")
]
Component = Annotated[
    list[str] | None, typer.Option("--component", metavar="NAME", help="A component of deploy/; repeat for more.")
]
StorageClass = Annotated[
    str, typer.Option("--storage-class", metavar="NAME", help="Of claims that are made; default: the cluster's.")
]
RunClaim = Annotated[str, typer.Option("--run-claim", metavar="NAME", help="Claim for runs that exists.")]
ModelsClaim = Annotated[
    str, typer.Option("--models-claim", metavar="NAME", help="Claim with models and data that exists.")
]
NodeSelector = Annotated[
    list[str] | None,
    typer.Option("--node-selector", metavar="KEY=VALUE", help="Label of the nodes for GPU pods; repeat for more."),
]
Toleration = Annotated[
    list[str] | None,
    typer.Option("--toleration", metavar="KEY[=VALUE]:EFFECT", help="Taint of those nodes; repeat for more."),
]
CpusPerGpu = Annotated[int, typer.Option(min=1, max=256, help="CPUs that a pod asks for with each GPU.")]
MemoryPerGpu = Annotated[int, typer.Option(min=1, max=4096, help="GiB of memory that it asks for with each GPU.")]
Tag = Annotated[str, typer.Option("--tag", metavar="TAG", help="Of the images; default: this Tandem's.")]
Images = Annotated[
    Path | None, typer.Option("--images", metavar="FILE", help="`images:` of a kustomization, to pin the digests.")
]
Manifests = Annotated[
    Path | None, typer.Option("--manifests", metavar="DIR", help="deploy/ of a checkout; default: this Tandem's.")
]
Endpoint = Annotated[str, typer.Option("--endpoint", metavar="URL", help="Of a mirror, or of the storage.")]
Region = Annotated[str, typer.Option("--region", metavar="NAME", help="Of S3.")]
To = Annotated[
    str, typer.Option("--to", metavar="s3://BUCKET/PREFIX", help="Write a Job that copies them there instead.")
]
S3Secret = Annotated[
    str, typer.Option("--secret", metavar="NAME", help="Of the storage: with the keys `access-key`, `secret-key`.")
]
DeletedRunsClaim = Annotated[str, typer.Option("--run-claim", metavar="NAME", help="Of a run whose Job is deleted.")]
DeletedRunsFolder = Annotated[str, typer.Option("--run-dir", metavar="DIR", help="The same: its folder in pods.")]
DeletedRunsImage = Annotated[str, typer.Option("--image", metavar="IMAGE", help="The same: image of the coordinator.")]
Force = Annotated[bool, typer.Option("--force", help="Write an overlay again, over an earlier one.")]


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """What the command line of `tandem deploy new` gave.

    Attributes:
        claims: storage class, claim of runs, claim of models.
        nodes: labels and taints, as written.
        per_gpu: CPUs, GiB of memory.
        images: tag, and the file with digests.
    """

    run: str
    config: Path | None
    namespace: str | None
    registry: str | None
    gpus_per_node: int | None
    out: Path | None
    overlay: str
    components: Sequence[str]
    claims: tuple[str, str, str]
    nodes: tuple[Sequence[str], Sequence[str]]
    per_gpu: tuple[int, int]
    images: tuple[str, Path | None]
    manifests: Path | None
    force: bool

    def asked(self) -> "NewRequest":
        """Complete what was given by what is asked for. Raises: typer.BadParameter: something is missing."""
        from launcher.deploy.answers import Answers
        from launcher.deploy.commands import NewRequest

        gpus = self.overlay != "dev-cpu"
        config = _asked(None if self.config is None else str(self.config), "--config", "The run's YAML", str)
        storage_class, run_claim, models_claim = self.claims
        labels, taints = self.nodes
        answers = Answers(
            run=self.run,
            namespace=_asked(self.namespace, "--namespace", "Namespace of the run", str),
            overlay=self.overlay,
            registry=_asked(self.registry, "--registry", "Registry of the images", str)
            if gpus
            else self.registry or "",
            tag=self.images[0],
            storage_class=storage_class,
            run_claim=run_claim,
            models_claim=models_claim,
            gpus_per_node=_asked(self.gpus_per_node, "--gpus-per-node", "GPUs of a node", int) if gpus else 0,
            cpus_per_gpu=self.per_gpu[0],
            memory_gib_per_gpu=self.per_gpu[1],
            node_selector=dict(_pair(text) for text in labels),
            tolerations=list(taints),
            components=list(dict.fromkeys(self.components)),
        )
        return NewRequest(
            answers=answers,
            config=Path(config),
            out=self.out or Path(self.run),
            force=self.force,
            images=self.images[1],
            manifests=self.manifests,
        )


def _asked(given: T | None, option: str, question: str, kind: type[T]) -> T:
    """Ask for what was not given, on a terminal. Raises: typer.BadParameter: there is none."""
    if given is not None:
        return given
    if not _is_terminal():
        raise typer.BadParameter(f"give {option}: {question.lower()}")
    answer: T = typer.prompt(f"{question} ({option})", type=kind)
    return answer


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _pair(text: str) -> tuple[str, str]:
    """Split KEY=VALUE. Raises: typer.BadParameter."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise typer.BadParameter(f"--node-selector {text!r}: give KEY=VALUE")
    return key, value
