"""Writes the folder of an overlay.

kustomization.yaml      the run: kubectl apply -k FOLDER
run/                    the same without what copies pod templates; only with jobset-trainer, lws-rollout
run.yaml, *.py          the configuration and its files of own code
sizes.yaml, ...         patches
deploy.yaml             the answers
once/                   what the namespace needs once, before its first run: kubectl apply -k FOLDER/once
tandem/                 the manifests of this Tandem, as far as they are used
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import yaml

from launcher.deploy.answers import ANSWERS_FILE, Answers
from launcher.deploy.overlay import patches
from launcher.deploy.overlay.configuration import RUN_FILE, PodConfiguration
from launcher.deploy.overlay.images import images_for
from launcher.deploy.overlay.kustomize import Manifest, build
from launcher.deploy.overlay.layout import PodLayout
from launcher.deploy.overlay.manifests import KUSTOMIZATION, copy_manifests
from servicekit.errors import ConfigError

ONCE = "once"
_COPY, _LOWER = "tandem", "run"
# They copy pod templates as they find them, so that sizes and patches come before, in a kustomization below.
_COPYING = ("jobset-trainer", "lws-rollout")
# After those: it labels what they make.
_LAST = ("kueue",)
# After all others that are not above: it changes all pods.
_OPENSHIFT = "openshift"
_NAMES = "names"
# What a namespace needs once, before its first run; dev-cpu brings its own.
_ONCE = {"cluster": ("namespace", "storage"), "single-node-gpu": ("namespace", "storage-one-node"), "dev-cpu": ()}
_HEAD = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


@contextmanager
def beside(out: Path, *, force: bool) -> Iterator[Path]:
    """Give a folder beside `out` that takes its place at the end, if there was no error.

    Raises: ConfigError: `out` has files that are not an overlay of ours, or, without `force`, any.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not force:
            raise ConfigError(f"{out} exists; give another --out, or --force to write it again")
        if not (out / ANSWERS_FILE).is_file():
            raise ConfigError(f"{out} has no {ANSWERS_FILE}, so it is not an overlay that --force may replace")
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.parent / f".{out.name}.new"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    try:
        yield staged
        if out.exists():
            shutil.rmtree(out)
        staged.rename(out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def write_overlay(
    folder: Path,
    answers: Answers,
    layout: PodLayout,
    configuration: PodConfiguration,
    manifests: Path,
    digests: Mapping[str, Mapping[str, str]],
) -> None:
    """Write an overlay into an empty folder.

    Args:
        manifests: the `deploy/` that it is made of.
        digests: the entries of `images:` that `make images` has printed, by image.
    Raises: ConfigError: the manifests do not build, or have no such component; OSError.
    """
    has_names = (manifests / "components" / _NAMES / KUSTOMIZATION).is_file()
    # Before all others: mtls changes what it makes.
    components = [*([_NAMES] if has_names else []), *(name for name in answers.components if name != _NAMES)]
    components.sort(key=lambda name: name == _OPENSHIFT)
    wanted = [f"overlays/{answers.overlay}", *(f"components/{name}" for name in components)]
    copy_manifests(manifests, wanted, folder / _COPY)
    built = build(folder / _COPY / "overlays" / answers.overlay)
    for name, content in configuration.files.items():
        (folder / name).write_bytes(content)
    answers.write(folder)
    shared = [item for name in _ONCE[answers.overlay] for item in build(manifests / name)]
    _write_once(folder, answers, [*built, *shared])
    _write_run(folder, answers, layout, configuration, built, digests, components, has_names)


def _write_run(
    folder: Path,
    answers: Answers,
    layout: PodLayout,
    configuration: PodConfiguration,
    built: Sequence[Manifest],
    digests: Mapping[str, Mapping[str, str]],
    components: Sequence[str],
    has_names: bool,
) -> None:
    """Write the kustomization, in two if a component copies pod templates."""
    copying = [name for name in components if name in _COPYING]
    upper = [name for name in components if copying and name in (*_COPYING, *_LAST)]
    lower = [name for name in components if name not in upper]
    place = folder / _LOWER if copying else folder
    if copying:
        place.mkdir()
        for name in configuration.files:
            (folder / name).rename(place / name)
    up = "../" if copying else ""
    run: dict[str, Any] = {
        "resources": [f"{up}{_COPY}/overlays/{answers.overlay}"],
        "components": [f"{up}{_COPY}/components/{name}" for name in lower],
        "configMapGenerator": [_config_map(folder, answers, list(configuration.files))],
        "images": images_for(answers, built, digests),
        "replicas": [
            {"name": "trainer", "count": layout.trainer_pods},
            {"name": "rollout", "count": layout.engines},
        ],
        "patches": _write_patches(place, answers, layout, built),
    }
    # Above what components add, which must be found, and select, by the run's id as all the rest.
    labels = {"includeSelectors" if has_names else "includeTemplates": True, "pairs": {"tandem.run/id": answers.run}}
    top: dict[str, Any] = {"namespace": answers.namespace, "labels": [labels]}
    if has_names:
        top["namePrefix"] = f"{answers.run}-"
    if copying:
        top |= {"resources": [_LOWER], "components": [f"{_COPY}/components/{name}" for name in upper]}
        if "lws-rollout" in copying:
            top["patches"] = [_engine_size(layout.hosts_per_engine)]
        _write_kustomization(place, run)
        _write_kustomization(folder, top)
    else:
        _write_kustomization(folder, top | run)


def _write_patches(place: Path, answers: Answers, layout: PodLayout, built: Sequence[Manifest]) -> list[dict[str, Any]]:
    """Write the patches, a file per purpose. Returns: their entries."""
    files = {
        "sizes.yaml": patches.sizes(answers, layout),
        "nodes.yaml": patches.nodes(answers, built),
        "claims.yaml": patches.claims(answers, built),
        "storage.yaml": patches.storage(answers, built),
    }
    for name, content in files.items():
        if content:
            _write_yaml(place / name, *content)
    entries: list[dict[str, Any]] = [{"path": name} for name, content in files.items() if content]
    # kustomize takes one patch that deletes per entry.
    entries += [{"patch": yaml.safe_dump(item, sort_keys=False)} for item in patches.removed(built)]
    return [*entries, _dns(answers.dns)] if answers.dns else entries


def _write_once(folder: Path, answers: Answers, built: Sequence[Manifest]) -> None:
    """Write the namespace and the claims, with no label of a run."""
    once: dict[str, Manifest] = {}
    for item in built:
        if not patches.is_shared(item):
            continue
        if item["kind"] == "PersistentVolumeClaim" and not answers.makes_claims:
            continue
        labels = {key: text for key, text in item["metadata"].get("labels", {}).items() if key != "tandem.run/id"}
        name = answers.namespace if item["kind"] == "Namespace" else item["metadata"]["name"]
        made = {**item, "metadata": {"name": name, "labels": labels}}
        if item["kind"] == "PersistentVolumeClaim" and answers.storage_class:
            made["spec"] = {**item["spec"], "storageClassName": answers.storage_class}
        once[f"{item['kind']}/{name}"] = made
    if not once:
        return
    (folder / ONCE).mkdir()
    _write_yaml(folder / ONCE / "namespace-and-claims.yaml", *once.values())
    content = {"namespace": answers.namespace, "resources": ["namespace-and-claims.yaml"]}
    _write_kustomization(folder / ONCE, content)


def _config_map(folder: Path, answers: Answers, files: list[str]) -> dict[str, Any]:
    """Make the entry that replaces the overlay's run-config, which it finds by name and namespace."""
    file = folder / _COPY / "overlays" / answers.overlay / KUSTOMIZATION
    overlay = yaml.safe_load(file.read_text(encoding="utf-8"))
    entry = next((item for item in overlay.get("configMapGenerator", []) if item["name"] == "run-config"), None)
    if entry is None:
        raise ConfigError(f"{file} makes no ConfigMap run-config")
    namespace = {"namespace": entry["namespace"]} if "namespace" in entry else {}
    files = sorted(files, key=lambda name: (name != RUN_FILE, name))
    return {"name": "run-config", **namespace, "behavior": "replace", "files": files}


def _dns(addresses: Sequence[str]) -> dict[str, Any]:
    """Admit the DNS Service's own addresses: there NodeLocal DNSCache answers, on the node, which no policy selects."""
    blocks = [{"ipBlock": {"cidr": str(ip_network(address))}} for address in addresses]
    patch = [{"op": "add", "path": "/spec/egress/0/to/-", "value": block} for block in blocks]
    return {"target": {"kind": "NetworkPolicy", "name": "dns"}, "patch": yaml.safe_dump(patch, sort_keys=False)}


def _engine_size(hosts: int) -> dict[str, Any]:
    patch = [{"op": "replace", "path": "/spec/leaderWorkerTemplate/size", "value": hosts}]
    target = {"kind": "LeaderWorkerSet", "name": "rollout"}
    return {"target": target, "patch": yaml.safe_dump(patch)}


def _write_kustomization(folder: Path, content: Mapping[str, Any]) -> None:
    _write_yaml(folder / KUSTOMIZATION, _HEAD | {key: value for key, value in content.items() if value})


def _write_yaml(file: Path, *documents: Mapping[str, Any]) -> None:
    file.write_text(yaml.safe_dump_all(documents, sort_keys=False, width=120), encoding="utf-8")
