"""Checks of the fleet."""

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig


@check("fleet.kind", "fleet.kubeconfig", "fleet.scale")
def _only_kubernetes_has_pods(config: RunConfig) -> ConfigProblem | None:
    fleet = config.fleet
    if fleet.kind == "kubernetes" or (fleet.kubeconfig is None and not fleet.scale):
        return None
    key, value = ("scale", "true") if fleet.scale else ("kubeconfig", str(fleet.kubeconfig))
    return ConfigProblem(
        key=f"fleet.{key}",
        value=value,
        message=f"does nothing with fleet.kind: {fleet.kind}",
        suggestion=f"set fleet.kind: kubernetes, or leave fleet.{key} out",
    )


@check("fleet.stuck_after_s", "sync.probe_timeout_s")
def _stuck_is_longer_than_a_probe(config: RunConfig) -> ConfigProblem | None:
    probe_s = config.sync.probe_timeout_s
    if config.fleet.stuck_after_s > probe_s:
        return None
    return ConfigProblem(
        key="fleet.stuck_after_s",
        value=str(config.fleet.stuck_after_s),
        message=f"is not more than sync.probe_timeout_s = {probe_s:g}: one slow answer would evict a pod",
        suggestion=f"several times as long, e.g. {10 * probe_s:g}",
    )
