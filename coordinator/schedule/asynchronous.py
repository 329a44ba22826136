"""Asynchronous: replicas generate all the time, and the trainer takes what is finished; neither waits for the other.

Groups are under way in a pipeline (pipeline.py), which bounds their age by pacing: nothing that was begun is thrown
away. Weights change within completions (sync.install: staged, sync.pause: keep_kv), which say which version has sampled
which of their tokens.

trainer     |train 1|sync|train 2|sync|train 3|sync|...      each takes P finished groups, oldest first
replicas    |generate ...                                    a step that is done makes room for P more groups
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from coordinator import steps
from coordinator.data.cursor import CursorState
from coordinator.generate.dispatch import Dispatch
from coordinator.learn.scoring import joined
from coordinator.learn.updates import without_tokens_before
from coordinator.schedule.pipeline import Pipeline
from coordinator.schedule.sync import COMPARED, NOTHING, SyncSchedule
from servicekit.errors import Internal
from servicekit.lifecycle.background import BackgroundTask
from servicekit.lifecycle.tasks import DEADLINE, Wait, cancel, first_of
from servicekit.logs import get_logger
from servicekit.stopwatch import Stopwatch
from tandem_clients.flow import AdvantageResult, Generation, Group, GroupScores, IterationRecord

# Batches that are generated for one step at most, when groups of equal rewards are replaced.
MOST_BATCHES = 10
# When the trainer has waited so long for a batch, the first word of whom it waits for; then after twice as long.
WORD_S = 120.0

log = get_logger(__name__)


@dataclass(kw_only=True)
class _Beside:
    """What runs beside the iterations.

    Attributes:
        policy_version: that replicas serve; the next groups begin with it.
        trainer: held while the trainer is at work; it seeds replicas that join only between.
        finished: set when a group has come.
        befores: by wave with groups that no step has taken, the position of the data before it.
    """

    policy_version: int = 0
    trainer: asyncio.Lock = field(default_factory=asyncio.Lock)
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    befores: dict[int, CursorState] = field(default_factory=dict)
    dispatch: Dispatch | None = None
    working: asyncio.Task[None] | None = None


@dataclass(frozen=True, kw_only=True)
class Asynchronous(SyncSchedule):
    """Iterations that take what is finished from a pipeline of groups.

    Attributes:
        iterations: run.iterations; no groups begin that none of them would train.
        max_token_age: tokens that were sampled by a policy of more versions before are not trained.
        drops: nor are the others of their completions.
    """

    pipeline: Pipeline
    iterations: int
    max_token_age: int
    drops: bool = False
    _beside: _Beside = field(default_factory=_Beside, init=False, repr=False)

    async def iterate(
        self, number: int, policy_version: int, watch: Stopwatch, during_training: BackgroundTask[Any] = NOTHING
    ) -> IterationRecord:
        """As SyncSchedule, with groups that have begun during the iterations before."""
        beside, is_first = self._beside, self._beside.dispatch is None
        # After a step that the trainer has done already, replicas serve the version after it.
        beside.policy_version = policy_version + bool(self.ledger.past.sent(number))
        dispatch = self._dispatching()
        groups, scored = await self._batch(number, watch)
        generation = replace(dispatch.generation(groups), waiting=self.pipeline.num_finished)
        async with beside.trainer:
            record = await self.learn(number, generation, policy_version, watch, during_training, scored)
            with watch.part("sync"):
                record = replace(record, sync=await self.publish(record.step))
                beside.policy_version = record.policy_version
                dispatch.renew(record.policy_version)
                self.pipeline.commit()
                await self._begin_waves(number + 1, self.grpo.prompts_per_iteration)
            return await self.compared(record, watch, is_due=is_first)

    def check_ages(self, generation: Generation, policy_version: int) -> None:
        """Too old tokens are left out instead (without_old)."""

    def without_old(
        self, generation: Generation, result: AdvantageResult, policy_version: int
    ) -> tuple[Generation, AdvantageResult]:
        """Leave out tokens, or completions, that are older than the schedule's section allows."""
        return steps.leave_out_old(generation, result, policy_version - self.max_token_age, whole=self.drops)

    def behind_flip(self, policy_version: int) -> list[Group]:
        """Return some finished completions that this version has continued, without what others have sampled."""
        found = (
            replace(
                group, group_id=f"{group.group_id}.{place}", completions=(without_tokens_before(one, policy_version),)
            )
            for group in self.pipeline.finished()
            for place, one in enumerate(group.completions)
            if one.oldest_version < policy_version == one.version_spans[-1][1] and not one.branches
        )
        return list(islice(found, COMPARED))

    def position(self) -> CursorState:
        """Return the position of the data before the first wave with groups that no step has taken."""
        wave = self.pipeline.first_wave
        return super().position() if wave is None else self._beside.befores[wave]

    async def close(self) -> None:
        """End what runs beside."""
        if self._beside.working is not None:
            await cancel(self._beside.working)

    def _dispatching(self) -> Dispatch:
        """Return the dispatch, which works from now on."""
        beside = self._beside
        if beside.dispatch is None:
            patience = replace(self.rollouts.patience, is_queued=self._may_not_seed)
            rollouts = replace(self.rollouts, seed=self.seed_joiners, patience=patience)
            beside.dispatch = Dispatch(rollouts, self._order(beside.policy_version), self._finished, lasts=True)
            beside.working = asyncio.create_task(beside.dispatch.last(), name="generation")
        return beside.dispatch

    async def seed_joiners(self, policy_version: int) -> None:
        """As SyncSchedule, while the trainer has nothing to do: it seeds those that no replica can."""
        async with self._beside.trainer:
            await self.weights.seed_late_joiners(self._beside.policy_version)

    def _may_not_seed(self) -> bool:
        return self._beside.trainer.locked() or self.rollouts.patience.is_queued()

    async def _batch(self, number: int, watch: Stopwatch) -> tuple[list[Group], GroupScores]:
        """Return the groups of the next step with their scores; with grpo.zero_variance: replace, also those left out.

        Raises: Internal: too many were left out; TandemError: generation or scoring has failed.
        """
        groups: list[Group] = []
        parts: list[GroupScores] = []
        batch = missing = self.grpo.prompts_per_iteration
        if self.ledger.past.sent(number):
            with watch.part("generate"):
                await self._begin_waves(number, batch)
            if (restored := self.ledger.past.scores(number)) is not None:
                return self.pipeline.take_named(restored[0]), restored[1]
        while missing:
            with watch.part("generate"):
                await self._begin_waves(number, missing)
                taken = await self._next_groups(missing)
                await self._begin_waves(number + 1, batch)
            with watch.part("reward"):
                parts.append(await self.scorer.score(taken, is_batch=not groups))
            groups += taken
            missing = int(steps.left_out(self.grpo, parts[-1]).sum()) if self.grpo.zero_variance == "replace" else 0
            self.pipeline.free(missing)
            if len(groups) > MOST_BATCHES * batch:
                raise Internal(
                    f"{len(groups)} groups were generated for iteration {number}, and fewer than {batch} of them have "
                    "rewards that differ (grpo.zero_variance: replace): look at the reward and the task's difficulty"
                )
        scored = joined(parts)
        self.ledger.scored(number, groups, scored)
        return groups, scored

    async def _begin_waves(self, number: int, missing: int) -> None:
        """Let groups begin, as long as there is room for them, and as iterations from `number` on need them.

        Args:
            missing: what iteration `number` needs.
        """
        beside, batch = self._beside, self.grpo.prompts_per_iteration
        while (needed := missing + (self.iterations - number) * batch - len(self.pipeline)) > 0:
            before = self.cursor.state()
            wave = before.waves + 1
            size = self.ledger.past.size_of(wave)  # an earlier process has begun it
            is_sent = size > 0 and self.ledger.past.sent(number) != ""  # the step needs groups of it
            if not is_sent and not self.pipeline.may_begin(again=size > 0):
                break
            prompts, restored = await self.take_wave(before, beside.policy_version, size or min(batch, needed))
            beside.befores = {one: before for one, before in beside.befores.items() if one >= self._oldest(wave)}
            beside.befores[wave] = before
            self.pipeline.begin(wave, prompts, restored.groups, restored.settled)
            left = [one for one in prompts.items() if one[0] not in restored.settled | restored.groups.keys()]
            self._dispatching().add(left)

    def _oldest(self, wave: int) -> int:
        first = self.pipeline.first_wave
        return wave if first is None else first

    def _finished(self, group: Group) -> None:
        self.ledger.finished(self.pipeline.finish(group), group)
        self._beside.finished.set()

    async def _next_groups(self, size: int) -> Sequence[Group]:
        """Wait for the next groups, oldest first. Raises: TandemError: generation has failed."""
        beside, clock = self._beside, asyncio.get_running_loop().time
        assert beside.working is not None
        begun_s, patience_s = clock(), WORD_S
        while True:
            beside.finished.clear()
            if (groups := self.pipeline.take(min(size, len(self.pipeline)))) is not None:
                return groups
            waits: dict[str, Wait] = {"generation": beside.working, "groups": beside.finished}
            first = await first_of(waits, timeout_s=begun_s + patience_s - clock())
            if first.name == DEADLINE:
                where = f"{self.pipeline.missing(size)}; {self._dispatching().under_way()}"
                self.rollouts.warn(f"the trainer has waited {patience_s:g} s for its next batch: {where}")
                patience_s *= 2
