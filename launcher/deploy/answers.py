"""The answers that define an overlay, and the checks of them that need no other file."""

import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from servicekit.errors import ConfigError
from tandem_config.problems import ConfigProblem, problem

ANSWERS_FILE = "deploy.yaml"
# The longest name that is made of it is a pod's of a JobSet, which takes 63 characters: RUN-trainer-hosts-0-999-abcde.
LONGEST_RUN_ID = 37
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?")
_LABEL_KEY = re.compile(r"([a-z0-9]([a-z0-9.-]*[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What `tandem deploy new` was given; kept beside the overlay in `deploy.yaml`.

    Attributes:
        run: the run's id.
        registry: host and path before `tandem/<image>`; "": the images are on the nodes already (dev-cpu only).
        tag: of the images; "": as the overlay has it.
        storage_class: of claims that are made; "": the cluster's default one.
        run_claim, models_claim: claims to use.
        gpus_per_node: that pods may ask for; 0: no GPUs (dev-cpu).
        cpus_per_gpu, memory_gib_per_gpu: that pods ask for besides each GPU.
        node_selector: labels of the nodes for trainer and rollouts.
        tolerations: `key[=value]:effect`, of trainer and rollouts.
        dns: addresses of the cluster's DNS Service, which pods may ask; none: not read.
    """

    run: str
    namespace: str
    overlay: str = "cluster"
    registry: str = ""
    tag: str = ""
    storage_class: str = ""
    run_claim: str = "run"
    models_claim: str = "models"
    gpus_per_node: int = 0
    cpus_per_gpu: int = 8
    memory_gib_per_gpu: int = 64
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[str] = field(default_factory=list)
    components: list[str] = field(default_factory=list)
    dns: list[str] = field(default_factory=list)

    @property
    def uses_gpus(self) -> bool:
        """Whether trainer and rollouts ask for GPUs."""
        return self.overlay != "dev-cpu"

    @property
    def makes_claims(self) -> bool:
        """Whether the claims are made with the overlay's own names, rather than being there already."""
        return (self.run_claim, self.models_claim) == ("run", "models")

    def problems(self) -> list[ConfigProblem]:
        """List what is wrong with the answers, by option."""
        found = _run_id(self.run)
        if not _LABEL.fullmatch(self.namespace) or len(self.namespace) > 63:
            found.append(problem("--namespace", self.namespace, "is not the name of a namespace", "e.g. tandem"))
        found += [*self._registry(), *self._claims()]
        if self.uses_gpus and self.gpus_per_node < 1:
            found.append(problem("--gpus-per-node", self.gpus_per_node, "is not a number of GPUs", "e.g. 8"))
        for key, value in self.node_selector.items():
            if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value) or len(value) > 63:
                text = "is not a label of a node"
                found.append(problem("--node-selector", f"{key}={value}", text, "e.g. pool=gpu"))
        for text in self.tolerations:
            try:
                toleration(text)
            except ConfigError as error:
                found.append(problem("--toleration", text, str(error), "e.g. nvidia.com/gpu:NoSchedule"))
        return found

    def _registry(self) -> list[ConfigProblem]:
        if not self.registry and not self.uses_gpus:
            return []
        host = self.registry.partition("/")[0]
        if not self.registry:
            text = "is missing: nodes would look for the images in Docker's registry, where they are not"
        elif "." not in host and ":" not in host and host != "localhost":
            text = f"does not begin with a host name: nodes would look for it below docker.io/{host}"
        elif self.registry != self.registry.lower() or self.registry.endswith("/") or "//" in self.registry:
            text = "is not the beginning of an image's name: lower case, without a scheme, without a last slash"
        elif host.endswith(".invalid"):
            text = "is a placeholder that no node can pull from"
        else:
            return []
        return [problem("--registry", self.registry, text, "e.g. registry.example.com/team")]

    def _claims(self) -> list[ConfigProblem]:
        found = []
        for option, name in (("--run-claim", self.run_claim), ("--models-claim", self.models_claim)):
            if not all(_LABEL.fullmatch(part) for part in name.split(".")) or len(name) > 253:
                text = "is not the name of a claim"
                found.append(problem(option, name, text, "lower case letters, digits and dashes"))
        if self.overlay == "dev-cpu" and self.models_claim != "models":
            text = "is mounted by no pod of dev-cpu: the model is in its images, below /opt/tandem"
            found.append(problem("--models-claim", self.models_claim, text, "another --overlay, or leave it out"))
        if self.storage_class and not self.makes_claims:
            text = "is of claims that are made, but --run-claim or --models-claim names one that exists"
            found.append(problem("--storage-class", self.storage_class, text, "leave it out, or the claims"))
        return found

    def write(self, folder: Path) -> None:
        """Write them beside the overlay. Raises: OSError."""
        head = "# What this overlay was made from: `tandem deploy check` reads it.\n"
        text = yaml.safe_dump(asdict(self), sort_keys=False)
        (folder / ANSWERS_FILE).write_text(head + text, encoding="utf-8")

    @staticmethod
    def read(folder: Path) -> "Answers":
        """Read them. Raises: ConfigError: they are missing, or not as `write` writes them."""
        file = folder / ANSWERS_FILE
        try:
            found = yaml.safe_load(file.read_text(encoding="utf-8"))
            known = {entry.name for entry in fields(Answers)}
            if not isinstance(found, dict) or not set(found) <= known:
                unknown = sorted(set(found) - known) if isinstance(found, dict) else found
                raise ConfigError(f"{file}: {unknown}: not what `tandem deploy new` writes")
            return Answers(**found)
        except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}; give a folder of `tandem deploy new`") from error


def toleration(text: str) -> dict[str, Any]:
    """Read `key[=value]:effect`. Raises: ConfigError.

    >>> toleration("nvidia.com/gpu:NoSchedule")
    {'key': 'nvidia.com/gpu', 'operator': 'Exists', 'effect': 'NoSchedule'}
    """
    match = re.fullmatch(r"([^=:]+)(?:=([^:]*))?:(\w+)", text)
    if match is None or not _LABEL_KEY.fullmatch(match[1]):
        raise ConfigError("is not key[=value]:effect")
    if match[3] not in _EFFECTS:
        raise ConfigError(f"has the effect {match[3]!r}; there are {', '.join(_EFFECTS)}")
    if match[2] is None:
        return {"key": match[1], "operator": "Exists", "effect": match[3]}
    return {"key": match[1], "operator": "Equal", "value": match[2], "effect": match[3]}


def _run_id(name: str) -> list[ConfigProblem]:
    if not _LABEL.fullmatch(name):
        text = "is not a DNS label: lower case letters, digits and dashes, a letter or digit at both ends"
    elif name[0].isdigit():
        text = "begins with a digit: it begins the names of services, which begin with a letter"
    elif len(name) > LONGEST_RUN_ID:
        text = f"has {len(name)} characters; {LONGEST_RUN_ID} are the most, because names of pods are made of it"
    else:
        return []
    return [problem("RUN", name, text, "e.g. math-7b")]
