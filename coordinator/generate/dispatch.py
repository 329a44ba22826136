"""Step 2: prompts to groups of completions, spread over the rollout replicas.

A chunk of groups is one call to one replica; a group is in one chunk at a time, so it is kept once.

a call fails                         its unfinished groups go to the replica that has failed least
a replica fails MAX_FAILURES calls   it gets no more work of this dispatch; its next process counts as a new replica
groups wait, all replicas are busy   replicas that join are seeded and take them (joiners.py)
no replica is left, one is lost      the dispatch waits for one to join, up to Patience.rejoin_s without a new group, in
                                     which no replica is queued
no replica is left, none is lost     all are present but fail, so none will join: the dispatch fails after probe_s
"""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from coordinator.generate.joiners import Joiners, Patience, Seed
from coordinator.watch import metrics
from servicekit.errors import DeadlineExceeded, InvalidRequest, TandemError, TooLarge, Unavailable
from servicekit.lifecycle.tasks import cancel
from servicekit.logs import get_logger
from servicekit.rpc.limits import MAX_COMPLETIONS_PER_CALL
from tandem_clients.fleet import Fleet
from tandem_clients.flow import Generation, Group, Order, Prompt
from tandem_clients.probing import while_alive
from tandem_clients.replica import Replica

# One failed call may be an accident; a replica that fails every call costs a dispatch two of them.
MAX_FAILURES = 2

NOTHING: Mapping[str, Group] = {}

log = get_logger(__name__)


def ignore(group: Group) -> None:
    """Do nothing with a finished group, which `generate` returns."""


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """The rollout replicas as one service.

    Attributes:
        fleet: its serving replicas get work.
        max_groups_per_call: most groups that a replica accepts in one call.
        timeout_s: deadline of one call.
        patience: how long to wait for a replica that does not answer, and for one to join when none is left.
        seed: brings a version to replicas that join (WeightSync.seed_late_joiners); None: replicas cannot join.
        warn: gets a message for the operator when no replica is left, and when one joins.
    """

    fleet: Fleet
    max_groups_per_call: int
    timeout_s: float
    patience: Patience = field(default_factory=Patience)
    seed: Seed | None = None
    warn: Callable[[str], None] = log.warning

    async def generate(
        self,
        prompts: Mapping[str, Prompt],
        order: Order,
        have: Mapping[str, Group] = NOTHING,
        finished: Callable[[Group], None] = ignore,
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
        # Balanced: as many equal chunks as whole rounds over the replicas need.
        most = min(self.max_groups_per_call, max(1, MAX_COMPLETIONS_PER_CALL // order.num_completions))
        ids = [group_id for group_id in prompts if group_id not in have]
        num_chunks = max(1, len(self.fleet.serving()), -(-len(ids) // most))
        size = max(1, -(-len(ids) // num_chunks))
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        return await _Dispatch(self, prompts, order, have, finished).run(chunks)


class _Dispatch:
    """One dispatch of an order: the calls to replicas, the groups received, the failures of each replica."""

    def __init__(
        self,
        rollouts: Rollouts,
        prompts: Mapping[str, Prompt],
        order: Order,
        have: Mapping[str, Group],
        finished: Callable[[Group], None],
    ) -> None:
        self._fleet, self._patience, self._warn = rollouts.fleet, rollouts.patience, rollouts.warn
        self._timeout_s = rollouts.timeout_s
        self._prompts = prompts
        self._order = order
        self._joiners = Joiners(rollouts.seed, order.policy_version, self._any_free, interval_s=self._patience.look_s)
        self._replicas = list(self._fleet.serving())  # that have taken part, lost ones included
        self._pending: deque[list[str]] = deque()
        self._running: dict[asyncio.Task[list[str]], Replica] = {}
        self._groups = dict(have)
        self._finished = finished
        self._engine_s: defaultdict[str, float] = defaultdict(float)
        self._failures: Counter[Replica] = Counter()
        self._errors: dict[Replica, TandemError] = {}
        self._stalled_since_s: float | None = None  # no replica works, and no group has come since
        self._one_is_lost = False

    async def run(self, chunks: Sequence[list[str]]) -> Generation:
        """Hand chunks out until every group is finished. Raises: as `Rollouts.generate`."""
        self._pending.extend(chunks)
        try:
            while self._pending or self._running:
                self._start_calls()
                await self._wait()
                if not self._running:
                    await self._check_patience()
            await self._joiners.end()
        finally:
            await self._joiners.drop()
            await cancel(*self._running)
        return Generation(
            groups=tuple(self._groups[group_id] for group_id in self._prompts),
            engine_s=max(self._engine_s.values(), default=0.0),
            retried_calls=self._failures.total(),
            call_errors=tuple(map(str, self._errors.values())),
        )

    def _start_calls(self) -> None:
        """Give a chunk to every replica without a call, first to those that have failed least."""
        for replica in sorted(self._free(), key=lambda replica: self._failures[replica]):
            if not self._pending:
                return
            if replica not in self._replicas:
                self._add_joiner(replica)
            task = asyncio.create_task(self._call(replica, self._pending.popleft()), name=f"generate-{replica.name}")
            self._running[task] = replica

    def _free(self) -> list[Replica]:
        """Return the replicas that may get a call now; one that is leaving finishes its call and gets no other."""
        busy = set(self._running.values())
        return [
            replica
            for replica in self._fleet.serving()
            if replica not in busy and self._failures[replica] < MAX_FAILURES
        ]

    def _any_free(self) -> bool:
        return bool(self._free())

    def _add_joiner(self, joiner: Replica) -> None:
        self._replicas.append(joiner)
        metrics.DISPATCH_JOINERS.inc()
        self._warn(f"{joiner.name} joined and is seeded: it generates groups that were waiting")

    async def _wait(self) -> None:
        """Wait until a call has ended or a replica has joined; only briefly if no replica works."""
        joining = self._joiners.look() if self._pending else None
        tasks: set[asyncio.Task[list[str]] | asyncio.Task[None]] = {*self._running}
        if joining is not None:
            tasks.add(joining)
        if not tasks:
            raise self._exhausted()
        timeout_s = None if self._running else min(self._patience.look_s, self._patience.rejoin_s)
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in [task for task in self._running if task.done()]:
            del self._running[task]
            if unfinished := task.result():
                self._pending.appendleft(unfinished)
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
        now_s = time.monotonic()
        if self._stalled_since_s is None:
            self._stalled_since_s = now_s
            metrics.DISPATCH_STALLS.inc()
            stalled = (
                f"no replica is left: waiting for one to join (rollout.rejoin_timeout_s, {self._patience.rejoin_s:g} s)"
            )
            self._warn(f"{stalled}; {self._describe_missing()}")
        if self._patience.is_queued():
            self._stalled_since_s = now_s
        self._one_is_lost = self._one_is_lost or await self._is_one_lost()
        patience_s = self._patience.rejoin_s
        if not self._one_is_lost:
            patience_s = min(patience_s, self._patience.probe_s)
        if now_s - self._stalled_since_s >= patience_s:
            raise self._exhausted()

    async def _is_one_lost(self) -> bool:
        """Whether a replica has left or does not answer, or there was none: then another may join."""
        serving = self._fleet.serving()
        if not self._replicas or any(replica not in serving for replica in self._replicas):
            return True
        calls = (replica.status(timeout_s=self._patience.probe_s) for replica in serving)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return any(isinstance(answer, BaseException) for answer in answers)

    async def _call(self, replica: Replica, group_ids: Sequence[str]) -> list[str]:
        """Ask one replica for groups. Returns: the ids of those that it did not deliver."""
        error: TandemError | None = None
        try:
            await while_alive(self._receive(replica, group_ids), replica, probe_timeout_s=self._patience.probe_s)
        except (InvalidRequest, TooLarge):
            raise
        except TandemError as failure:
            error = failure
        unfinished = [group_id for group_id in group_ids if group_id not in self._groups]
        if unfinished and error is None:
            error = Unavailable(f"{replica.name}: left {len(unfinished)} of {len(group_ids)} groups unfinished")
        if error is not None:
            self._failures[replica] += 1
            self._errors[replica] = error
            log.warning("generate call failed", replica=replica.name, unfinished=len(unfinished), error=str(error))
        return unfinished

    async def _receive(self, replica: Replica, group_ids: Sequence[str]) -> None:
        asked = {group_id: self._prompts[group_id] for group_id in group_ids}
        before_s = self._engine_s[replica.name]
        async with aclosing(replica.generate(asked, self._order, timeout_s=self._timeout_s)) as parts:
            async for part in parts:
                self._engine_s[replica.name] = before_s + part.engine_s
                for group in part.groups:
                    self._groups[group.group_id] = group
                    self._finished(group)
                    self._stalled_since_s, self._one_is_lost = None, False

    def _exhausted(self) -> Unavailable:
        waited = f"; none came within {self._patience.rejoin_s:g} s (rollout.rejoin_timeout_s)"
        return Unavailable(self._describe_missing() + (waited if self._one_is_lost else ""))

    def _describe_missing(self) -> str:
        """Return how many groups are missing, and the last error of each replica."""
        missing = len(self._prompts) - len(self._groups)
        errors = [self._errors.get(replica) or f"{replica.name}: left the fleet" for replica in self._replicas]
        why = (
            f"every replica failed: {'; '.join(map(str, errors))}" if errors else "no replica serves the current policy"
        )
        return f"{missing} of {len(self._prompts)} groups could not be generated, {why}"
