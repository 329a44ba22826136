"""Jobs of `tandem deploy`, run without a cluster: their commands, variables and claims on this machine."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes.cluster.fake_cluster import FakeCluster
from tests.house.repository import REPO

RUN_S = 100.0


def run_as_pod(job: dict[str, Any], claims: Mapping[str, Path], **secrets: str) -> "subprocess.CompletedProcess[str]":
    """Run the Job's command once, where `claims`, by their path in the pod, are folders of this machine.

    Args:
        secrets: values of the variables that are keys of Secrets; without one the variable is empty.
    """
    (container,) = job["spec"]["template"]["spec"]["containers"]
    program, *arguments = container["command"]
    environ = {each["name"]: each.get("value", secrets.get(each["name"], "")) for each in container["env"]}
    for mount, folder in claims.items():
        arguments = [_moved(text, mount, folder) for text in arguments]
    home = next(iter(claims.values())).parent
    environ |= {"PYTHONPATH": str(REPO), "HF_HOME": str(home / "hf"), "PATH": os.environ["PATH"], "HOME": str(home)}
    command = [str(Path(sys.executable).parent / program), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=RUN_S, check=False)


def admit(cluster: FakeCluster, job: dict[str, Any]) -> None:
    """Let the namespace judge the Job's pod, as its controller would create it. Raises: Refusal."""
    cluster.make_pod("team", "trial", job["spec"]["template"])
    cluster.delete("Pod", "trial", "team")


def _moved(text: str, mount: str, folder: Path) -> str:
    return f"{folder}{text.removeprefix(mount)}" if text == mount or text.startswith(f"{mount}/") else text
