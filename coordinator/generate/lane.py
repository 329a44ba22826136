"""One replica's part of a dispatch: what it has, and what may be submitted to it."""

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_clients.sample_stream import OpenGroup, Sampler


@dataclass(eq=False, kw_only=True)
class Lane:
    """One replica's part of a dispatch.

    Attributes:
        reserved: groups that wait for it to begin; others leave them to it.
        open: its groups, by id.
        cut: those of `open` of which completions wait.
        running: completions under way.
        prompt_tokens: of the prompts of `open`.
        credit: tokens that may be under way: what the KV cache takes, as completions can be as long as they may be. It
            is doubled whenever it was too little and nothing waits for room. 0: not known yet; infinite: not reported.
        is_full: whether there was no credit for a group that waits, when there was something to submit last.
        is_noted: whether the replica has said its load in this dispatch.
        wakes: set when groups are added.
    """

    replica: Sampler
    reserved: int = 0
    open: dict[str, OpenGroup] = field(default_factory=dict)
    cut: deque[OpenGroup] = field(default_factory=deque)
    running: int = 0
    prompt_tokens: int = 0
    credit: float = 0.0
    is_full: bool = False
    is_noted: bool = False
    wakes: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, load: pb.ReplicaLoad) -> None:
        """Note what the replica has said."""
        if not self.is_noted:
            self.credit, self.is_noted = load.kv_tokens or math.inf, True
        elif not load.waiting and self.is_full:
            self.credit *= 2

    def room(self, group: OpenGroup, most: int, tokens: int) -> int:
        """Return for how many completions of a group there is room; one can run in any case.

        Args:
            most: completions at a time; tokens: that each may have.
        """
        prompt_tokens = self.prompt_tokens + (0 if group.group_id in self.open else len(group.prompt.token_ids))
        fit = (self.credit - prompt_tokens) / tokens
        return max(int(min(most, fit)) - self.running, 0 if self.running else 1)

    def take(self, group: OpenGroup, most: int) -> list[int]:
        """Return completions of a group: they run here from now on."""
        if group.group_id not in self.open:
            self.open[group.group_id] = group
            self.prompt_tokens += len(group.prompt.token_ids)
        taken = group.take(most)
        self.running += len(taken)
        if group.waiting:
            self.cut.append(group)
        return taken

    def close(self, group: OpenGroup) -> None:
        """Note that a group is whole."""
        del self.open[group.group_id]
        self.prompt_tokens -= len(group.prompt.token_ids)
