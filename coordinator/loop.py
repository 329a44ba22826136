"""One GRPO iteration, from top to bottom: start reading here.

`GrpoLoop.iterate` is the table of contents: each of its lines is a step, which takes data and returns data, and is
implemented in the module that it calls. Steps are numbered as in ARCHITECTURE.md (3 and 9 run in the rollout services).
Legend: P prompts, G completions per prompt, S samples.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.clients.trainer import Trainer, TrainResult
from coordinator.data.cursor import DataCursor
from coordinator.flow import Generation, GroupScores, Prompt, SyncResult, TrainBatch
from coordinator.generate.dispatch import Rollouts
from coordinator.generate.sampling import Order, Sampling
from coordinator.learn.advantages import group_advantages, zero_variance
from coordinator.learn.kl import Divergence, diverge
from coordinator.learn.scoring import Scorer
from coordinator.learn.updates import (
    make_batch,
    measured_chunks,
    oldest_versions,
    select_samples,
    stale_samples,
    staleness_histogram,
)
from coordinator.record.metrics_row import IterationRecord
from coordinator.sync.publication import is_retriable
from coordinator.sync.weight_sync import WeightSync
from servicekit.errors import TandemError, WrongVersion, in_part
from servicekit.lifecycle.background import BackgroundTask
from servicekit.logs import get_logger
from servicekit.stopwatch import Stopwatch
from tandem_config.schema import GrpoSection

# A synchronous iteration trains only on samples of the current policy.
MAX_STALENESS = 0
NOTHING: BackgroundTask[Any] = BackgroundTask()

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class AdvantageResult:
    """Advantages of an iteration's samples, and which groups or samples have none."""

    advantages_PG: NDArray[np.float64]
    # Samples without a reward; None: there are none.
    missing_PG: NDArray[np.bool_] | None
    zero_variance_P: NDArray[np.bool_]
    dropped_P: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class GrpoLoop:
    """One GRPO iteration, with the parts that it needs."""

    grpo: GrpoSection
    sampling: Sampling
    cursor: DataCursor
    rollouts: Rollouts
    scorer: Scorer
    trainer: Trainer
    weights: WeightSync
    # Id of this process in step ids: a trainer that outlives us must not answer a new step with an old reply.
    incarnation: str
    # Of the completions; None: random.
    seed: int | None = None
    # Shuffles samples into updates; its state is saved with the run's.
    rng: np.random.Generator = field(repr=False)
    # Set when the run is to end.
    ending: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    async def iterate(
        self, number: int, policy_version: int, watch: Stopwatch, meanwhile: BackgroundTask[Any] = NOTHING
    ) -> IterationRecord:
        """Run iteration `number` (from 1) with the policy that the replicas serve now.

        Args:
            meanwhile: what the replicas do with that policy from when they have generated until they get the next.
        Raises: TandemError: of the service that failed, with its name. Nothing of the iteration is kept then.
        """
        with watch.part("generate"):
            await self.weights.seed_late_joiners(policy_version)
            prompts = self.take_prompts(number)
            generation = await self.generate(prompts, policy_version)
        async with meanwhile:
            with watch.part("reward"):
                scored = await self.scorer.score(generation.groups)
            divergence = None
            if self.grpo.kl_in_reward:
                with watch.part("reference"):
                    divergence = await self.diverge(generation, scored)
            with watch.part("batch"):
                learnt = self.learn(scored, divergence)
                batch = self.make_batch(number, policy_version, generation, learnt)
            with watch.part("train"):
                step = await self.train(batch)
            if meanwhile.has_work:
                with watch.part("evaluate"):
                    await meanwhile.result()
        with watch.part("sync"):
            sync = await self.publish(step)
        return IterationRecord(
            iteration=number,
            policy_version=policy_version if step is None else step.policy_version,
            generation=generation,
            scored=scored,
            advantages_PG=learnt.advantages_PG,
            zero_variance_P=learnt.zero_variance_P,
            dropped_P=learnt.dropped_P,
            step=step,
            divergence=divergence,
            sync=sync,
            staleness=staleness_histogram(oldest_versions(generation.groups), policy_version),
        )

    def take_prompts(self, number: int) -> dict[str, Prompt]:
        """Take the next P prompts, by group id; an id consists of iteration, place and data row: `i12.g3.row77`."""
        with in_part("data"):
            prompts = self.cursor.take(self.grpo.prompts_per_iteration)
        return {f"i{number}.g{place}.{prompt.name}": prompt for place, prompt in enumerate(prompts)}

    async def generate(self, prompts: Mapping[str, Prompt], policy_version: int) -> Generation:
        """Sample G completions of each prompt with the current policy.

        Raises: WrongVersion: a sample is too old to train on.
        """
        order = Order(
            policy_version=policy_version,
            num_completions=self.grpo.group_size,
            sampling=self.sampling,
            seed=self.seed,
        )
        generation = await self.rollouts.generate(prompts, order)
        stale = stale_samples(generation.groups, policy_version, MAX_STALENESS)
        if stale:
            raise WrongVersion(f"{len(stale)} samples are older than version {policy_version}; the first is {stale[0]}")
        return generation

    async def diverge(self, generation: Generation, scored: GroupScores) -> Divergence | None:
        """Measure how far the completions are from the reference policy; None without a completion."""
        present_PG = scored.present_PG
        samples = select_samples(
            generation.groups,
            np.zeros(present_PG.shape),
            np.zeros(len(present_PG), np.bool_),
            truncated="keep",
            missing_PG=~present_PG,
        )
        if not samples:
            return None
        watch, chunks = Stopwatch(), measured_chunks(samples)
        reference_T = await self.trainer.logprobs(chunks, reference=True)
        if self.grpo.old_logprobs == "recompute":
            old_T = await self.trainer.logprobs(chunks)
        else:
            old_T = np.concatenate([np.asarray(sample.completion.logprobs, np.float32) for sample in samples])
            # A token without a log-prob of the engine is taken to be as likely as under the reference.
            old_T = np.where(np.isfinite(old_T), old_T, reference_T)
        return diverge(samples, present_PG, old_T, reference_T, self.grpo, watch.total_s())

    def learn(self, scored: GroupScores, divergence: Divergence | None = None) -> AdvantageResult:
        """Compute the advantages, and which groups have none or are dropped.

        Args:
            divergence: what is taken off the rewards first; None: nothing.
        """
        penalties_PG = 0.0 if divergence is None else divergence.penalties_PG
        zero_variance_P = zero_variance(scored.rewards_PG, scored.missing_PG)
        drop = self.grpo.zero_variance == "drop"
        return AdvantageResult(
            advantages_PG=group_advantages(
                scored.rewards_PG - penalties_PG,
                std=self.grpo.advantage_std,
                baseline=self.grpo.baseline,
                missing_PG=scored.missing_PG,
            ),
            missing_PG=scored.missing_PG,
            zero_variance_P=zero_variance_P,
            dropped_P=zero_variance_P if drop else np.zeros_like(zero_variance_P),
        )

    def make_batch(
        self, number: int, policy_version: int, generation: Generation, learnt: AdvantageResult
    ) -> TrainBatch | None:
        """Build the train step's batch; None if no sample is left."""
        samples = select_samples(
            generation.groups,
            learnt.advantages_PG,
            learnt.dropped_P,
            truncated=self.grpo.truncated,
            missing_PG=learnt.missing_PG,
        )
        if not samples:
            return None
        return make_batch(
            samples,
            step_id=f"i{number}.v{policy_version}.{self.incarnation}",
            policy_version=policy_version,
            num_updates=self.grpo.updates_per_iteration,
            divide=self.grpo.updates_divide,
            rng=self.rng,
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
            log.warning("weight sync left out at the end of the run", error=str(error))
            return None
