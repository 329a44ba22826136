"""Checks of the rollout replicas."""

from tandem_config.checks.registry import check
from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig


@check("rollout.min_replicas", "rollout.replicas")
def _min_replicas_can_be_present(config: RunConfig) -> ConfigProblem | None:
    if config.rollout.min_replicas <= config.rollout.replicas:
        return None
    return problem(
        "rollout.min_replicas",
        config.rollout.min_replicas,
        f"is more than rollout.replicas = {config.rollout.replicas}: the run could never start",
        f"at most {config.rollout.replicas}",
    )


@check("rollout.nodes", "rollout.tensor_parallel")
def _hosts_divide_an_engines_ranks(config: RunConfig) -> ConfigProblem | None:
    ranks, nodes = config.rollout.tensor_parallel, config.rollout.nodes
    if ranks % nodes == 0:
        return None
    return problem(
        "rollout.nodes",
        nodes,
        f"does not divide the {ranks} ranks of an engine (rollout.tensor_parallel)",
        f"numbers of hosts that do: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
    )


@check("rollout.nodes", "fleet.kind", "fleet.rollout_set_kind")
def _pods_of_an_engine_are_a_group(config: RunConfig) -> ConfigProblem | None:
    fleet, nodes = config.fleet, config.rollout.nodes
    if fleet.kind != "kubernetes" or nodes == 1 or fleet.rollout_set_kind == "LeaderWorkerSet":
        return None
    return problem(
        "fleet.rollout_set_kind",
        fleet.rollout_set_kind,
        f"makes engines of one pod, and rollout.nodes is {nodes}",
        "LeaderWorkerSet, with the component lws-rollout",
    )


@check("rollout.expert_parallel", "rollout.tensor_parallel")
def _expert_groups_divide_an_engines_ranks(config: RunConfig) -> ConfigProblem | None:
    ranks, groups = config.rollout.tensor_parallel, config.rollout.expert_parallel
    if ranks % groups == 0:
        return None
    return problem(
        "rollout.expert_parallel",
        groups,
        f"does not divide the {ranks} ranks of an engine (rollout.tensor_parallel)",
        f"sizes that do: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
    )
