"""Checks of the fleet."""

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig


@check("fleet.kind", "fleet.kubeconfig", "fleet.scale")
def _only_kubernetes_has_pods(config: RunConfig) -> Problems:
    fleet = config.fleet
    given = [name for name, is_given in (("scale", fleet.scale), ("kubeconfig", fleet.kubeconfig)) if is_given]
    if given and fleet.kind != "kubernetes":
        yield problem(
            f"fleet.{given[0]}",
            getattr(fleet, given[0]),
            f"does nothing with fleet.kind: {fleet.kind}",
            f"set fleet.kind: kubernetes, or leave fleet.{given[0]} out",
        )


@check("fleet.stuck_after_s", "sync.probe_timeout_s")
def _stuck_is_longer_than_a_probe(config: RunConfig) -> Problems:
    probe_s = config.sync.probe_timeout_s
    if config.fleet.stuck_after_s <= probe_s:
        yield problem(
            "fleet.stuck_after_s",
            config.fleet.stuck_after_s,
            f"is not more than sync.probe_timeout_s = {probe_s:g}: one slow answer would evict a pod",
            f"several times as long, e.g. {10 * probe_s:g}",
        )
