"""Checks of the fleet."""

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig


@check("fleet.kind", "fleet.kubeconfig", "fleet.scale")
def _only_kubernetes_has_pods(config: RunConfig) -> ConfigProblem | None:
    fleet = config.fleet
    if fleet.kind == "kubernetes" or (fleet.kubeconfig is None and not fleet.scale):
        return None
    key, value = ("scale", "true") if fleet.scale else ("kubeconfig", str(fleet.kubeconfig))
    return problem(
        f"fleet.{key}",
        value,
        f"does nothing with fleet.kind: {fleet.kind}",
        f"set fleet.kind: kubernetes, or leave fleet.{key} out",
    )


@check("fleet.stuck_after_s", "sync.probe_timeout_s")
def _stuck_is_longer_than_a_probe(config: RunConfig) -> ConfigProblem | None:
    probe_s = config.sync.probe_timeout_s
    if config.fleet.stuck_after_s > probe_s:
        return None
    return problem(
        "fleet.stuck_after_s",
        config.fleet.stuck_after_s,
        f"is not more than sync.probe_timeout_s = {probe_s:g}: one slow answer would evict a pod",
        f"several times as long, e.g. {10 * probe_s:g}",
    )
