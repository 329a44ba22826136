"""Checks of the rollout replicas."""

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem
from tandem_config.schema import RunConfig


@check("rollout.min_replicas", "rollout.replicas")
def _min_replicas_can_be_present(config: RunConfig) -> ConfigProblem | None:
    if config.rollout.min_replicas <= config.rollout.replicas:
        return None
    return ConfigProblem(
        key="rollout.min_replicas",
        value=str(config.rollout.min_replicas),
        message=f"is more than rollout.replicas = {config.rollout.replicas}: the run could never start",
        suggestion=f"at most {config.rollout.replicas}",
    )


@check("rollout.nodes", "rollout.tensor_parallel")
def _hosts_divide_an_engines_ranks(config: RunConfig) -> ConfigProblem | None:
    ranks, nodes = config.rollout.tensor_parallel, config.rollout.nodes
    if ranks % nodes == 0:
        return None
    return ConfigProblem(
        key="rollout.nodes",
        value=str(nodes),
        message=f"does not divide the {ranks} ranks of an engine (rollout.tensor_parallel)",
        suggestion=f"numbers of hosts that do: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
    )


@check("rollout.nodes", "fleet.kind", "fleet.rollout_set_kind")
def _pods_of_an_engine_are_a_group(config: RunConfig) -> ConfigProblem | None:
    fleet, nodes = config.fleet, config.rollout.nodes
    if fleet.kind != "kubernetes" or nodes == 1 or fleet.rollout_set_kind == "LeaderWorkerSet":
        return None
    return ConfigProblem(
        key="fleet.rollout_set_kind",
        value=fleet.rollout_set_kind,
        message=f"makes engines of one pod, and rollout.nodes is {nodes}",
        suggestion="LeaderWorkerSet, with the component lws-rollout",
    )


@check("rollout.expert_parallel", "rollout.tensor_parallel")
def _expert_groups_divide_an_engines_ranks(config: RunConfig) -> ConfigProblem | None:
    ranks, groups = config.rollout.tensor_parallel, config.rollout.expert_parallel
    if ranks % groups == 0:
        return None
    return ConfigProblem(
        key="rollout.expert_parallel",
        value=str(groups),
        message=f"does not divide the {ranks} ranks of an engine (rollout.tensor_parallel)",
        suggestion=f"sizes that do: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
    )
