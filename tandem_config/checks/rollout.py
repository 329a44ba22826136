"""Checks of the rollout replicas."""

from functools import partial

from tandem_config.checks.registry import Problems, check
from tandem_config.problems import problem
from tandem_config.schema import RunConfig


@check("rollout.min_replicas", "rollout.replicas")
def _min_replicas_can_be_present(config: RunConfig) -> Problems:
    if config.rollout.min_replicas > config.rollout.replicas:
        yield problem(
            "rollout.min_replicas",
            config.rollout.min_replicas,
            f"is more than rollout.replicas = {config.rollout.replicas}: the run could never start",
            f"at most {config.rollout.replicas}",
        )


def _divides_an_engines_ranks(name: str, others: str, config: RunConfig) -> Problems:
    ranks, parts = config.rollout.tensor_parallel, getattr(config.rollout, name)
    if ranks % parts != 0:
        yield problem(
            f"rollout.{name}",
            parts,
            f"does not divide the {ranks} ranks of an engine (rollout.tensor_parallel)",
            f"{others} that do: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
        )


for _name, _others in (("nodes", "numbers of hosts"), ("expert_parallel", "sizes")):
    check(f"rollout.{_name}", "rollout.tensor_parallel")(partial(_divides_an_engines_ranks, _name, _others))


@check("rollout.nodes", "fleet.kind", "fleet.rollout_set_kind")
def _pods_of_an_engine_are_a_group(config: RunConfig) -> Problems:
    fleet, nodes = config.fleet, config.rollout.nodes
    if fleet.kind == "kubernetes" and nodes > 1 and fleet.rollout_set_kind != "LeaderWorkerSet":
        yield problem(
            "fleet.rollout_set_kind",
            fleet.rollout_set_kind,
            f"makes engines of one pod, and rollout.nodes is {nodes}",
            "LeaderWorkerSet, with the component lws-rollout",
        )
