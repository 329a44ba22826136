"""A FAKE scheduler with the arithmetic of Kubernetes' own (1.36), for where the pods of built manifests land.

Filters      node selector, taints, requests, required pod affinity
Scores       NodeResourcesFit (least allocated) x 1, BalancedAllocation x 1, PodTopologySpread x 2 (with the scheduler's
             own constraints for pods that have none), InterPodAffinity x 2 (with what placed pods wish); ties: by lot
Order        priority, then creation; pods that are tried again come in any order, as back-off leaves them
Preemption   of pods of lower priority, on the node where the fewest must go; they are made anew, as sets do

It has no volumes, images, anti-affinity, gates, disruption budgets, and no time: a deleted pod is gone at once.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kubernetes.utils.quantity import parse_quantity

Labels = Mapping[str, str]
Term = tuple[int, str, Mapping[str, Any]]
HOSTNAME = "kubernetes.io/hostname"
# The scheduler's own for pods without a constraint: of pods of the same set.
_OWN_SPREAD = ((3, HOSTNAME), (5, "topology.kubernetes.io/zone"))


@dataclass(kw_only=True)
class FakeNode:
    """A node; its labels are those that a kubelet sets, and more."""

    name: str
    allocatable: dict[str, float]
    taints: list[dict[str, str]] = field(default_factory=list)
    more_labels: dict[str, str] = field(default_factory=dict)
    closed: bool = False  # cordoned, or lost

    @property
    def labels(self) -> Labels:
        """All labels."""
        return {HOSTNAME: self.name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"} | self.more_labels


@dataclass(kw_only=True, eq=False)
class FakePod:
    """A pod of a set; `node` is "" while it is pending."""

    name: str
    template: dict[str, Any]
    priority: int = 0
    preempts: bool = True
    node: str = ""

    @property
    def labels(self) -> Labels:
        """Its labels."""
        return dict(self.template["metadata"].get("labels", {}))

    @property
    def requests(self) -> dict[str, float]:
        """What its containers ask for, in all."""
        found: dict[str, float] = {}
        for container in self.template["spec"]["containers"]:
            resources = container.get("resources", {})
            for name, amount in ((resources.get("limits") or {}) | (resources.get("requests") or {})).items():
                found[name] = found.get(name, 0.0) + float(parse_quantity(amount))
        return found

    def terms(self, how: str) -> list[Term]:
        """Terms of pod affinity, `required` or `preferred`, as (weight, topology key, selector)."""
        affinity = self.template["spec"].get("affinity", {}).get("podAffinity", {})
        found = affinity.get(f"{how}DuringSchedulingIgnoredDuringExecution", [])
        plain = [(each.get("weight", 1), each.get("podAffinityTerm", each)) for each in found]
        return [(weight, term["topologyKey"], term["labelSelector"]) for weight, term in plain]


class FakeScheduler:
    """Places pods on nodes.

    Args:
        seed: decides between equal scores, and the order of those that are tried again.
        priorities: value and preemption policy of the cluster's classes.
    """

    def __init__(
        self, nodes: Sequence[FakeNode], seed: int, priorities: Mapping[str, tuple[int, str]] | None = None
    ) -> None:
        self.nodes = {node.name: node for node in nodes}
        self.pods: list[FakePod] = []
        self._priorities = dict(priorities or {})
        self._lot = random.Random(seed)

    def create(self, name: str, template: dict[str, Any]) -> FakePod:
        """Make a pod, which waits in the queue. Raises: KeyError: its class does not exist, as a cluster refuses it."""
        chosen = template["spec"].get("priorityClassName")
        value, policy = self._priorities[chosen] if chosen else (0, "")
        pod = FakePod(name=name, template=template, priority=value, preempts=policy != "Never")
        self.pods.append(pod)
        return pod

    def delete(self, *names: str) -> None:
        """Remove pods."""
        self.pods = [pod for pod in self.pods if pod.name not in names]

    def replace(self, *names: str) -> None:
        """Remove pods; their sets make them anew."""
        for pod in [pod for pod in self.pods if pod.name in names]:
            self.pods.remove(pod)
            self.create(pod.name, pod.template)

    def close(self, node: str) -> list[str]:
        """Drain or lose a node. Returns: its pods, which are pending again."""
        self.nodes[node].closed = True
        gone = [pod.name for pod in self.pods if pod.node == node]
        self.replace(*gone)
        return gone

    def settle(self) -> None:
        """Place what can be placed: once in order of creation, then again as long as something changes."""
        queue = [pod for pod in self.pods if not pod.node]
        while queue:
            changed = False
            for pod in sorted(queue, key=lambda each: -each.priority):
                changed |= pod in self.pods and self._place(pod)
            queue = [pod for pod in self.pods if not pod.node]
            self._lot.shuffle(queue)
            if not changed:
                return

    def pending(self) -> list[str]:
        """Names of pods without a node."""
        return [pod.name for pod in self.pods if not pod.node]

    def on(self, node: str) -> list[str]:
        """Names of a node's pods."""
        return [pod.name for pod in self.pods if pod.node == node]

    def _place(self, pod: FakePod) -> bool:
        fitting = [node for node in self.nodes.values() if self._may(pod, node) and self._fits(pod, node)]
        if fitting:
            scores = self._scores(pod, fitting)
            best = max(scores.values())
            pod.node = self._lot.choice([name for name, score in scores.items() if score == best])
            return True
        return pod.preempts and self._preempt(pod)

    def _preempt(self, pod: FakePod) -> bool:
        plans = {node.name: self._victims(pod, node) for node in self.nodes.values() if self._may(pod, node)}
        possible = {name: victims for name, victims in plans.items() if victims}
        if not possible:
            return False
        pod.node = min(possible, key=lambda name: (len(possible[name]), self._lot.random()))
        self.replace(*(each.name for each in possible[pod.node]))
        return True

    def _victims(self, pod: FakePod, node: FakeNode) -> list[FakePod]:
        """Those of lower priority that must go from a node; none: it would not help."""
        lower = [each for each in self.pods if each.node == node.name and each.priority < pod.priority]
        if not self._fits(pod, node, without=lower):
            return []
        for each in list(lower):
            spared = [other for other in lower if other is not each]
            lower = spared if self._fits(pod, node, without=spared) else lower
        return lower

    def _may(self, pod: FakePod, node: FakeNode) -> bool:
        """Whether a node is open to a pod, however full."""
        spec = pod.template["spec"]
        if node.closed or not (spec.get("nodeSelector") or {}).items() <= node.labels.items():
            return False
        if not all(any(_tolerates(each, taint) for each in spec.get("tolerations") or []) for taint in node.taints):
            return False
        terms = pod.terms("required")
        if not terms:
            return True
        matching = [each for each in self._placed() if all(_selects(selector, each) for _, _, selector in terms)]
        if not matching:  # the first of a group may begin it
            return all(_selects(selector, pod) and key in node.labels for _, key, selector in terms)
        return all(
            key in node.labels and any(self.nodes[each.node].labels.get(key) == node.labels[key] for each in matching)
            for _, key, _ in terms
        )

    def _fits(self, pod: FakePod, node: FakeNode, without: Sequence[FakePod] = ()) -> bool:
        used = self._used(node, without)
        return all(used.get(name, 0.0) + ask <= node.allocatable.get(name, 0.0) for name, ask in pod.requests.items())

    def _used(self, node: FakeNode, without: Sequence[FakePod] = ()) -> dict[str, float]:
        used: dict[str, float] = {}
        for each in self.pods:
            if each.node == node.name and each not in without:
                for name, amount in each.requests.items():
                    used[name] = used.get(name, 0.0) + amount
        return used

    def _placed(self) -> Iterator[FakePod]:
        return (each for each in self.pods if each.node)

    def _scores(self, pod: FakePod, nodes: Sequence[FakeNode]) -> dict[str, int]:
        wished, spread = self._affinity(pod, nodes), self._spread(pod, nodes)
        found = {}
        for node in nodes:
            used = self._used(node)
            shares = [
                min(1.0, (used.get(name, 0.0) + pod.requests.get(name, 0.0)) / node.allocatable[name])
                for name in ("cpu", "memory")
            ]
            least = int(sum(int(100 * (1 - share)) for share in shares) / 2)
            balanced = int(100 * (1 - abs(shares[0] - shares[1]) / 2))
            found[node.name] = least + balanced + 2 * spread[node.name] + 2 * wished[node.name]
        return found

    def _affinity(self, pod: FakePod, nodes: Sequence[FakeNode]) -> dict[str, int]:
        """InterPodAffinity: what the pod prefers, and what pods that are there prefer or require."""
        sums: dict[tuple[str, str], int] = {}
        for each in self._placed():
            theirs = [*each.terms("preferred"), *each.terms("required")]
            wanted = [term for term in pod.terms("preferred") if _selects(term[2], each)]
            for weight, key, _ in [*wanted, *(term for term in theirs if _selects(term[2], pod))]:
                place = key, self.nodes[each.node].labels.get(key, "")
                sums[place] = sums.get(place, 0) + weight
        raw = {node.name: sum(sums.get(item, 0) for item in node.labels.items()) for node in nodes}
        low, high = min(raw.values()), max(raw.values())
        return {name: int(100 * (score - low) / (high - low)) if high > low else 0 for name, score in raw.items()}

    def _spread(self, pod: FakePod, nodes: Sequence[FakeNode]) -> dict[str, int]:
        """PodTopologySpread: `ScheduleAnyway` constraints, or the scheduler's own."""
        given = pod.template["spec"].get("topologySpreadConstraints")
        if given:
            soft = [each for each in given if each["whenUnsatisfiable"] == "ScheduleAnyway"]
            rules = [(each["maxSkew"], each["topologyKey"], each["labelSelector"]) for each in soft]
        else:
            rules = [(skew, key, {"matchLabels": pod.labels}) for skew, key in _OWN_SPREAD]
        counted = [node for node in nodes if not given or all(key in node.labels for _, key, _ in rules)]
        raw = {node.name: 0.0 for node in counted}
        for skew, key, selector in rules:
            domains = {node.labels[key] for node in counted if key in node.labels}
            weight = math.log(len(domains) + 2)
            for node in counted:
                if key in node.labels:
                    peers = [each for each in self._placed() if _selects(selector, each)]
                    there = sum(self.nodes[each.node].labels.get(key) == node.labels[key] for each in peers)
                    raw[node.name] += there * weight + skew - 1
        scores = {name: round(score) for name, score in raw.items()}
        low, high = min(scores.values(), default=0), max(scores.values(), default=0)
        normal = {name: 100 * (high + low - score) // high if high else 100 for name, score in scores.items()}
        return {node.name: normal.get(node.name, 0) for node in nodes}


def pods_of(name: str, replicas: int) -> list[str]:
    """Names of a set's pods."""
    return [f"{name}-{index}" for index in range(replicas)]


def _selects(selector: Mapping[str, Any], pod: FakePod) -> bool:
    wanted = {key: [value] for key, value in selector.get("matchLabels", {}).items()}
    wanted |= {each["key"]: each["values"] for each in selector.get("matchExpressions", [])}
    return all(pod.labels.get(key) in values for key, values in wanted.items())


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect", taint["effect"]) != taint["effect"]:
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key", taint["key"]) == taint["key"]
    return toleration.get("key") == taint["key"] and toleration.get("value", "") == taint.get("value", "")
