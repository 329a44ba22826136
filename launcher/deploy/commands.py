"""Implements the commands of `tandem deploy`; every function returns the exit code."""

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import yaml
from rich.text import Text

from launcher.deploy.answers import Answers
from launcher.deploy.check.cluster import cluster_problems, dns_addresses
from launcher.deploy.check.overlay import overlay_problems
from launcher.deploy.models.job import FetchRequest, fetch_job
from launcher.deploy.overlay.configuration import RUN_FILE, PodConfiguration, read_configuration
from launcher.deploy.overlay.images import read_digests, without_registry
from launcher.deploy.overlay.kustomize import Manifest, build
from launcher.deploy.overlay.layout import layout_of, misfits
from launcher.deploy.overlay.manifests import find_manifests, names_of
from launcher.deploy.overlay.overlay import ONCE, beside, write_overlay
from launcher.deploy.running.api import OperatorApi
from launcher.report import headline, make_console, print_problems, reporting
from servicekit.errors import ConfigError, TandemError
from servicekit.lifecycle.exit_codes import EXIT_BAD_CONFIG, EXIT_OK
from tandem_config.problems import ConfigErrors, ConfigProblem, errors_only, problem
from tandem_config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class Where:
    """How to reach the cluster; "" and None: as kubectl does. offline: not at all."""

    namespace: str = ""
    kubeconfig: Path | None = None
    context: str = ""
    offline: bool = False

    def api(self, namespace: str = "") -> OperatorApi:
        """Connect; nothing is asked yet. Raises: ConfigError: no usable kubeconfig."""
        return OperatorApi(self.namespace or namespace, kubeconfig=self.kubeconfig, context=self.context)


@dataclass(frozen=True, kw_only=True)
class NewRequest:
    """What `tandem deploy new` writes. images: file with the `images:` that `make images` printed."""

    answers: Answers
    config: Path
    out: Path
    force: bool
    images: Path | None
    manifests: Path | None


@reporting()
def fetch_command(request: FetchRequest, out: Path) -> int:
    """Run `tandem deploy fetch`: write the manifest of a Job."""
    if without_registry(request.image):
        raise ConfigError(f"--image {request.image}: begins with no registry; give it as nodes pull it")
    what = f"{request.source} to /models/{request.folder} of claim {request.claim}"
    write_job(out, fetch_job(request), what)
    return EXIT_OK


def write_job(out: Path, job: Manifest, what: str) -> None:
    """Write the manifest of a Job that moves files, and say what it does and how it is run. Raises: OSError."""
    name, namespace = job["metadata"]["name"], job["metadata"]["namespace"]
    console = make_console(ends_with_reader=True)
    out.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
    console.print(Text(f"{out}: {what}"))
    console.print(Text(f"  kubectl apply -f {out}"))
    console.print(Text(f"  kubectl wait --namespace {namespace} --for=condition=complete --timeout=4h job/{name}"))


def overlay_of(folder: Path) -> tuple[Answers, RunConfig, list[Manifest]]:
    """Read and build an overlay. Raises: ConfigError: it is none of ours, does not build, or its run.yaml is wrong."""
    answers = Answers.read(folder)
    configuration = _configuration(folder)
    errors = errors_only(configuration.problems)
    if configuration.config is None or errors:
        raise ConfigErrors(errors)
    return answers, configuration.config, build(folder)


def _configuration(folder: Path) -> PodConfiguration:
    """Read the run.yaml of an overlay; it is a folder lower where pod templates are copied."""
    lower = folder / "run" / RUN_FILE
    return read_configuration(lower if lower.is_file() else folder / RUN_FILE)


@reporting()
def new_command(request: NewRequest, where: Where) -> int:
    """Run `tandem deploy new`: nothing is written if there is an error."""
    answers, manifests = request.answers, find_manifests(request.manifests)
    configuration = read_configuration(request.config)
    problems = [*answers.problems(), *_unknown_components(answers, manifests), *configuration.problems]
    config = configuration.config
    if config is None or errors_only(problems):
        raise ConfigErrors(problems)
    layout = layout_of(config, answers.gpus_per_node if answers.uses_gpus else None)
    if answers.uses_gpus:
        one_node = answers.overlay == "single-node-gpu"
        problems += misfits(config, layout, answers.gpus_per_node, one_node=one_node)
    digests = {} if request.images is None else read_digests(request.images)
    if errors_only(problems):
        raise ConfigErrors(problems)
    answers = _with_dns(answers, where)
    with beside(request.out, force=request.force) as folder:
        write_overlay(folder, answers, layout, configuration, manifests, digests)
        built = build(folder)
        problems += overlay_problems(answers, config, built)
        problems += _compared(answers, built, request.out, where, is_new=not request.force)
        if errors_only(problems):
            raise ConfigErrors(problems)
    console = make_console(ends_with_reader=True)
    print_problems(console, problems)
    pods = f"{layout.trainer_pods} trainer, {layout.engines * layout.hosts_per_engine} rollout"
    gpus = f", {layout.gpus} GPUs" if answers.uses_gpus else ""
    console.print(Text(f"{request.out}: run {answers.run} in namespace {answers.namespace}: pods: {pods}{gpus}"))
    if (once := request.out / ONCE).is_dir():
        console.print(Text(f"  kubectl apply -k {once}    # once per namespace"))
    console.print(Text(f"  tandem deploy check {request.out}\n  kubectl apply -k {request.out}"))
    return EXIT_OK


@reporting()
def check_command(folder: Path, where: Where) -> int:
    """Run `tandem deploy check`."""
    answers, config, built = overlay_of(folder)
    problems = [*_configuration(folder).problems, *overlay_problems(answers, config, built)]
    if not where.offline:
        problems += cluster_problems(where.api(answers.namespace), answers, built, folder, is_new=False)
    console = make_console(ends_with_reader=True)
    print_problems(console, problems)
    console.print(Text(f"{folder}: {headline(problems)}", style="bold"))
    return EXIT_BAD_CONFIG if errors_only(problems) else EXIT_OK


def _with_dns(answers: Answers, where: Where) -> Answers:
    """Add the addresses of the cluster's DNS, if it can be asked; that it cannot is said where all is compared."""
    if not where.offline:
        with suppress(TandemError):
            return replace(answers, dns=dns_addresses(where.api(answers.namespace)))
    return answers


def _compared(answers: Answers, built: list[Manifest], out: Path, where: Where, *, is_new: bool) -> list[ConfigProblem]:
    """Compare with the cluster, if there is one to reach."""
    if where.offline:
        return []
    try:
        api = where.api(answers.namespace)
        return cluster_problems(api, answers, built, out, is_new=is_new)
    except TandemError as error:
        text = f"not compared with a cluster: {error}"
        advice = f"tandem deploy check {out}, where it can be reached; --offline to leave this out"
        return [problem("cluster", "", text, advice, severity="warning")]


def _unknown_components(answers: Answers, manifests: Path) -> list[ConfigProblem]:
    known = {"--overlay": names_of(manifests, "overlays"), "--component": names_of(manifests, "components")}
    given = [("--overlay", answers.overlay), *(("--component", name) for name in answers.components)]
    return [
        problem(option, name, "does not exist", ", ".join(known[option]))
        for option, name in given
        if name not in known[option]
    ]
