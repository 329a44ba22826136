"""One replica's part of a dispatch: what it has, and what may be submitted to it."""

import asyncio
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from servicekit.errors import TandemError, Unavailable
from servicekit.logs import get_logger
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_clients.flow import Generation, Group, Sampling
from tandem_clients.sample_stream import OpenGroup, Sampler

log = get_logger(__name__)

# One failed stream may be an accident. After the second one a replica rests. It is not left out for good: a connection
# that is cut for a moment fails both, and a dispatch may last for hours.
MAX_FAILURES, REST_S = 2, 10.0
# As often pauses may abort a completion; a replica that does so for another reason must not be asked for ever.
MAX_RETURNS = 10


@dataclass(kw_only=True)
class Tally:
    """The figures of a dispatch's work, until they are taken.

    Attributes:
        engine_s: seconds of work of each replica's engine.
        running_s: seconds that completions ran, all together.
        most_running: completions at a time.
        resumed_tokens: after which completions continued elsewhere, or after a pause.
        failures: streams that have failed.
        errors: the last one of each replica.
    """

    engine_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    running_s: float = 0.0
    most_running: int = 0
    resumed_tokens: int = 0
    failures: int = 0
    errors: dict[str, TandemError] = field(default_factory=dict)

    def note_failure(self, lane: "Lane", error: TandemError, *, continues: bool) -> None:
        """Note that a stream has failed. continues: whether its completions do, after the tokens that came."""
        self.failures += 1
        self.errors[lane.replica.name] = error
        begun = sum(group.num_begun() for group in lane.open.values())
        left = {"unfinished": len(lane.open), "kept_tokens": begun if continues else 0}
        log.warning("generate call failed", replica=lane.replica.name, **left, error=str(error))

    def generation(self, groups: Sequence[Group], slots: int) -> Generation:
        """Return groups with these figures."""
        return Generation(
            groups=tuple(groups),
            engine_s=max(self.engine_s.values(), default=0.0),
            retried_calls=self.failures,
            call_errors=tuple(map(str, self.errors.values())),
            running_s=self.running_s,
            most_running=self.most_running,
            slots=slots,
            resumed_tokens=self.resumed_tokens,
        )


@dataclass(kw_only=True)
class Failures:
    """The streams of each replica that have failed.

    Attributes:
        counts: how many.
        errors: the last one of each; none of those that leave.
    """

    counts: Counter[Sampler] = field(default_factory=Counter)
    errors: dict[Sampler, TandemError] = field(default_factory=dict)
    _last_s: dict[Sampler, float] = field(default_factory=dict)

    def note(self, replica: Sampler, error: TandemError) -> None:
        """Note a stream that has failed."""
        self.counts[replica] += 1
        self.errors[replica], self._last_s[replica] = error, asyncio.get_running_loop().time()

    def note_leaving(self, replica: Sampler) -> None:
        """Note a replica that gets no more work."""
        self.counts[replica], self._last_s[replica] = MAX_FAILURES, math.inf
        self.errors.pop(replica, None)

    def may_work(self, replica: Sampler) -> bool:
        """Whether a replica may get a stream: each time that it has rested, one more."""
        rested_s = asyncio.get_running_loop().time() - self._last_s.get(replica, 0.0)
        return self.counts[replica] < MAX_FAILURES or rested_s >= REST_S


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
        num_tokens: that have come.
        leaves: whether the replica has said that it ends soon: it gets nothing more.
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
    num_tokens: int = 0
    leaves: bool = False
    wakes: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, load: pb.ReplicaLoad) -> None:
        """Note what the replica has said."""
        self.leaves = self.leaves or load.leaving
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

    def take_back(self, group: OpenGroup) -> None:
        """Let what was aborted wait again. Raises: Unavailable: that has been too often."""
        if group not in self.cut:
            self.cut.append(group)
        if not self.leaves and group.num_aborted >= MAX_RETURNS * group.num_completions:
            group.num_aborted = 0
            raise Unavailable(f"{self.replica.name}: group {group.group_id} was aborted {MAX_RETURNS} times")

    def end(self, sampling: Sampling) -> list[OpenGroup]:
        """Let what runs wait, and note what a replica that has answered leaves. Returns: that."""
        left = list(self.open.values())
        if self.is_noted:
            self.replica.cut = (time.time(), sum(group.num_begun() for group in left)) if left else (None, 0)
        for group in left:
            group.stop(group.running, sampling)
        return left

    def close(self, group: OpenGroup) -> None:
        """Note that a group is whole."""
        del self.open[group.group_id]
        self.prompt_tokens -= len(group.prompt.token_ids)
