"""Builds kustomizations with the kubectl of this machine."""

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from servicekit.errors import ConfigError

Manifest = dict[str, Any]
_BUILD_S = 60.0
# kubectl 1.27: `labels` with includeTemplates.
_OLDEST_KUSTOMIZE = (5, 0)
# 7 times as fast (7 ms of 57 for an overlay), where PyYAML was built with libyaml: its wheels are.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def kubectl() -> str:
    """Find a kubectl that can build. Raises: ConfigError: there is none, or it is too old."""
    program = shutil.which("kubectl")
    if program is None:
        raise ConfigError("kubectl is not on the PATH; it builds the overlay: install kubectl 1.27 or newer")
    _check_version(program)
    return program


@functools.cache
def _check_version(program: str) -> None:
    """Check once that a kubectl can build. Raises: ConfigError: it is too old, or does not say its version."""
    answer = _run([program, "version", "--client", "--output", "json"])
    try:
        version = str(json.loads(answer.stdout).get("kustomizeVersion", "v0.0"))
        number = tuple(int(part) for part in version.lstrip("v").split(".")[:2])
    except ValueError as error:
        raise ConfigError(f"{program} does not say its version: {answer.stderr.strip() or error}") from error
    if number < _OLDEST_KUSTOMIZE:
        raise ConfigError(f"{program} has kustomize {version}; 5.0 is needed: install kubectl 1.27 or newer")


def build(folder: Path) -> list[Manifest]:
    """Build a kustomization. Raises: ConfigError: it does not build, or it is no folder with one."""
    if not (folder / "kustomization.yaml").is_file():
        raise ConfigError(f"{folder} has no kustomization.yaml; give a folder of `tandem deploy new`")
    answer = _run([kubectl(), "kustomize", str(folder)])
    if answer.returncode != 0:
        raise ConfigError(f"kubectl kustomize {folder} failed: {answer.stderr.strip()[-2000:]}")
    return [manifest for manifest in yaml.load_all(answer.stdout, Loader=_Loader) if manifest]


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run a command. Raises: ConfigError: it cannot be run, or takes too long."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{' '.join(command[:2])} failed: {error}") from error
