"""The images of an overlay: which it has, and where they come from."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from launcher.deploy.answers import Answers
from launcher.deploy.overlay.kustomize import Manifest
from launcher.deploy.overlay.patches import WORKLOADS
from servicekit.errors import ConfigError

# [host/path/]tandem/IMAGE[:tag][@digest], as the manifests name ours.
_OURS = re.compile(r"(?P<name>(?:[^@]*/)?tandem/(?P<image>[a-z0-9-]+))(?::(?P<tag>[^:@/]+))?(?:@.*)?")


def images_for(
    answers: Answers, built: Sequence[Manifest], digests: Mapping[str, Mapping[str, str]]
) -> list[dict[str, str]]:
    """Make the `images:` of an overlay, by image. digests: as `read_digests` returns it.

    Raises: ConfigError: `digests` lacks one of the images.
    """
    templates = [item["spec"]["template"] for item in built if item["kind"] in WORKLOADS]
    images = [str(item["image"]) for template in templates for item in containers_of(template)]
    found = {match["name"]: match["image"] for item in images if (match := _OURS.fullmatch(item))}
    missing = sorted(set(found.values()) - set(digests)) if digests else []
    if missing:
        raise ConfigError(f"--images names no {', '.join(missing)}; give what `make images` printed for all three")
    entries = []
    for name, image in sorted(found.items()):
        entry = {"name": name}
        if answers.registry:
            entry["newName"] = f"{answers.registry}/tandem/{image}"
        entry |= digests.get(image) or ({"newTag": answers.tag} if answers.tag else {})
        entries.append(entry)
    return [entry for entry in entries if len(entry) > 1]


def containers_of(template: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """List the containers of a pod template, those that run before the others too."""
    return [item for key in ("initContainers", "containers") for item in template["spec"].get(key, [])]


def read_digests(file: Path) -> dict[str, dict[str, str]]:
    """Read the `images:` that `make images PUSH=1` prints. Raises: ConfigError: the file has none."""
    try:
        entries = yaml.safe_load(file.read_text(encoding="utf-8"))["images"]
        found = {}
        for entry in entries:
            match = _OURS.fullmatch(str(entry["name"]))
            if match is not None:
                found[match["image"]] = {k: str(entry[k]) for k in ("newName", "newTag", "digest") if k in entry}
        return found
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"--images {file}: no `images:` of a kustomization: {error!r}") from error


def without_registry(image: str) -> bool:
    """Whether nodes would look for an image in Docker's registry, because its name begins with no host.

    >>> without_registry("tandem/rollout:0.2.0"), without_registry("localhost:5000/tandem/rollout")
    (True, False)
    """
    host, slash, _ = image.partition("/")
    return not slash or ("." not in host and ":" not in host and host != "localhost")


def is_ours(image: str) -> bool:
    """Whether it is one of Tandem's images."""
    return _OURS.fullmatch(image) is not None
