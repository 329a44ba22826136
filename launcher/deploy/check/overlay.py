"""What is wrong with an overlay in itself: images, sizes, names. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from coordinator.fleet.kubernetes.api.pods import RUN_LABEL
from launcher.check.memory import GIB, host_problems
from launcher.deploy.answers import Answers
from launcher.deploy.overlay.configuration import IMAGE, MODELS, paths_of
from launcher.deploy.overlay.images import containers_of, is_ours, without_registry
from launcher.deploy.overlay.kustomize import Manifest
from launcher.deploy.overlay.patches import gpus_of
from launcher.deploy.running.kinds import SHARED, component_of, templates
from servicekit.errors import ConfigError
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig
from weightsync.model.spec import PRESETS, ModelSpec, preset

_RANKS = "TANDEM_RANKS_PER_HOST"


def overlay_problems(answers: Answers, config: RunConfig, built: Sequence[Manifest]) -> list[ConfigProblem]:
    """List what does not fit together in the objects that an overlay makes."""
    pods = [*_trainer(config, built), *_rollouts(config, built), *_gpus(answers, built)]
    return [*_labels(answers, built), *_images(answers, built), *_models(config, built), *pods]


@dataclass(kw_only=True)
class ClaimUse:
    """How pods use a claim: how many mount it, and how many of them write to it."""

    pods: int = 0
    writers: int = 0


def claims_of(built: Sequence[Manifest]) -> dict[str, ClaimUse]:
    """Find the claims that pods mount and the overlay does not make."""
    made = {manifest["metadata"]["name"] for manifest in built if manifest["kind"] == "PersistentVolumeClaim"}
    found: dict[str, ClaimUse] = {}
    for _, template, pods in templates(built):
        for volume in template["spec"].get("volumes", []):
            source = volume.get("persistentVolumeClaim")
            if source is not None and source["claimName"] not in made:
                use = found.setdefault(str(source["claimName"]), ClaimUse())
                use.pods += pods
                use.writers += 0 if source.get("readOnly") else pods
    return found


def _labels(answers: Answers, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    """Find the objects that status and delete would not find, and the pods that policies would not."""
    labelled = [(f"{item['kind']}/{item['metadata']['name']}", item) for item in built if item["kind"] not in SHARED]
    for name, item in [*labelled, *((f"{name}: its pods", template) for name, template, _ in templates(built))]:
        run = (item["metadata"].get("labels") or {}).get(RUN_LABEL)
        if run != answers.run:
            text = f"has {RUN_LABEL}={run}, not {answers.run}: status and delete would not find it"
            yield problem(name, "", text, "correct the `labels`, or write the overlay again: tandem deploy new --force")


def _images(answers: Answers, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    images = [item["image"] for _, template, _ in templates(built) for item in containers_of(template)]
    for image in dict.fromkeys(images):
        if is_ours(image) and without_registry(image) and (answers.uses_gpus or answers.registry):
            text = "has no registry in its name: nodes would look for it in Docker's"
        elif image.partition("/")[0].endswith(".invalid") and (answers.uses_gpus or answers.registry):
            text = "is a placeholder that no node can pull"
        else:
            continue
        yield problem("images", image, text, "name a registry: newName in kustomization.yaml, --registry")


def _models(config: RunConfig, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    mounts = [
        mount["mountPath"]
        for _, template, _ in templates(built)
        for container in template["spec"]["containers"]
        for mount in container.get("volumeMounts", [])
    ]
    if str(MODELS) in mounts:
        return
    for key, path in paths_of(config):
        if path.is_relative_to(MODELS):
            text = f"but no pod mounts {MODELS}: these have their model and rows in the images, below {IMAGE}"
            yield problem(key, path, text, "an overlay that mounts the claim `models`: cluster, single-node-gpu")


def _trainer(config: RunConfig, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    ranks = config.trainer.world_size
    for name, template, pods in templates(built):
        if component_of(template) != "trainer":
            continue
        per_host = int(_environment(template, "trainer").get(_RANKS, "1"))
        if pods * per_host != ranks:
            text = f"{pods} pods x {per_host} ranks ({_RANKS}), but the sections of run.yaml make {ranks}"
            yield problem(name, "", text, "write the overlay again, or change sizes.yaml and the replicas together")
        yield from _host_memory(name, config, template, per_host)
        if gpus_of(template) not in (0, per_host):
            text = f"asks for {gpus_of(template)} GPUs for {per_host} ranks"
            yield problem(name, "", text, f"as many GPUs as {_RANKS}")


def _host_memory(name: str, config: RunConfig, template: Mapping[str, Any], per_host: int) -> Iterator[ConfigProblem]:
    """Compare what ranks on GPUs take of a pod's memory with its limit."""
    path, containers = config.model.path, template["spec"]["containers"]
    limits = [(item.get("resources", {}).get("limits") or {}).get("memory") for item in containers]
    if gpus_of(template) == 0 or None in limits:
        return
    try:
        # models lie on the cluster's claim: a published one is known by its name
        spec = preset(path.name.lower()) if path.name.lower() in PRESETS else ModelSpec.from_folder(path)
        gib = float(sum(map(parse_quantity, limits))) / GIB
        yield from (replace(found, key=name) for found in host_problems(config, spec, per_host, gib, "its pod"))
    except ConfigError as error:
        text = f"the limit of its memory was not compared with what its ranks take: {error}"
        yield problem(name, "", text, severity="warning")


def _rollouts(config: RunConfig, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    rollout = config.rollout
    per_host = rollout.tensor_parallel // rollout.nodes
    for name, template, pods in templates(built):
        if component_of(template) != "rollout":
            continue
        is_group = name.startswith("LeaderWorkerSet")
        mounted = [one["name"] for one in template["spec"].get("volumes", []) if "persistentVolumeClaim" in one]
        if config.sync.transport == "disk" and "run" not in mounted:
            text = "but rollouts do not mount the run's claim"
            yield problem("sync.transport", "disk", text, "--component disk-transport")
        if pods < rollout.replicas:
            text = f"{pods} replicas, but the run waits for rollout.replicas = {rollout.replicas}"
            yield problem(name, "", text, "change `replicas` in kustomization.yaml")
        if gpus_of(template) not in (0, per_host):
            text = f"asks for {gpus_of(template)} GPUs, but a host of an engine has {per_host} ranks"
            yield problem(name, "", text, "rollout.tensor_parallel / rollout.nodes GPUs")
        if rollout.nodes > 1 and not is_group:
            text = f"engines span {rollout.nodes} hosts, but each is one pod here"
            yield problem("rollout.nodes", rollout.nodes, text, "--component lws-rollout")
        kind = "LeaderWorkerSet" if is_group else "StatefulSet"
        if config.fleet.rollout_set_kind != kind:
            text = f"but the rollouts are a {kind}"
            yield problem("fleet.rollout_set_kind", config.fleet.rollout_set_kind, text, kind)


def _gpus(answers: Answers, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    for name, template, _ in templates(built):
        if answers.uses_gpus and gpus_of(template) > answers.gpus_per_node:
            text = f"a pod asks for {gpus_of(template)} GPUs, but a node has {answers.gpus_per_node}"
            yield problem(name, "", text, "fewer ranks per pod, or --gpus-per-node if nodes have more")


def _environment(template: Mapping[str, Any], container: str) -> dict[str, str]:
    entries = [entry for one in template["spec"]["containers"] if one["name"] == container for entry in one["env"]]
    return {entry["name"]: str(entry["value"]) for entry in entries if "value" in entry}
