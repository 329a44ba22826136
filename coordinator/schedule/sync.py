"""The synchronous schedule: one GRPO iteration, from top to bottom. Start reading here.

`SyncSchedule.iterate` is the table of contents: each of its lines is a step (steps.py), numbered as in ARCHITECTURE.md.
The replicas wait while the trainer works, and the trainer waits while they generate.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from coordinator import steps
from coordinator.data.cursor import DataCursor
from coordinator.generate.dispatch import Rollouts
from coordinator.learn.scoring import Scorer
from coordinator.learn.updates import oldest_versions, staleness_histogram
from coordinator.ledger.ledger import Ledger
from coordinator.sync.publish_attempt import is_retriable
from coordinator.sync.weight_sync import WeightSync
from servicekit.errors import TandemError
from servicekit.lifecycle.background import BackgroundTask
from servicekit.logs import get_logger
from servicekit.stopwatch import Stopwatch
from tandem_clients.flow import IterationRecord, Order, Sampling, SyncResult, TrainBatch, TrainResult
from tandem_clients.trainer import Trainer
from tandem_config.schema import GrpoSection

# A synchronous iteration trains only on samples of the current policy.
MAX_STALENESS = 0
NOTHING: BackgroundTask[Any] = BackgroundTask()

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class SyncSchedule:
    """One GRPO iteration, with the parts that it needs.

    Attributes:
        ledger: notes what becomes of each sample, and restores what a crash has left.
        incarnation: id of this process in step ids: a trainer that outlives us must not answer a new step with an old
            reply.
        seed: seed for sampling completions; None: a random seed.
        rng: shuffles samples into updates; its state is saved with the run's.
        ending: set when the run is to end.
    """

    grpo: GrpoSection
    sampling: Sampling
    cursor: DataCursor
    rollouts: Rollouts
    scorer: Scorer
    trainer: Trainer
    weights: WeightSync
    ledger: Ledger
    incarnation: str
    seed: int | None = None
    rng: np.random.Generator = field(repr=False)
    ending: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def iterate(
        self, number: int, policy_version: int, watch: Stopwatch, during_training: BackgroundTask[Any] = NOTHING
    ) -> IterationRecord:
        """Run iteration `number` (from 1) with the policy that the replicas serve now.

        Args:
            during_training: work for the idle replicas, e.g. an evaluation; awaited before the weight sync.
        Raises: TandemError: of the service that failed, with its name. Nothing of the iteration is kept then.
        """
        with watch.part("generate"):
            order, first = self._order(policy_version), self.cursor.state().num_taken
            prompts = steps.take_prompts(self.cursor, self.grpo.prompts_per_iteration, number)
            restored = await self.ledger.begin(number, prompts, order, first)
            if len(restored.groups) < len(prompts):
                await self.weights.seed_late_joiners(policy_version)
            generation = await self.rollouts.generate(prompts, order, restored.groups, self.ledger.finished)
            steps.check_staleness(generation, policy_version, MAX_STALENESS)
        async with during_training:
            with watch.part("reward"):
                scored = restored.scored
                if scored is None:
                    scored = await self.scorer.score(generation.groups)
                    self.ledger.scored(scored)
            divergence = None
            if self.grpo.kl_in_reward:
                with watch.part("reference"):
                    divergence = await steps.measure_divergence(self.grpo, self.trainer, generation, scored)
            with watch.part("batch"):
                advantages = steps.compute_advantages(self.grpo, scored, divergence)
                self.ledger.filtered(generation, advantages)
                step_id = restored.step_id or f"i{number}.v{policy_version}.{self.incarnation}"
                batch = steps.build_batch(
                    self.grpo, generation, advantages, step_id=step_id, policy_version=policy_version, rng=self.rng
                )
                if batch is not None:
                    await self.ledger.step(batch)
            with watch.part("train"):
                step = await self.train(batch)
            if during_training.has_work:
                with watch.part("evaluate"):
                    await during_training.result()
        with watch.part("sync"):
            sync = await self.publish(step)
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
            sync=sync,
            staleness=staleness_histogram(oldest_versions(generation.groups), policy_version),
        )

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

    async def publish(self, step: TrainResult | None) -> SyncResult | None:
        """Bring the new weights to the replicas.

        Returns: None without a step: they have them already; and if this failed while the run is to end: a lost
            replica must not cost the finished step, and no iteration needs the weights.
        """
        if step is None:
            return None
        try:
            return await self.weights.publish(step.policy_version)
        except TandemError as error:
            if not self.ending.is_set() or not is_retriable(error):
                raise
            log.warning("shutdown: weight sync skipped", error=str(error))
            return None
