"""How many pods a run has and what each holds, from its configuration and the GPUs of a node. Pure."""

from dataclasses import dataclass

from tandem_config.problems import ConfigProblem, problem
from tandem_config.schema import RunConfig


@dataclass(frozen=True, kw_only=True)
class PodLayout:
    """Pods of a run.

    Attributes:
        ranks_per_host: ranks, and GPUs, of a trainer pod.
        engines: rollout replicas.
        hosts_per_engine: pods of each; `ranks_per_engine_host`: ranks, and GPUs, of such a pod.
    """

    trainer_pods: int
    ranks_per_host: int
    engines: int
    hosts_per_engine: int
    ranks_per_engine_host: int

    @property
    def gpus(self) -> int:
        """GPUs of the whole run."""
        return (
            self.trainer_pods * self.ranks_per_host + self.engines * self.hosts_per_engine * self.ranks_per_engine_host
        )


def layout_of(config: RunConfig, ranks_per_pod: int | None) -> PodLayout:
    """Spread a run over pods: as few trainer pods as possible, all with as many ranks.

    Args:
        ranks_per_pod: GPUs of a node; None: pods without GPUs, so that one holds the whole trainer.
    """
    ranks = config.trainer.world_size
    most = ranks if ranks_per_pod is None else ranks_per_pod
    per_host = max(number for number in range(1, min(ranks, max(most, 1)) + 1) if ranks % number == 0)
    rollout = config.rollout
    return PodLayout(
        trainer_pods=ranks // per_host,
        ranks_per_host=per_host,
        engines=rollout.replicas,
        hosts_per_engine=rollout.nodes,
        ranks_per_engine_host=rollout.tensor_parallel // rollout.nodes,
    )


def misfits(config: RunConfig, layout: PodLayout, gpus_per_node: int, *, one_node: bool = False) -> list[ConfigProblem]:
    """List what does not fit into nodes with so many GPUs. one_node: all pods share one."""
    found = []
    if one_node and layout.gpus > gpus_per_node:
        text = f"the run needs {layout.gpus} GPUs on one node, but a node has {gpus_per_node}"
        advice = "--overlay cluster, fewer rollout.replicas or fewer trainer ranks"
        found.append(problem("--overlay", "single-node-gpu", text, advice))
    if layout.ranks_per_engine_host > gpus_per_node:
        nodes = -(-config.rollout.tensor_parallel // gpus_per_node)
        text = f"needs {layout.ranks_per_engine_host} GPUs in a pod, but a node has {gpus_per_node}"
        advice = f"rollout.nodes: {nodes} with the component lws-rollout, or fewer ranks"
        found.append(problem("rollout.tensor_parallel", config.rollout.tensor_parallel, text, advice))
    split = config.trainer.tensor_parallel
    if layout.ranks_per_host % split and layout.trainer_pods > 1:
        text = (
            f"ranks that share a layer are on several nodes: {layout.trainer_pods} pods with "
            f"{layout.ranks_per_host} ranks each, of {gpus_per_node} GPUs per node"
        )
        advice = "a divisor of the ranks of a pod, because they exchange activations in every layer"
        found.append(problem("trainer.tensor_parallel", split, text, advice, severity="warning"))
    return found
