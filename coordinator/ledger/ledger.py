"""The run's ledger: says what became of each sample, and restores after a crash what was finished (docs/ledger.md).

Groups begin in waves: the prompts that the data's cursor gives out at a time, for an iteration each. With `sync` and
`one_step_off` the step of an iteration is of its own wave; with `async` it may be of several.

A thread writes the records. They are on disk before the train step of their samples is sent, and before a checkpoint
after them is complete. On a disk without room the run continues with warnings, as without checkpoints.
"""

import asyncio
import contextlib
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coordinator.ledger.files import LedgerFiles
from coordinator.ledger.groups import group_record, order_digest, scores_record
from coordinator.ledger.past import Past
from coordinator.ledger.redo import step_records
from coordinator.record.state import NotWritten, RunState
from coordinator.watch import metrics
from servicekit.errors import Internal, TandemError, describe
from servicekit.logs import get_logger
from tandem_clients.flow import AdvantageResult, Generation, Group, GroupScores, Order, Prompt, TrainBatch
from tandem_files.atomic import no_check
from tandem_files.ledger.account import Unbalanced, chained
from tandem_files.ledger.reading import LedgerContent
from tandem_files.ledger.records import FORMAT, Record, framed

# Why samples are not trained.
EQUAL = "all rewards of the group are equal"
UNSCORED = "no reward"
TOO_OLD = "older than schedule.max_token_age"
LOST_POLICY = "sampled by a policy that was lost"
OLD_POLICY = "sampled by an older policy than the schedule trains on"
OTHER_ORDER = "other prompts or sampling now"
UNRECORDED = "what became of it was not recorded"

# Troubles of the ledger that it says of itself for good.
MAX_PROBLEMS = 20
# Most groups or records that are written together.
_TOGETHER = 64

log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What an earlier process has left of a wave.

    Attributes:
        groups: finished groups, by id.
        settled: ids of groups that are trained or filtered: there is nothing more to do for them.
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    settled: AbstractSet[str] = frozenset()


class Ledger:
    """The ledger of a run, which this process writes.

    Args:
        run_id: of the run's folder.
        found: what earlier processes have written.
        model: what completions depend on besides prompts and order.
        rewards: digest of what scores depend on.
        max_staleness: most versions between the policy that samples and the one that is trained.
        waves_ahead: how many waves may be under way besides the first one.
        budget: run.missed_checkpoint_budget.
        redoes: keep train steps for a trainer that is lost (redo.py).
        check: raises if another coordinator leads the run; called before each write, in a thread.
        warn: gets warnings for the run's user.
        thread: writes the records; None: one of its own.
    """

    def __init__(
        self,
        *,
        run_dir: Path,
        run_id: str,
        found: LedgerContent,
        max_mib: int,
        model: str,
        rewards: str = "",
        max_staleness: int = 0,
        waves_ahead: int = 0,
        budget: int = 0,
        redoes: bool = False,
        check: Callable[[], None] = no_check,
        warn: Callable[[str], None] = log.warning,
        thread: Executor | None = None,
    ) -> None:
        self._run_dir, self._run_id = run_dir, run_id
        self._found, self._account = found, found.account
        self._model, self._rewards = model, rewards
        self._waves_ahead = waves_ahead
        self._budget, self._redoes, self._warn = budget, redoes, warn
        self._files = LedgerFiles(run_dir, max_mib, check)
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._waiting: deque[Callable[[], object]] = deque()
        self._number = max(found.heads, default=0)
        # By segment, the last iteration whose groups it leaves to the segments before.
        self._boundaries = {
            number: head["account"]["settled_until"]
            for number, head in found.heads.items()
            if head and "settled_until" in head["account"]
        }
        # What was wrong when this process began; said further when the segments in which it was seen are gone.
        self._problems = found.problems[:MAX_PROBLEMS]
        # What the next step is of: by group, its samples, None for all.
        self._trained: dict[str, list[int] | None] = {}
        self._orders: dict[int, str] = {}  # of waves under way
        self._first_waves = dict(found.waves)  # by checkpoint
        self.past = Past(
            run_dir, found, rewards=rewards, max_staleness=max_staleness, waves_ahead=waves_ahead, warn=warn
        )
        self._has_checkpoint = False  # in the newest segment
        self._unwritten = 0

    @property
    def digest(self) -> str:
        """The digest of all train steps on the run's line."""
        return self._account.position.digest

    async def open(self, state: RunState, *, saved: int, step_id: str = "") -> None:
        """Begin this process's part, and take back what came after the iteration that the run continues from.

        Args:
            state: of the run after that iteration.
            saved: the version that its policy had then; a resume may have given it another one.
            step_id: of the step after it, which the trainer has done already.
        """
        iteration = state.iteration
        self.past.open(state, saved, step_id)
        await self._begin_segment(iteration)
        if self._found.heads or iteration:
            line = {"first": state.cursor.num_taken, "last": state.step_id, "digest": state.steps_digest}
            line |= {"wave": state.wave, "as": state.policy_version}
            self._put("resumed", iteration=iteration, version=saved, step=step_id, **line)
        for problem in self._found.problems[:1]:
            more = f", and {len(self._found.problems) - 1} more" if len(self._found.problems) > 1 else ""
            self._warn(f"ledger: {problem}{more}: `tandem ledger {self._run_dir}` lists them")
        self._problems = self._found.problems[:MAX_PROBLEMS]
        self._account.problems = None  # from now on one is an error
        for wave in self._account.open_waves():
            if wave < state.wave:
                self._drop(wave, UNRECORDED)
            elif wave > state.wave + self._waves_ahead:
                self._drop(wave, OLD_POLICY if self.past.is_known(wave) else LOST_POLICY)

    async def begin(self, wave: int, prompts: Mapping[str, Prompt], order: Order, first: int) -> Restored:
        """Note that the groups of a wave begin. Returns: what is left of them from before this process.

        Args:
            first: ordinal of the first prompt, among all that the data's cursor has given out.
        """
        if self._has_checkpoint:
            await self._begin_segment()
        ordered_now = self._orders[wave] = order_digest(prompts, order, self._model)
        under_way, settled = self.past.open_groups(wave), self.past.settled_groups(wave)
        left = {name: prompt for name, prompt in prompts.items() if name not in settled}
        version = order.policy_version
        groups = await self.past.groups(wave, ordered_now, left)
        ordered, sampled_by = self._account.orders.get(wave, ("", -1))
        is_same, is_young = ordered == ordered_now, self.past.is_young(sampled_by, wave)
        if under_way and not (is_same and is_young):
            known = self.past.is_known(wave)
            self._drop(wave, OTHER_ORDER if not is_same else OLD_POLICY if known else LOST_POLICY)
            under_way = {}
        where = {"iteration": wave, "version": version, "first": first, "order": ordered_now, "prompts": len(prompts)}
        if under_way:
            self._put("continued", **where, groups=list(groups))
        else:  # also if all are settled: its prompts are taken
            self._put("begun", **where, size=order.num_completions, groups=list(left))
            for name in groups:  # of a log that is lost
                self._put("finished", groups=[name])
        self._submit(partial(self._files.begin_groups, wave, keep=bool(groups or settled)))
        return Restored(groups=groups, settled=settled)

    def finished(self, wave: int, group: Group) -> None:
        """Keep a finished group of a wave, then note it: what the log has as finished can be restored."""
        self._keep(wave, partial(group_record, group, self._orders[wave]))
        self._put("finished", groups=[group.group_id])

    def scored(self, iteration: int, groups: Sequence[Group], scored: GroupScores) -> None:
        """Note that the groups of an iteration were scored, and keep the scores."""
        self._put("scored", iteration=iteration, samples=scored.rewards_PG.size, missing=scored.num_missing)
        names = [group.group_id for group in groups]
        wave = max(map(self._account.wave_of, names))
        self._keep(wave, partial(scores_record, scored, iteration, names, self._orders[wave], self._rewards))

    def filtered(self, iteration: int, generation: Generation, result: AdvantageResult) -> None:
        """Note the samples that are not trained on; a step has all others of the iteration."""
        filtered: dict[str, dict[str, list[int] | None]] = {EQUAL: {}, UNSCORED: {}, TOO_OLD: {}}
        self._trained = {group.group_id: None for group in generation.groups}
        left_out_PG = result.left_out_PG
        missing_PG = left_out_PG & False if result.missing_PG is None else result.missing_PG
        for place, group in enumerate(generation.groups):
            name, left_out_G, missing_G = group.group_id, left_out_PG[place], missing_PG[place]
            if result.dropped_P[place]:
                filtered[EQUAL][name] = None
                del self._trained[name]
            elif left_out_G.any():
                filtered[UNSCORED][name] = missing_G.nonzero()[0].tolist()
                filtered[TOO_OLD][name] = (left_out_G & ~missing_G).nonzero()[0].tolist()
                self._trained[name] = (~left_out_G).nonzero()[0].tolist()
        for why, found in filtered.items():
            if samples := {name: indices for name, indices in found.items() if indices != []}:
                self._put("filtered", iteration=iteration, why=why, samples=samples)

    async def step(self, iteration: int, batch: TrainBatch) -> None:
        """Note an iteration's train step, which is about to be sent, and keep it; all records are on disk then.

        A step that was sent and is not kept would leave a gap: a trainer that is lost later could not come back.

        Raises: Internal: one of its samples was trained already; NotWritten: too many records could not be written.
        """
        samples = {name: indices for name, indices in self._trained.items() if indices != []}
        digest = chained(self.digest, batch.step_id, batch.policy_version, samples)
        step, version = batch.step_id, batch.policy_version
        after = self._account.position.step_id
        self._put("step", iteration=iteration, step=step, version=version, samples=samples, digest=digest)
        await self._sync()
        if self._redoes and not self.past.sent(iteration):
            await self._on_thread(partial(self._files.keep_step, iteration, step_records(iteration, after, batch)))

    async def checkpoint(self, state: RunState) -> None:
        """Note a checkpoint of a run's state, before it is complete; a step may be noted that is not in it.

        Raises: NotWritten: that is not on disk, so it must not be.
        """
        oldest = await self._on_thread(self._files.oldest_checkpoint)
        where = {"iteration": state.iteration, "version": state.policy_version, "wave": state.wave}
        self._put("checkpoint", **where, digest=state.steps_digest, oldest=oldest)
        begins = max([number for number, after in self._boundaries.items() if after <= oldest], default=0)
        self._boundaries = {number: after for number, after in self._boundaries.items() if number >= begins}
        self._first_waves = {number: wave for number, wave in self._first_waves.items() if number >= oldest}
        self._first_waves[state.iteration] = state.wave
        self._has_checkpoint = True
        self._account.forget(state.iteration)  # this process does not go back
        try:
            await self._on_thread(self._files.sync)
        except OSError as error:
            raise NotWritten(f"the ledger's records were not written: {describe(error, advise=False)}") from error

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the loss of the trainer would cost iterations that a checkpoint would keep now."""
        return self._files.wants_checkpoint

    def checkpoint_begins(self) -> None:
        """Note that one is being written; one that is missed is not made up for."""
        self._files.wants_checkpoint = False

    async def written(self) -> None:
        """Wait until everything is written that was to be."""
        await self._on_thread(lambda: None)

    def done(self, wave: int) -> None:
        """Note that a state of the run is saved: what is needed no more is removed.

        Args:
            wave: the first that has groups under way then.
        """
        self._orders = {number: order for number, order in self._orders.items() if number >= wave}
        boundaries, firsts = dict(self._boundaries), dict(self._first_waves)
        self._submit(partial(self._files.tidy, wave, boundaries, firsts, self._waves_ahead))

    async def close(self) -> None:
        """End this process's part. Idempotent."""
        with contextlib.suppress(OSError, TandemError, RuntimeError):
            await self._on_thread(self._files.close)
        self._thread.shutdown(wait=False)

    def _drop(self, wave: int, why: str) -> None:
        """Drop all samples of a wave that are under way."""
        samples = self._account.open_samples(wave)
        log.warning("samples dropped", wave=wave, samples=sum(map(len, samples.values())), why=why)
        self._put("dropped", iteration=wave, why=why, samples=samples)

    async def _begin_segment(self, resumes_after: float = math.inf) -> None:
        number = self._number + 1
        account = self._account.snapshot(resumes_after)
        fields = {"format": FORMAT, "run_id": self._run_id, "number": number, "account": account}
        fields["problems"] = self._problems

        def head(after: int) -> bytes:
            return framed(Record(kind="segment", fields=fields | {"after": after}))

        if await self._on_thread(partial(self._files.begin_segment, number, head)):
            self._number, self._has_checkpoint = number, False
            self._boundaries[number] = account["settled_until"]

    def _put(self, kind: str, **fields: Any) -> None:
        record = Record(kind=kind, fields=fields)
        try:
            self._account.add(record)
        except Unbalanced as error:
            raise Internal(f"ledger: {error}") from error
        if kind != "finished":  # that settles no sample
            metrics.observe_samples(self._account)
        self._submit(partial(self._files.append, framed(record)))

    def _keep(self, wave: int, make: Callable[[], Record]) -> None:
        """Keep a group or scores, which the thread makes into bytes."""
        self._submit(lambda: self._files.append_groups(wave, framed(make())))

    def _submit(self, action: Callable[[], object]) -> None:
        """Let the thread do it, with what else waits for it then."""
        self._waiting.append(action)
        if len(self._waiting) == 1:
            self._thread.submit(self._work, self._waiting)

    def _work(self, waiting: deque[Callable[[], object]]) -> None:
        """Do what waits, and write the records of many actions together: groups finish in swarms."""
        for number in itertools.count(1):
            try:
                waiting[0]()
                if len(waiting) == 1 or number % _TOGETHER == 0:
                    self._files.write()
            except (OSError, TandemError) as error:  # `sync` says what the log lacks
                log.warning("ledger: not written, or not removed", error=str(error))
            except Exception:  # nothing else would tell of it
                log.exception("ledger: not written")
            waiting.popleft()
            if not waiting:
                return

    async def _on_thread(self, action: Callable[[], T]) -> T:
        self._waiting = deque()  # what comes from now on is done after the action
        return await asyncio.get_running_loop().run_in_executor(self._thread, action)

    async def _sync(self) -> None:
        """Wait until all records are on disk; without room for them, warn, unless that was too often in a row."""
        try:
            await self._on_thread(self._files.sync)
        except OSError as error:
            self._unwritten += 1
            why = describe(error, advise=False)
            if self._unwritten > self._budget:
                raise NotWritten(
                    f"the ledger's records of {self._unwritten} steps in a row were not written, and "
                    f"run.missed_checkpoint_budget is {self._budget}: {why}"
                ) from error
            self._warn(f"the ledger's records wait for room, the run continues: {why}")
        else:
            self._unwritten = 0
        while self._files.remarks:
            self._warn(f"ledger: {self._files.remarks.pop()}")
