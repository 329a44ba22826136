"""The run's ledger: says what became of each sample, and restores after a crash what was finished (docs/ledger.md).

Groups begin in waves: the prompts that the data's cursor gives out at a time, for an iteration each. With `sync` and
`one_step_off` the step of an iteration is of its own wave; with `async` it may be of several.

A thread writes the records. They are on disk before the train step of their samples is sent, and before a checkpoint
after them is complete. On a disk without room the run continues with warnings, as without checkpoints.
"""

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from coordinator.ledger.files import LedgerFiles
from coordinator.ledger.groups import group_record, order_digest, read_group, read_scores, scores_record, versions_of
from coordinator.record.state import NotWritten, RunState
from coordinator.watch import metrics
from servicekit.errors import Internal, TandemError, describe
from servicekit.logs import get_logger
from tandem_clients.flow import AdvantageResult, Generation, Group, GroupScores, Order, Prompt, TrainBatch
from tandem_files.atomic import no_check
from tandem_files.ledger.account import KEPT_VERSIONS, Unbalanced, chained
from tandem_files.ledger.reading import LedgerContent
from tandem_files.ledger.records import (
    FORMAT,
    NoRecord,
    Record,
    framed,
    groups_file,
    groups_files,
    read_records,
    wave_of_file,
)

# Why samples are not trained.
EQUAL = "all rewards of the group are equal"
UNSCORED = "no reward"
TOO_OLD = "older than schedule.max_token_age"
LOST_POLICY = "sampled by a policy that was lost"
OLD_POLICY = "sampled by an older policy than the schedule trains on"
OTHER_ORDER = "other prompts or sampling now"
UNRECORDED = "what became of it was not recorded"

# An iteration that fails so often with the same groups gets others: one of them may be the reason.
MAX_REPEATS = 2
# Troubles of the ledger that it says of itself for good.
MAX_PROBLEMS = 20

log = get_logger(__name__)
T = TypeVar("T")


# An iteration's groups in their order, and their scores.
Scored = tuple[tuple[str, ...], GroupScores]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What an earlier process has left of a wave.

    Attributes:
        groups: finished groups, by id.
        settled: ids of groups that are trained or filtered: there is nothing more to do for them.
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    settled: AbstractSet[str] = frozenset()


@dataclass(kw_only=True)
class _Kept:
    """What the file of a wave holds: finished groups by id, and scores by iteration."""

    groups: dict[str, Record] = field(default_factory=dict)
    scores: dict[int, Record] = field(default_factory=dict)
    damages: list[NoRecord] = field(default_factory=list)


class Ledger:
    """The ledger of a run, which this process writes.

    Args:
        run_id: of the run's folder.
        found: what earlier processes have written.
        model: fingerprint of the model.
        rewards: digest of what scores depend on.
        max_staleness: most versions between the policy that samples and the one that is trained.
        waves_ahead: how many waves may be under way besides the first one.
        budget: run.missed_checkpoint_budget.
        check: raises if another coordinator leads the run; called before each write, in a thread.
        warn: gets warnings for the run's user.
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
        check: Callable[[], None] = no_check,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._run_dir, self._run_id = run_dir, run_id
        self._found, self._account = found, found.account
        self._model, self._rewards = model, rewards
        self._max_staleness, self._waves_ahead = max_staleness, waves_ahead
        self._budget, self._warn = budget, warn
        self._files = LedgerFiles(run_dir, max_mib, check)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._waiting: deque[Callable[[], object]] = deque()
        self._number = max(found.heads, default=0)
        # By segment, the last iteration whose groups it leaves to the segments before.
        self._boundaries = {
            number: head["account"]["settled_until"]
            for number, head in found.heads.items()
            if head and "settled_until" in head["account"]
        }
        # The versions that policies had in an earlier process, with those that they have now.
        self._names: dict[int, int] = {}
        # What was wrong when this process began; said further when the segments in which it was seen are gone.
        self._problems = found.problems[:MAX_PROBLEMS]
        # What the next step is of: by group, its samples, None for all.
        self._trained: dict[str, list[int] | None] = {}
        self._sent = ""  # the step of the iteration after the one that this process continued from
        self._orders: dict[int, str] = {}  # of waves under way
        self._first_wave = self._last_wave = self._resumed_after = self._version = 0
        self._first_waves = dict(found.waves)  # by checkpoint
        # Of earlier processes: groups that are used again, and scores by iteration.
        self._restored: set[str] = set()
        self._scores: dict[int, list[Record]] = {}
        self._has_checkpoint = False  # in the newest segment
        self._unwritten = 0

    @property
    def digest(self) -> str:
        """The digest of all train steps on the run's line."""
        return self._account.position.digest

    def sent_step(self, iteration: int) -> str:
        """Return the id of the train step that was sent in an iteration; "": none was, or its groups are lost."""
        step = self._found.steps.get(iteration)
        # A process that was to send it again, and was killed before, has taken it back.
        again = [resume["step"] for resume in self._found.resumes[-1:]]
        if step is None or step["step"] not in (self._account.position.step_id, *again):
            return ""
        files = [_read_groups(path) for path in groups_files(self._run_dir).values()]
        kept = {name for file in files for name in file.groups}
        for scores in [file.scores[iteration] for file in files if iteration in file.scores]:
            names = set(scores.fields.get("groups") or self._account.groups_of(iteration))
            if scores.fields["rewards"] == self._rewards and step["samples"].keys() <= names <= kept:
                return str(step["step"])
        return ""

    async def open(self, state: RunState, *, saved: int, step_id: str = "") -> None:
        """Begin this process's part, and take back what came after the iteration that the run continues from.

        Args:
            state: of the run after that iteration.
            saved: the version that its policy had then; a resume may have given it another one.
            step_id: of the step after it, which the trainer has done already.
        """
        iteration, version = state.iteration, state.policy_version
        self._version = version
        self._names = dict.fromkeys(self._account.names_of(iteration, saved), version)
        if step_id:  # groups under way may have tokens of the policy after it
            self._names[saved + 1] = version + 1
        for number in range(iteration, iteration - KEPT_VERSIONS, -1):
            if (before := self._account.trained.get(number)) is not None:
                version -= 1
                for name in self._account.names_of(number - 1, before):
                    self._names.setdefault(name, version)
        self._sent, self._resumed_after, self._first_wave = step_id, iteration, state.wave
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
        self._last_wave = max(self._account.open_waves(), default=0)  # that an earlier process has begun
        for wave in self._account.open_waves():
            if wave < state.wave:
                self._drop(wave, UNRECORDED)
            elif wave > state.wave + self._waves_ahead:
                self._drop(wave, OLD_POLICY if self._is_known(wave) else LOST_POLICY)

    def sent(self, iteration: int) -> str:
        """Return the id of the step of an iteration that the trainer has done already; "": it has done none."""
        return self._sent if iteration == self._resumed_after + 1 else ""

    def size_of(self, wave: int) -> int:
        """Return how many prompts a wave took of which some groups are settled; 0: there is no such wave."""
        is_settled = wave <= self._last_wave and self._account.settled_groups(wave)
        return len(self._account.groups_of(wave)) if is_settled else 0

    def has_begun(self, wave: int) -> bool:
        """Whether an earlier process has begun a wave, of which groups are under way still."""
        return wave <= self._last_wave and bool(self._account.open_groups(wave))

    async def begin(self, wave: int, prompts: Mapping[str, Prompt], order: Order, first: int) -> Restored:
        """Note that the groups of a wave begin. Returns: what is left of them from before this process.

        Args:
            first: ordinal of the first prompt, among all that the data's cursor has given out.
        """
        if self._has_checkpoint:
            await self._begin_segment()
        ordered_now = self._orders[wave] = order_digest(prompts, order, self._model)
        is_new = wave > self._last_wave
        under_way = {} if is_new else self._account.open_groups(wave)
        settled = set() if is_new else self._account.settled_groups(wave)
        left = {name: prompt for name, prompt in prompts.items() if name not in settled}
        version = order.policy_version
        groups = await self._restored_groups(wave, left)
        ordered, sampled_by = self._account.orders.get(wave, ("", -1))
        is_same, is_young = ordered == ordered_now, self._is_young(sampled_by, wave)
        if under_way and not (is_same and is_young):
            known = self._is_known(wave)
            self._drop(wave, OTHER_ORDER if not is_same else OLD_POLICY if known else LOST_POLICY)
            under_way = {}
        where = {"iteration": wave, "version": version, "first": first, "order": ordered_now, "prompts": len(prompts)}
        if under_way:
            self._put("continued", **where, groups=list(groups))
        elif left:
            self._put("begun", **where, size=order.num_completions, groups=list(left))
            for name in groups:  # of a log that is lost
                self._put("finished", groups=[name])
        self._submit(partial(self._files.begin_groups, wave, keep=bool(groups or settled)))
        return Restored(groups=groups, settled=settled)

    async def _restored_groups(self, wave: int, prompts: Mapping[str, Prompt]) -> Mapping[str, Group]:
        """Return what is left of a wave from before this process, and keep its scores in mind."""
        if wave > self._first_wave + self._waves_ahead:
            return {}
        kept = await asyncio.to_thread(_read_groups, groups_file(self._run_dir, wave))
        for damage in kept.damages[:1]:
            self._warn(f"ledger: {damage}: what it held is generated anew")
        groups = await asyncio.to_thread(self._restore, wave, kept, prompts)
        if groups and len(groups) == len(prompts) and self._found.repeats[wave] >= MAX_REPEATS and not self._sent:
            self._warn(f"iteration {wave} has failed with the same groups again: they are generated anew")
            return {}
        if groups:
            log.info("groups restored", wave=wave, groups=len(groups), of=len(prompts))
        self._restored.update(groups)
        for iteration, scores in kept.scores.items():
            scored = scores.fields.get("groups", prompts)
            fields = {**scores.fields, "groups": tuple(scored)}
            self._scores.setdefault(iteration, []).append(Record(kind="scores", fields=fields))
        return groups

    def finished(self, wave: int, group: Group) -> None:
        """Note a finished group of a wave, and keep it."""
        self._put("finished", groups=[group.group_id])
        self._keep(wave, partial(group_record, group, self._orders[wave]))

    def restored_scores(self, iteration: int) -> Scored | None:
        """Return the scores that an earlier process has given in an iteration; None: to other groups, or by others."""
        for record in self._scores.get(iteration, ()):
            names, sent = (
                record.fields["groups"],
                self._found.steps[iteration]["samples"] if self.sent(iteration) else (),
            )
            is_same = record.fields["rewards"] == self._rewards and set(names).issuperset(sent)
            if is_same and self._restored.issuperset(names):
                return names, read_scores(record)
        return None

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
        """Note an iteration's train step, which is about to be sent; all records are on disk then.

        Raises: Internal: one of its samples was trained already; NotWritten: too many records could not be written.
        """
        samples = {name: indices for name, indices in self._trained.items() if indices != []}
        digest = chained(self.digest, batch.step_id, batch.policy_version, samples)
        step, version = batch.step_id, batch.policy_version
        self._put("step", iteration=iteration, step=step, version=version, samples=samples, digest=digest)
        await self._sync()

    async def checkpoint(self, state: RunState) -> None:
        """Note a checkpoint of a run's state, before it is complete; a step may be noted that is not in it.

        Raises: NotWritten: that is not on disk, so it must not be.
        """
        oldest = await self._on_thread(self._files.oldest_checkpoint)
        where = {"iteration": state.iteration, "version": state.policy_version, "wave": state.wave}
        self._put("checkpoint", **where, digest=state.steps_digest, oldest=oldest)
        self._first_waves[state.iteration] = state.wave
        self._has_checkpoint = True
        try:
            await self._on_thread(self._files.sync)
        except OSError as error:
            raise NotWritten(f"the ledger's records were not written: {describe(error, advise=False)}") from error

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

    def _is_known(self, wave: int) -> bool:
        """Whether the policy with which a wave began is one of those that are known."""
        return self._account.orders.get(wave, ("", -1))[1] in self._names

    def _is_young(self, name: int, wave: int) -> bool:
        """Whether a policy of an earlier process is known, and not too old when the turn of a wave comes."""
        waits = wave - self._first_wave
        return name in self._names and self._version - self._names[name] + waits <= self._max_staleness

    def _restore(self, wave: int, kept: _Kept, prompts: Mapping[str, Prompt]) -> dict[str, Group]:
        """Return what is left of a wave that was ordered as now."""
        order = self._orders[wave]
        return {
            name: read_group(record, prompts[name], self._names)
            for name, record in kept.groups.items()
            if name in prompts
            and record.fields["order"] == order
            and all(self._is_young(one, wave) for one in versions_of(record))
        }

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
        """Let the thread do it, with what else waits for it then: groups finish in swarms."""
        self._waiting.append(action)
        if len(self._waiting) == 1:
            self._thread.submit(self._work)

    def _work(self) -> None:
        while self._waiting:
            try:
                self._waiting[0]()
            except (OSError, TandemError) as error:  # `sync` says what the log lacks
                log.warning("ledger: not written, or not removed", error=str(error))
            except Exception:  # nothing else would tell of it
                log.exception("ledger: not written")
            self._waiting.popleft()

    async def _on_thread(self, action: Callable[[], T]) -> T:
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


def _read_groups(path: Path) -> _Kept:
    """Read a file of finished groups; nothing if there is none that can be read."""
    kept, wave = _Kept(), wave_of_file(path)
    try:
        for record in read_records(path):
            if isinstance(record, NoRecord):
                kept.damages.append(record)
            elif record.kind == "group":
                kept.groups[record.fields["group"]] = record
            elif record.kind == "scores":
                kept.scores[record.fields.get("iteration", wave)] = record
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("finished groups not read", error=str(error))
    return kept
