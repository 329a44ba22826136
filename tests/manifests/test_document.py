"""docs/kubernetes.md: its tables are what the programs and the manifests say."""

import json
import re

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from tests.house.repository import REPO
from tests.manifests.kustomize import component_of, containers, overlay, pod_templates

TEXT = (REPO / "docs" / "kubernetes.md").read_text(encoding="utf-8")
SIZES = re.findall(r"^\| (qwen\S+) \| (\S+) \| (\S+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)


def test_there_is_a_table_of_sizes() -> None:
    assert len(SIZES) >= 4


@pytest.mark.parametrize("row", SIZES, ids=lambda row: row[0])
def test_the_table_is_what_tandem_plan_says(row: tuple[str, ...]) -> None:
    model, trainer, rollout, replicas, gpus, gib, seconds = row
    arguments = ["--model", model, "--trainer", trainer, "--rollout", rollout, "--replicas", replicas, "--json"]
    result = CliRunner().invoke(app, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    assert int(gpus) == figures["trainer_ranks"] + figures["rollout_ranks"]
    assert gib == f"{figures['total_bytes'] / 2**30:.1f}"
    assert seconds == f"{figures['predicted_seconds']:.2f}"


def test_the_table_of_grace_periods_is_the_manifests() -> None:
    section = TEXT.partition("SIGTERM to SIGKILL")[2].partition("\n## ")[0]
    told = {name: int(seconds) for name, seconds in re.findall(r"^\| (\w+) \| (\d+) \|", section, re.MULTILINE)}
    templates = pod_templates(overlay("base")).values()
    assert told == {component_of(each): each["spec"]["terminationGracePeriodSeconds"] for each in templates}


def test_the_shell_is_a_restricted_pod_with_the_runs_volumes() -> None:
    import yaml

    from tests.manifests.schemas import VERSIONS, problems

    pod = yaml.safe_load((REPO / "deploy" / "shell.yaml").read_text(encoding="utf-8"))
    assert not [problem for version in VERSIONS for problem in problems(pod, version)]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (container,) = containers(pod)
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    redis = next(each for each in pod_templates(overlay("base")).values() if component_of(each) == "redis")
    assert container["image"] == containers(redis)[0]["image"]
    claims = {volume["persistentVolumeClaim"]["claimName"] for volume in pod["spec"]["volumes"]}
    assert claims == {"run", "models"}
