"""The plan of a whole round: one transfer plan per rollout layout, and the hops of one communicator rank."""

from dataclasses import dataclass, replace
from functools import lru_cache

import xxhash

from weightsync.layouts.layout import Layout, Parallel
from weightsync.layouts.registry import ROLLOUT_ENGINE, TRAINER_ENGINE, layout_of
from weightsync.model.spec import ModelSpec
from weightsync.plans.messages import Hop, Message, cut_messages, route
from weightsync.plans.participants import Participants
from weightsync.plans.plan import TransferPlan, make_plan


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """Plans and messages by rollout layout, and their digest; sequence numbers are unique in the round."""

    plans: dict[Parallel, TransferPlan]
    messages: dict[Parallel, tuple[Message, ...]]
    digest: str

    def hops_of(self, rank: int, participants: Participants) -> list[Hop]:
        """List the hops of communicator rank `rank`, in order."""
        hops = []
        for parallel, names in participants.chains().items():
            firsts = [participants.first_rank[name] for name in names]
            hops += route(self.messages[parallel], participants.trainer.world_size, firsts, rank)
        return hops


@lru_cache(maxsize=4)
def source_layout(spec: ModelSpec, parallel: Parallel) -> Layout:
    """Make the sender's layout; cached, because it is the same in every round."""
    return layout_of(TRAINER_ENGINE, spec, parallel)


@lru_cache(maxsize=4)
def plan_round(spec: ModelSpec, trainer: Parallel, rollouts: tuple[Parallel, ...], max_elements: int) -> RoundPlan:
    """Plan a round for the distinct layouts of its rollouts, in chain order.

    Args:
        max_elements: largest message, in elements.
    """
    plans: dict[Parallel, TransferPlan] = {}
    messages: dict[Parallel, tuple[Message, ...]] = {}
    digest = xxhash.xxh3_128(f"{spec.fingerprint()} {max_elements}".encode())
    sequence = 0
    for parallel in rollouts:
        plan = make_plan(source_layout(spec, trainer), layout_of(ROLLOUT_ENGINE, spec, parallel))
        cut = cut_messages(plan, max_elements)
        plans[parallel] = plan
        messages[parallel] = tuple(replace(message, sequence=sequence + message.sequence) for message in cut)
        sequence += len(cut)
        digest.update(plan.digest.encode())
    return RoundPlan(plans=plans, messages=messages, digest=digest.hexdigest())
