"""Step 2: prompts to groups of completions, spread over the rollout replicas.

Each replica has a stream. It gets as many completions at a time as its KV cache takes, and no more than its share of
those that run or wait. A group is at one replica at a time, so it is kept once.

a stream fails                       what it has brought is kept: finished completions, and the others' tokens, after
                                     which they continue (not with stop texts or a repetition penalty). The groups go to
                                     the replica that has failed least
a pause aborts completions           they continue in the same way, and it is no failure
a replica says that it leaves        it gets no more; what runs there continues elsewhere, if it can and another serves
a replica fails MAX_FAILURES streams   it rests for REST_S before each further one; its next process counts as a new one
groups wait, all replicas are busy   replicas that join are seeded and take them (joiners.py)
no replica is left, one is lost      the dispatch waits for one to join, up to Patience.rejoin_s without a new group, or
                                     tokens that are kept, in which no replica is queued
no replica is left, none is lost     all are present but fail, so none will join: the dispatch fails after probe_s
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakKeyDictionary

from coordinator.generate.joiners import Joiners, Patience, Seed
from coordinator.generate.lane import Failures, Lane, Tally
from coordinator.generate.turns import Interacting, Turns, opened
from coordinator.watch import metrics
from servicekit.errors import DeadlineExceeded, InvalidRequest, TandemError, TooLarge, Unavailable
from servicekit.lifecycle.background import BackgroundTask
from servicekit.lifecycle.tasks import cancel, first_of
from servicekit.logs import get_logger
from servicekit.rpc.limits import MAX_COMPLETIONS_PER_CALL
from tandem_clients.flow import Generation, Group, Order, Prompt
from tandem_clients.probing import while_alive
from tandem_clients.sample_stream import MalformedReply, OpenGroup, Sampler, SampleStream, ServingFleet

NOTHING: Mapping[str, Group] = {}

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollout replicas as one service.

    Attributes:
        fleet: its serving replicas get work.
        max_groups_per_call: a replica has at most as many completions at a time as so many groups have.
        timeout_s: a replica is given up if it brings no token for so long.
        slots: completions that a replica's engine runs at a time, others wait; 0: not known.
        patience: how long to wait for a replica that does not answer, and for one to join when none is left.
        seed: brings a version to replicas that join (WeightSync.seed_late_joiners); None: the trainer cannot now.
        warn: gets a message for the operator when no replica is left, and when one joins.
        environments: answer between turns; None: every completion has one.
    """

    fleet: ServingFleet
    max_groups_per_call: int
    timeout_s: float
    slots: int = 0
    patience: Patience = field(default_factory=Patience)
    seed: Seed | None = None
    warn: Callable[[str], None] = log.warning
    environments: Interacting | None = None
    # What the KV cache of each replica takes, so that the next dispatch need not wait to hear it.
    rooms: WeakKeyDictionary[Sampler, float] = field(default_factory=WeakKeyDictionary, repr=False)

    async def generate(
        self,
        prompts: Mapping[str, Prompt],
        order: Order,
        have: Mapping[str, Group] = NOTHING,
        finished: Callable[[Group], None] = lambda group: None,
    ) -> Generation:
        """Sample `order.num_completions` completions for each prompt.

        Args:
            prompts: prompts by group id.
            have: groups that need not be sampled.
            finished: called with each group when it is finished.
        Returns: groups in the prompts' order.
        Raises:
            InvalidRequest, TooLarge: a replica refuses the request; repeating it would not help.
            Unavailable: no replica is left, and none joined in time; the message has the last error of each.
            TandemError: seeding a joiner failed for good, while no other replica works.
        """
        dispatch = Dispatch(self, order, finished)
        prompts = await opened(self.environments, prompts)
        dispatch.add([(name, prompt) for name, prompt in prompts.items() if name not in have])
        await dispatch.run()
        groups = {**have, **dispatch.groups}
        return dispatch.generation([groups[name] for name in prompts])


class Dispatch:
    """Groups under way: the streams of replicas, the groups received, the failures of each replica.

    Args:
        finished: called with each group when it is finished.
        lasts: groups are added as long as the run lasts, and what is finished is not kept here. The policy may change
            meanwhile, within a completion too.
    Attributes:
        groups: finished ones, by id.
    """

    def __init__(
        self, rollouts: Rollouts, order: Order, finished: Callable[[Group], None], *, lasts: bool = False
    ) -> None:
        self._fleet, self._patience, self._warn = rollouts.fleet, rollouts.patience, rollouts.warn
        self._rooms = rollouts.rooms
        self._timeout_s, self._slots = rollouts.timeout_s, rollouts.slots
        self._tally = Tally()
        self._turns = Turns(rollouts.environments, self._answered, self._wake)
        self._most_groups = rollouts.max_groups_per_call
        self._most = min(self._most_groups * order.num_completions, MAX_COMPLETIONS_PER_CALL)
        self._order, self._lasts = order, lasts
        self._joiners = Joiners(rollouts.seed, order.policy_version, self._any_free, interval_s=self._patience.look_s)
        self._replicas = list(self._fleet.serving())  # that have taken part, lost ones included
        self._pending: deque[OpenGroup] = deque()
        self._num_open = self._num_added = self._num_running = self._num_replicas = self._num_reserved = 0
        self._added = asyncio.Event()
        self._running: dict[asyncio.Task[None], Lane] = {}
        self.groups: dict[str, Group] = {}
        self._finished = finished
        self._failures = Failures()
        self._stalled_since_s: float | None = None  # no replica works, and nothing that stays has come since
        self._one_is_lost = False

    def add(self, prompts: Iterable[tuple[str, Prompt]]) -> None:
        """Let groups begin, by id: after those that wait already."""
        begun = partial(OpenGroup, num_completions=self._order.num_completions, takes_turns=self._turns.are_taken)
        groups = [begun(group_id=name, prompt=prompt) for name, prompt in prompts]
        self._pending.extend(groups)
        self._num_open += len(groups)
        self._num_added += len(groups)
        self._wake()

    async def run(self) -> None:
        """Hand groups out until every one is finished. Raises: as `Rollouts.generate`."""
        try:
            while self._num_open and (self._pending or self._running or self._turns):
                await self._work()
            await self._joiners.end()
        finally:
            await self._end()

    async def last(self) -> None:
        """Hand groups out that are added, until this is cancelled. Raises: as `Rollouts.generate`."""
        try:
            while True:
                while not self._pending and not self._running:
                    self._added.clear()
                    await self._added.wait()
                await self._work()
        finally:
            await self._end()

    async def _end(self) -> None:
        await self._joiners.drop()
        await cancel(*self._running)
        await self._turns.close()

    def renew(self, policy_version: int) -> None:
        """Sample from this version, or newer ones, from now on; replicas that have failed are tried again."""
        self._order = replace(self._order, policy_version=policy_version)
        self._failures.counts.clear()

    def generation(self, groups: Sequence[Group]) -> Generation:
        """Return groups with the figures of the work since the last call."""
        tally, self._tally = self._tally, Tally(most_running=self._num_running)
        return tally.generation(groups, self._slots * len(self._fleet.serving()))

    def under_way(self) -> str:
        """Say what each replica has to do."""
        lanes = [f"{lane.replica.name} has {lane.running} completions" for lane in self._running.values()]
        return f"{', '.join(lanes) or 'no replica has work'}, {len(self._pending)} groups wait for a replica"

    async def _work(self) -> None:
        """Start streams, and wait until something has ended."""
        self._added.clear()
        self._start_lanes()
        await self._wait()
        if not self._running:
            await self._check_patience()

    def _start_lanes(self) -> None:
        """Give each replica a stream, first those that have failed least."""
        free = sorted(self._free(), key=lambda replica: self._failures.counts[replica])
        self._num_replicas = len(self._running) + len(free)
        for number, replica in enumerate(free if self._pending else ()):
            if replica not in self._replicas:
                self._replicas.append(replica)
                metrics.DISPATCH_JOINERS.inc()
                self._warn(f"{replica.name} joined and is seeded: it generates groups that were waiting")
            reserved = max(0, -(-(len(self._pending) - self._num_reserved) // (len(free) - number)))
            self._num_reserved += reserved
            lane = Lane(replica=replica, reserved=reserved, credit=self._rooms.get(replica, 0.0))
            task = asyncio.create_task(self._run_lane(lane), name=f"generate-{replica.name}")
            self._running[task] = lane

    def _free(self) -> list[Sampler]:
        """Return the replicas that may get a stream now; one that is leaving finishes what it has and gets no more."""
        busy = {lane.replica for lane in self._running.values()}
        return [one for one in self._fleet.serving() if one not in busy and self._failures.may_work(one)]

    def _any_free(self) -> bool:
        return bool(self._free())

    async def _wait(self) -> None:
        """Wait until a stream has ended or a replica has joined; only briefly: groups may have begun to wait."""
        joining = self._joiners.look() if len(self._pending) > self._num_reserved else None
        tasks = {*self._running} if joining is None else {*self._running, joining}
        timeout_s = self._patience.look_s if self._running else min(self._patience.look_s, self._patience.rejoin_s)
        async with BackgroundTask(self._added.wait) as adding:
            await asyncio.wait({*tasks, *adding.tasks()}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        self._turns.check()
        for task in [task for task in self._running if task.done()]:
            lane = self._running.pop(task)
            self._num_running -= lane.running
            self._num_reserved -= lane.reserved
            self._pending.extendleft(group for group in reversed(lane.open.values()) if group.waiting)
            task.result()
        if joining is not None and joining.done():
            self._check(joining)

    def _check(self, joining: "asyncio.Task[None]") -> None:
        try:
            joining.result()
        except DeadlineExceeded as error:
            raise Unavailable(f"{self._describe_missing()}; {error}") from error

    async def _check_patience(self) -> None:
        """Called while no replica works. Raises: Unavailable: none has worked for too long."""
        if not self._pending or self._any_free():
            return
        if not self._patience.rejoin_s:  # none is waited for
            raise self._exhausted()
        now_s = asyncio.get_running_loop().time()
        if self._stalled_since_s is None:
            self._stalled_since_s = now_s
            metrics.DISPATCH_STALLS.inc()
            wait = f"waiting for one to join (rollout.rejoin_timeout_s, {self._patience.rejoin_s:g} s)"
            self._warn(f"no replica is left: {wait}; {self._describe_missing()}")
        if self._patience.is_queued():
            self._stalled_since_s = now_s
        self._one_is_lost = self._one_is_lost or await self._is_one_lost()
        most_s = (self._patience.rejoin_s,) if self._one_is_lost else (self._patience.rejoin_s, self._patience.probe_s)
        if now_s - self._stalled_since_s >= min(most_s):
            raise self._exhausted()

    async def _is_one_lost(self) -> bool:
        """Whether a replica has left or does not answer, or there was none: then another may join."""
        serving = self._fleet.serving()
        leaves = (one for one in self._replicas if self._failures.counts[one] and one not in self._failures.errors)
        if not self._replicas or any(leaves) or any(replica not in serving for replica in self._replicas):
            return True
        calls = (replica.status(timeout_s=self._patience.probe_s) for replica in serving)
        return any(isinstance(one, BaseException) for one in await asyncio.gather(*calls, return_exceptions=True))

    async def _run_lane(self, lane: Lane) -> None:
        """Let one replica sample until nothing is left for it. What it leaves unfinished can continue elsewhere."""
        replica, error = lane.replica, None
        try:
            await while_alive(self._sample(lane), replica, probe_timeout_s=self._patience.probe_s)
        except (InvalidRequest, TooLarge):
            raise
        except TandemError as failure:
            error = failure
            if failure.after_s:  # its stream is not opened again before
                await first_of({"nothing": asyncio.Event()}, timeout_s=failure.after_s)
        if lane.num_tokens and self._order.sampling.can_continue and not isinstance(error, MalformedReply):
            self._stalled_since_s = None  # they are not sampled again: there is an end
        for group in lane.end(self._order.sampling):
            self._turns.begin(group)
        for group in [group for group in lane.open.values() if group.is_whole()]:  # came with what has failed
            lane.close(group)
            self._keep(group.group())
        if error is None and lane.open and not lane.leaves:
            error = Unavailable(f"{replica.name}: left {len(lane.open)} groups unfinished")
        if error is not None and lane.leaves:  # e.g. we wrote as it closed the stream: gRPC hides why
            log.warning("stream of a replica that leaves: failed", replica=replica.name, error=str(error))
        elif error is not None:
            self._failures.note(replica, error)
            self._tally.note_failure(lane, error, continues=self._order.sampling.can_continue)

    async def _sample(self, lane: Lane) -> None:
        seen_s, looked_s = 0.0, asyncio.get_running_loop().time()
        sampling = lane.replica.sampling(self._order, timeout_s=self._timeout_s, newer=self._lasts)
        async with sampling as stream, BackgroundTask(partial(self._feed, lane, stream)) as feeding:
            async for news in stream.news():
                self._tally.engine_s[lane.replica.name] += news.engine_s - seen_s
                seen_s = news.engine_s
                running = lane.running if lane.running < self._slots else self._slots
                self._tally.running_s += (stream.read_s - looked_s) * running
                looked_s = stream.read_s
                lane.num_tokens = stream.num_tokens
                for group in news.whole:
                    lane.close(group)
                    self._keep(group.group())
                for group in news.aborted:
                    lane.take_back(group)
                for group in news.ended:
                    self._turns.begin(group)
                if news.load is not None:
                    feeding.check()
                    lane.note(news.load)
                    self._rooms[lane.replica] = news.load.kv_tokens or math.inf
                    await self._let_leave(lane, stream)
                lane.running -= news.num_ended
                self._num_running -= news.num_ended
                if news.num_ended or news.load is not None:
                    if parts := self._next_parts(lane):
                        await stream.submit(parts)
                    elif not lane.open or (lane.leaves and not lane.running):
                        return

    async def _let_leave(self, lane: Lane, stream: SampleStream) -> None:
        """Take back what runs on a replica that leaves; what cannot continue elsewhere ends there."""
        if lane.leaves:
            self._failures.note_leaving(lane.replica)
            others = (one for one in self._fleet.serving() if self._failures.may_work(one))
            if self._order.sampling.can_continue and any(others):
                await stream.hand_over()

    async def _feed(self, lane: Lane, stream: SampleStream) -> None:
        """Submit what there is room for: at the beginning, and when groups are added."""
        while True:
            if lane.credit and (parts := self._next_parts(lane)):
                await stream.submit(parts)
            await lane.wakes.wait()
            lane.wakes.clear()

    def _answered(self, group: OpenGroup) -> None:
        """Let a group continue where it is, or else anywhere; or keep it."""
        self._stalled_since_s = None
        lane = next((lane for lane in self._running.values() if group.group_id in lane.open), None)
        if group.is_whole():
            if lane is not None:
                lane.close(group)
            self._keep(group.group())
        elif group.waiting and group not in (waiting := self._pending if lane is None else lane.cut):
            waiting.appendleft(group)

    def _wake(self) -> None:
        """Let everything that waits for completions look again."""
        self._added.set()
        for lane in self._running.values():
            lane.wakes.set()

    def _keep(self, group: Group) -> None:
        self._num_open -= 1
        if not self._lasts:
            self.groups[group.group_id] = group
        self._finished(group)
        self._stalled_since_s, self._one_is_lost = None, False

    def _next_parts(self, lane: Lane) -> list[tuple[OpenGroup, list[int]]]:
        """Take the completions for which the replica has room: of groups that it has begun, then of others."""
        parts: list[tuple[OpenGroup, list[int]]] = []
        lane.is_full = False
        while not lane.leaves and len(parts) < self._most_groups and (source := lane.cut or self._pending):
            if source is self._pending and not self._may_take(lane):
                break
            if not (room := lane.room(source[0], self._most, self._order.sampling.max_new_tokens)):
                lane.is_full = True
                break
            if source is self._pending and lane.reserved:
                lane.reserved, self._num_reserved = lane.reserved - 1, self._num_reserved - 1
            group = source.popleft()
            taken = lane.take(group, room)
            if group.found:
                self._tally.resumed_tokens += group.num_resumed(taken)
            self._num_running += len(taken)
            self._tally.most_running = max(self._tally.most_running, self._num_running)
            parts.append((group, taken))
        self._num_reserved -= lane.reserved
        lane.reserved = 0
        return parts

    def _may_take(self, lane: Lane) -> bool:
        """Whether a replica, which stays, has less than its share of the completions that run or wait."""
        if lane.replica not in self._fleet.serving():
            return False
        share = (len(self._pending) * self._order.num_completions + self._num_running) / max(1, self._num_replicas)
        return lane.reserved > 0 or (len(self._pending) > self._num_reserved and lane.running < share)

    def _exhausted(self) -> Unavailable:
        waited = f"; none came within {self._patience.rejoin_s:g} s (rollout.rejoin_timeout_s)"
        return Unavailable(self._describe_missing() + (waited if self._one_is_lost else ""))

    def _describe_missing(self) -> str:
        """Return how many groups are missing, and the last error of each replica."""
        errors = [self._failures.errors.get(replica) or f"{replica.name}: left the fleet" for replica in self._replicas]
        why = (
            f"every replica failed: {'; '.join(map(str, errors))}" if errors else "no replica serves the current policy"
        )
        return f"{self._num_open} of {self._num_added} groups could not be generated, {why}"
