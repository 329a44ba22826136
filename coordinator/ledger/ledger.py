"""The run's ledger: says what became of each sample, and restores after a crash what was finished (docs/ledger.md).

A thread writes the records. They are on disk before the train step of their samples is sent, and before a checkpoint
after them is complete. On a disk without room the run continues with warnings, as without checkpoints.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping
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
from tandem_files.ledger.account import Unbalanced, chained
from tandem_files.ledger.reading import LedgerContent
from tandem_files.ledger.records import FORMAT, NoRecord, Record, framed, groups_file, read_records

# Why samples are not trained.
EQUAL = "all rewards of the group are equal"
UNSCORED = "no reward"
LOST_POLICY = "sampled by a policy that was lost"
OTHER_ORDER = "other prompts or sampling now"
UNRECORDED = "what became of it was not recorded"

# An iteration that fails so often with the same groups gets others: one of them may be the reason.
MAX_REPEATS = 2
# Troubles of the ledger that it says of itself for good.
MAX_PROBLEMS = 20

log = get_logger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What an earlier process has left of an iteration.

    Attributes:
        groups: finished groups, by id.
        scored: their scores, if all are finished and were scored as they would be now.
        step_id: of the train step that the trainer has done with them; "": of none.
    """

    groups: Mapping[str, Group] = field(default_factory=dict)
    scored: GroupScores | None = None
    step_id: str = ""


@dataclass(kw_only=True)
class _Kept:
    """What the file of an iteration's finished groups holds."""

    groups: dict[str, Record] = field(default_factory=dict)
    scores: Record | None = None
    damages: list[NoRecord] = field(default_factory=list)


class Ledger:
    """The ledger of a run, which this process writes.

    Args:
        run_id: of the run's folder.
        found: what earlier processes have written.
        model: fingerprint of the model.
        rewards: digest of what scores depend on.
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
        budget: int = 0,
        check: Callable[[], None] = no_check,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self._run_dir, self._run_id = run_dir, run_id
        self._found, self._account = found, found.account
        self._model, self._rewards = model, rewards
        self._budget, self._warn = budget, warn
        self._files = LedgerFiles(run_dir, max_mib, check)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")
        self._waiting: deque[Callable[[], object]] = deque()
        self._number = max(found.heads, default=0)
        # By segment that begins between iterations, the one before it.
        self._boundaries = {
            number: head["account"]["position"]["iteration"]
            for number, head in found.heads.items()
            if head and not head["account"]["under_way"]
        }
        self._names: set[int] = set()
        # What was wrong when this process began; said further when the segments in which it was seen are gone.
        self._problems = found.problems[:MAX_PROBLEMS]
        # What the next step is of: by group, its samples, None for all.
        self._trained: dict[str, list[int] | None] = {}
        self._sent, self._order = "", ""
        self._iteration = self._resumed_after = 0
        self._has_checkpoint = False  # in the newest segment
        self._unwritten = 0

    @property
    def digest(self) -> str:
        """The digest of all train steps on the run's line."""
        return self._account.position.digest

    def sent_step(self, iteration: int) -> str:
        """Return the id of the train step that was sent in an iteration; "": none was, or its groups are lost."""
        step = self._found.steps.get(iteration)
        if step is None or step["step"] != self._account.position.step_id:
            return ""
        kept = _read_groups(groups_file(self._run_dir, iteration))
        is_scored = kept.scores is not None and kept.scores.fields["rewards"] == self._rewards
        has_all = kept.groups.keys() >= set(self._account.groups_of(iteration))
        return str(step["step"]) if is_scored and has_all else ""

    async def open(self, state: RunState, *, saved: int, step_id: str = "") -> None:
        """Begin this process's part, and take back what came after the iteration that the run continues from.

        Args:
            state: of the run after that iteration.
            saved: the version that its policy had then; a resume may have given it another one.
            step_id: of the step after it, which the trainer has done already.
        """
        iteration = state.iteration
        self._names = self._found.names_of(iteration, saved)
        self._sent, self._resumed_after = step_id, iteration
        await self._begin_segment()
        if self._found.heads or iteration:
            line = {"first": state.cursor.num_taken, "last": state.step_id, "digest": state.steps_digest}
            self._put(
                "resumed", iteration=iteration, version=saved, step=step_id, **{"as": state.policy_version}, **line
            )
        for problem in self._found.problems[:1]:
            more = f", and {len(self._found.problems) - 1} more" if len(self._found.problems) > 1 else ""
            self._warn(f"ledger: {problem}{more}: `tandem ledger {self._run_dir}` lists them")
        self._problems = self._found.problems[:MAX_PROBLEMS]
        self._account.problems = None  # from now on one is an error
        for number in self._account.open_iterations():
            if number != iteration + 1:
                self._drop(number, LOST_POLICY if number > iteration else UNRECORDED)

    async def begin(self, iteration: int, prompts: Mapping[str, Prompt], order: Order, first: int) -> Restored:
        """Note that the groups of an iteration begin. Returns: what is left of them from before this process.

        Args:
            first: ordinal of the first prompt, among all that the data's cursor has given out.
        """
        if self._has_checkpoint:
            await self._begin_segment()
        self._iteration, self._order = iteration, order_digest(prompts, order, self._model)
        restored = Restored()
        if iteration == self._resumed_after + 1:
            kept = await asyncio.to_thread(_read_groups, groups_file(self._run_dir, iteration))
            for damage in kept.damages[:1]:
                self._warn(f"ledger: {damage}: what it held is generated anew")
            restored = await asyncio.to_thread(self._restore, kept, prompts, order.policy_version)
            if len(restored.groups) == len(prompts) and not self._sent and self._found.repeats >= MAX_REPEATS:
                self._warn(f"iteration {iteration} has failed with the same groups again: they are generated anew")
                restored = Restored()
            if restored.groups:
                log.info("groups restored", iteration=iteration, groups=len(restored.groups), of=len(prompts))
        under_way = self._account.open_groups(iteration)
        ordered, sampled_by = self._found.orders.get(iteration, ("", -1))
        if under_way and (ordered != self._order or sampled_by not in self._names):
            self._drop(iteration, LOST_POLICY if ordered == self._order else OTHER_ORDER)
            under_way = {}
        version = order.policy_version
        if under_way:
            names = list(restored.groups)
            self._put("continued", iteration=iteration, version=version, first=first, groups=names, order=self._order)
        else:
            names, size = list(prompts), order.num_completions
            what = {"first": first, "size": size, "groups": names, "order": self._order}
            self._put("begun", iteration=iteration, version=version, **what)
            for name in restored.groups:  # of a log that is lost
                self._put("finished", groups=[name])
        self._submit(partial(self._files.begin_groups, iteration, keep=bool(restored.groups)))
        return restored

    def finished(self, group: Group) -> None:
        """Note a finished group, and keep it."""
        self._put("finished", groups=[group.group_id])
        self._keep(partial(group_record, group, self._order))

    def scored(self, scored: GroupScores) -> None:
        """Note that the groups of this iteration were scored, and keep the scores."""
        self._put("scored", iteration=self._iteration, samples=scored.rewards_PG.size, missing=scored.num_missing)
        self._keep(partial(scores_record, scored, self._order, self._rewards))

    def filtered(self, generation: Generation, result: AdvantageResult) -> None:
        """Note the samples that are not trained on; a step has all others of the iteration."""
        equal: dict[str, None] = {}
        missing: dict[str, list[int]] = {}
        self._trained = {group.group_id: None for group in generation.groups}
        for place, group in enumerate(generation.groups):
            missing_G = None if result.missing_PG is None else result.missing_PG[place]
            if result.dropped_P[place]:
                equal[group.group_id] = None
                del self._trained[group.group_id]
            elif missing_G is not None and missing_G.any():
                missing[group.group_id] = missing_G.nonzero()[0].tolist()
                self._trained[group.group_id] = (~missing_G).nonzero()[0].tolist()
        for why, samples in ((EQUAL, equal), (UNSCORED, missing)):
            if samples:
                self._put("filtered", why=why, samples=samples)

    async def step(self, batch: TrainBatch) -> None:
        """Note a train step that is about to be sent; all records are on disk then.

        Raises: Internal: one of its samples was trained already; NotWritten: too many records could not be written.
        """
        samples = {name: indices for name, indices in self._trained.items() if indices != []}
        digest = chained(self.digest, batch.step_id, batch.policy_version, samples)
        step, version = batch.step_id, batch.policy_version
        self._put("step", iteration=self._iteration, step=step, version=version, samples=samples, digest=digest)
        await self._sync()

    async def checkpoint(self, state: RunState) -> None:
        """Note a checkpoint of a run's state, before it is complete; a step may be noted that is not in it.

        Raises: NotWritten: that is not on disk, so it must not be.
        """
        oldest = await self._on_thread(self._files.oldest_checkpoint)
        where = {"iteration": state.iteration, "version": state.policy_version, "digest": state.steps_digest}
        self._put("checkpoint", **where, oldest=oldest)
        self._has_checkpoint = True
        try:
            await self._on_thread(self._files.sync)
        except OSError as error:
            raise NotWritten(f"the ledger's records were not written: {describe(error, advise=False)}") from error

    def done(self, iteration: int) -> None:
        """Note that the run's state after an iteration is saved: what is needed no more is removed."""
        self._submit(partial(self._files.tidy, iteration, dict(self._boundaries)))

    async def close(self) -> None:
        """End this process's part. Idempotent."""
        with contextlib.suppress(OSError, TandemError, RuntimeError):
            await self._on_thread(self._files.close)
        self._thread.shutdown(wait=False)

    def _restore(self, kept: _Kept, prompts: Mapping[str, Prompt], version: int) -> Restored:
        """Return what is left of an iteration that was ordered as now, and sampled by the present policy, `version`."""
        groups = {
            name: read_group(record, prompts[name], version)
            for name, record in kept.groups.items()
            if record.fields["order"] == self._order and versions_of(record) <= self._names
        }
        if len(groups) < len(prompts):
            return Restored(groups=groups)
        is_same = kept.scores is not None and kept.scores.fields["order"] == self._order
        is_scored = kept.scores is not None and is_same and kept.scores.fields["rewards"] == self._rewards
        scored = read_scores(kept.scores) if kept.scores is not None and is_scored else None
        return Restored(groups=groups, scored=scored, step_id=self._sent)

    def _drop(self, iteration: int, why: str) -> None:
        """Drop all samples of an iteration that are under way."""
        samples = self._account.open_samples(iteration)
        log.warning("samples dropped", iteration=iteration, samples=sum(map(len, samples.values())), why=why)
        self._put("dropped", iteration=iteration, why=why, samples=samples)

    async def _begin_segment(self) -> None:
        number = self._number + 1
        fields = {"format": FORMAT, "run_id": self._run_id, "number": number, "account": self._account.snapshot()}
        fields["problems"] = self._problems
        position, is_boundary = self._account.position.iteration, not self._account.under_way

        def head(after: int) -> bytes:
            return framed(Record(kind="segment", fields=fields | {"after": after}))

        if await self._on_thread(partial(self._files.begin_segment, number, head)):
            self._number, self._has_checkpoint = number, False
            if is_boundary:
                self._boundaries[number] = position

    def _put(self, kind: str, **fields: Any) -> None:
        record = Record(kind=kind, fields=fields)
        try:
            self._account.add(record)
        except Unbalanced as error:
            raise Internal(f"ledger: {error}") from error
        if kind != "finished":  # that settles no sample
            metrics.observe_samples(self._account)
        self._submit(partial(self._files.append, framed(record)))

    def _keep(self, make: Callable[[], Record]) -> None:
        """Keep a group or scores, which the thread makes into bytes."""
        self._submit(lambda: self._files.append_groups(framed(make())))

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
    kept = _Kept()
    try:
        for record in read_records(path):
            if isinstance(record, NoRecord):
                kept.damages.append(record)
            elif record.kind == "group":
                kept.groups[record.fields["group"]] = record
            elif record.kind == "scores":
                kept.scores = record
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("finished groups not read", error=str(error))
    return kept
