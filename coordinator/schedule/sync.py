"""The synchronous schedule: one GRPO iteration, from top to bottom. Start reading here.

`SyncSchedule.iterate` is the table of contents: each of its lines is a step (steps.py), numbered as in ARCHITECTURE.md.
The replicas wait while the trainer works, and the trainer waits while they generate.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from coordinator import steps
from coordinator.data.cursor import CursorState, DataCursor
from coordinator.generate.dispatch import Rollouts
from coordinator.generate.turns import opened
from coordinator.learn.scoring import Scorer
from coordinator.learn.updates import mean_ages, oldest_versions, staleness_histogram
from coordinator.ledger.ledger import Ledger, Restored
from coordinator.sync.publish_attempt import is_retriable
from coordinator.sync.weight_sync import WeightSync
from servicekit.errors import TandemError
from servicekit.lifecycle.background import BackgroundTask
from servicekit.lifecycle.tasks import first_of
from servicekit.logs import get_logger
from servicekit.stopwatch import Stopwatch
from tandem_clients.flow import (
    AdvantageResult,
    Generation,
    Group,
    GroupScores,
    IterationRecord,
    Order,
    Prompt,
    Sampling,
    SyncResult,
    TrainBatch,
    TrainResult,
)
from tandem_clients.trainer import Learner
from tandem_config.schema import GrpoSection

NOTHING: BackgroundTask[Any] = BackgroundTask()

# Where samples are older than the policy, trainer and engine are compared on a few completions of their own:
# iterations between two comparisons, completions, and the most tokens of one.
COMPARE_EVERY, COMPARED, COMPARED_TOKENS = 20, 16, 128

log = get_logger(__name__)


Persist = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


async def once(work: Callable[[], Awaitable[Any]]) -> Any:
    """Do work once, however it ends."""
    return await work()


def _set_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


@dataclass(kw_only=True)
class Begun:
    """A wave of prompts whose groups are under way.

    Attributes:
        prompts: those of groups that are not settled yet.
        before: position of the data before the wave.
        groups: finished ones, by id.
        generation: None: some are not finished.
    """

    wave: int
    prompts: Mapping[str, Prompt]
    before: CursorState
    groups: dict[str, Group]
    generation: Generation | None = None


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """One GRPO iteration, with the parts that it needs.

    Attributes:
        MAX_STALENESS: most versions between the policy that samples and the one that is trained.
        ledger: notes what becomes of each sample, and restores what a crash has left.
        incarnation: id of this process in step ids: a trainer that outlives us must not answer a new step with an old
            reply.
        seed: seed for sampling completions; None: a random seed.
        rng: shuffles samples into updates; its state is saved with the run's.
        ending: set when the run is to end.
        persist: does what needs the trainer, again if that was lost and has come back.
        may_train: cleared while the trainer must keep its policy, which is being saved.
    """

    MAX_STALENESS: ClassVar[int] = 0
    grpo: GrpoSection
    sampling: Sampling
    cursor: DataCursor
    rollouts: Rollouts
    scorer: Scorer
    trainer: Learner
    weights: WeightSync
    ledger: Ledger
    incarnation: str
    seed: int | None = None
    rng: np.random.Generator = field(repr=False)
    ending: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    persist: Persist = once
    may_train: asyncio.Event = field(default_factory=_set_event, repr=False)

    async def iterate(
        self, number: int, policy_version: int, watch: Stopwatch, during_training: BackgroundTask[Any] = NOTHING
    ) -> IterationRecord:
        """Run iteration `number` (from 1) with the policy that the replicas serve now.

        Args:
            during_training: work for the idle replicas, e.g. an evaluation; awaited before the weight sync.
        Raises: TandemError: of the service that failed, with its name. Nothing of the iteration is kept then.
        """
        with watch.part("generate"):
            begun = await self.begin(policy_version)
            generation = await self.generate(begun, policy_version, self.rollouts)
        record = await self.learn(number, generation, policy_version, watch, during_training)
        with watch.part("sync"):
            return replace(record, sync=await self.publish(record.step))

    def position(self) -> CursorState:
        """Return the position of the data before the first wave that has groups under way."""
        return self.cursor.state()

    async def begin(self, policy_version: int) -> Begun:
        """Take the prompts of a wave, and what an earlier process has left of their groups."""
        left: dict[str, Prompt] = {}
        while not left:  # a wave that `async` has begun may be settled in part, or as a whole
            before = self.cursor.state()
            size = self.ledger.past.size_of(before.waves + 1, settled=True) or self.grpo.prompts_per_iteration
            prompts, restored = await self.take_wave(before, policy_version, size)
            left = {name: prompt for name, prompt in prompts.items() if name not in restored.settled}
        if len(restored.groups) < len(left):
            await self.seed_joiners(policy_version)
        return Begun(wave=before.waves + 1, prompts=left, before=before, groups={**restored.groups})

    async def take_wave(
        self, before: CursorState, policy_version: int, size: int
    ) -> tuple[Mapping[str, Prompt], Restored]:
        """Take the prompts at a position of the data, by group id, and let their groups begin in the ledger."""
        wave = before.waves + 1
        prompts = await opened(self.rollouts.environments, steps.take_prompts(self.cursor, size, wave))
        return prompts, await self.ledger.begin(wave, prompts, self._order(policy_version), before.num_taken)

    async def generate(self, begun: Begun, policy_version: int, rollouts: Rollouts) -> Generation:
        """Generate what is missing of a wave's groups."""

        def finished(group: Group) -> None:
            begun.groups[group.group_id] = group
            self.ledger.finished(begun.wave, group)

        order = self._order(policy_version)
        begun.generation = await rollouts.generate(begun.prompts, order, begun.groups, finished)
        return begun.generation

    async def learn(
        self,
        number: int,
        generation: Generation,
        policy_version: int,
        watch: Stopwatch,
        during_training: BackgroundTask[Any],
        scored: GroupScores | None = None,
    ) -> IterationRecord:
        """Score the groups of an iteration, and train on them. Returns: its record, without a weight sync.

        Args:
            scored: None: they are not scored yet.
        """
        self.check_ages(generation, policy_version)
        async with during_training:
            if scored is None:
                with watch.part("reward"):
                    scored = await self.score(number, generation)
            divergence = None
            if self.grpo.kl_in_reward:
                with watch.part("reference"):
                    divergence = await steps.measure_divergence(self.grpo, self.trainer, generation, scored)
            with watch.part("batch"):
                advantages = steps.compute_advantages(self.grpo, scored, divergence)
                trained, advantages = self.without_old(generation, advantages, policy_version)
                self.ledger.filtered(number, trained, advantages)
                step_id = self.ledger.past.sent(number) or f"i{number}.v{policy_version}.{self.incarnation}"
                batch = steps.build_batch(
                    self.grpo, trained, advantages, step_id=step_id, policy_version=policy_version, rng=self.rng
                )
                if batch is not None:
                    await self.ledger.step(number, batch)
            await self.may_train.wait()
            with watch.part("train"):
                step = await self.train(batch)
            if during_training.has_work:
                with watch.part("evaluate"):
                    await during_training.result()
        return IterationRecord(
            iteration=number,
            policy_version=policy_version if step is None else step.policy_version,
            generation=generation,
            scored=scored,
            advantages_PG=advantages.advantages_PG,
            zero_variance_P=advantages.zero_variance_P,
            dropped_P=advantages.dropped_P,
            step=step,
            divergence=divergence,
            sync=None,
            staleness=staleness_histogram(oldest_versions(generation.groups), policy_version),
            mean_ages=mean_ages(generation.groups, policy_version),
            old_PG=advantages.old_PG,
            masked_tokens=0 if trained is generation else generation.num_tokens - trained.num_tokens,
        )

    def check_ages(self, generation: Generation, policy_version: int) -> None:
        """Check that all samples are young enough. Raises: WrongVersion."""
        steps.check_staleness(generation, policy_version, self.MAX_STALENESS)

    def without_old(
        self, generation: Generation, result: AdvantageResult, policy_version: int
    ) -> tuple[Generation, AdvantageResult]:
        """Leave out what is too old to train on: nothing is."""
        return generation, result

    async def score(self, number: int, generation: Generation) -> GroupScores:
        """Score the groups of an iteration, but not again if an earlier process has."""
        names = tuple(group.group_id for group in generation.groups)
        restored = self.ledger.past.scores(number)
        if restored is not None and restored[0] == names:
            return restored[1]
        scored = await self.scorer.score(generation.groups)
        self.ledger.scored(number, generation.groups, scored)
        return scored

    def _order(self, policy_version: int) -> Order:
        return Order(
            policy_version=policy_version,
            num_completions=self.grpo.group_size,
            sampling=self.sampling,
            seed=self.seed,
        )

    async def train(self, batch: TrainBatch | None) -> TrainResult | None:
        """Run one GRPO step, and look ahead meanwhile; None without samples."""
        if batch is None:
            return None
        sent = asyncio.Event()
        async with BackgroundTask(partial(self.look_ahead, sent)):
            return await self.trainer.train_step(batch, sent)

    async def look_ahead(self, sent: asyncio.Event) -> None:
        """Prepare, once the trainer has the batch, what the steps after this one need of others.

        These are the participants of the weight sync and the next prompts.
        """
        await sent.wait()
        async for _ in self.weights.look_ahead():
            self.cursor.read_ahead(self.grpo.prompts_per_iteration)

    async def compared(self, record: IterationRecord, watch: Stopwatch, *, is_due: bool) -> IterationRecord:
        """Compare the log-probs of trainer and engine, from time to time: older samples cannot be compared.

        Both have the record's version. It costs one short generation.
        """
        is_due = is_due or record.iteration % COMPARE_EVERY == 0
        if record.step is None or not record.is_stale or not is_due:
            return record
        prompts = {f"compare{place}": group.prompt for place, group in enumerate(record.generation.groups[:COMPARED])}
        sampling = replace(self.sampling, max_new_tokens=min(self.sampling.max_new_tokens, COMPARED_TOKENS))
        order = replace(self._order(record.policy_version), num_completions=1, sampling=sampling)
        try:
            with watch.part("evaluate"):
                generating = replace(self.rollouts, environments=None).generate(prompts, order)
                first = await first_of({"generation": generating, "ending": self.ending})
                if first.name == "ending":  # the finished step must not wait for replicas
                    return record
                compared = await steps.measure_mismatch(self.trainer, first.value.groups)
                if flipped := self.behind_flip(record.policy_version):
                    measured = await steps.measure_mismatch(self.trainer, flipped)
                    compared["flip_abs_diff_mean"] = measured["logprob_abs_diff_mean"]
                return replace(record, compared=compared)
        except TandemError as error:
            self.rollouts.warn(f"iteration {record.iteration}: trainer and engine were not compared: {error}")
            return record

    def behind_flip(self, policy_version: int) -> list[Group]:
        """Return completions that this version has continued, without what others have sampled: there are none."""
        return []

    async def close(self) -> None:
        """End what runs beside the iterations."""

    async def seed_joiners(self, policy_version: int) -> None:
        """Bring the present version to replicas that join."""
        await self.weights.seed_late_joiners(policy_version)

    async def publish(self, step: TrainResult | None) -> SyncResult | None:
        """Bring the new weights to the replicas.

        Returns: None without a step: they have them already; and if this failed while the run is to end: a lost
            replica must not cost the finished step, and no iteration needs the weights.
        """
        if step is None:
            return None
        try:
            sync: SyncResult = await self.persist(partial(self.weights.publish, step.policy_version))
            return sync
        except TandemError as error:
            if not self.ending.is_set() or not is_retriable(error):
                raise
            log.warning("shutdown: weight sync skipped", error=str(error))
            return None
