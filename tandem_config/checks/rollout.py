"""Checks of the rollout replicas."""

from functools import partial

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


def _divides_an_engines_ranks(name: str, others: str, config: RunConfig) -> ConfigProblem | None:
    ranks, parts = config.rollout.tensor_parallel, getattr(config.rollout, name)
    if ranks % parts == 0:
        return None
    return problem(
        f"rollout.{name}",
        parts,
        f"does not divide the {ranks} ranks of an engine (rollout.tensor_parallel)",
        f"{others} that do: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
    )


for _name, _others in (("nodes", "numbers of hosts"), ("expert_parallel", "sizes")):
    check(f"rollout.{_name}", "rollout.tensor_parallel")(partial(_divides_an_engines_ranks, _name, _others))


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
