"""Evaluations of the policy: completions of each set's prompts, scored like those of the training data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from coordinator.generate.dispatch import Rollouts
from coordinator.learn.estimates import Estimate, estimates
from coordinator.learn.scoring import Scorer
from coordinator.workers.answer_extraction import after_prompt, answer_in
from tandem_clients.fleet import FixedFleet
from tandem_clients.flow import Generation, GroupScores, Order, Prompt, Sampling
from tandem_clients.replica import Replica

# For a replica to join, when none is left to evaluate beside the trainer: replicas that have lost their weights get no
# others before the evaluation is over.
BESIDE_REJOIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class PromptsToEvaluate:
    """A set of prompts, how they are sampled, and what is measured.

    Attributes:
        num_prompts: only the first n of the prompts; None: all.
        measures: names as EvaluationSet.metrics yields them.
        every: iterations between evaluations.
    """

    name: str
    prompts: Iterable[Prompt]
    num_prompts: int | None
    num_samples: int
    sampling: Sampling
    measures: Sequence[str]
    every: int


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """An evaluation of the policy, with its samples."""

    # Name of the evaluation set.
    name: str
    policy_version: int
    generation: Generation
    scored: GroupScores
    # By name of the measure, e.g. `mean@1`.
    estimates: Mapping[str, Estimate] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Measures the policy on sets of prompts.

    Attributes:
        right_from: evaluation.right_from.
        seed: of the completions, the same in each evaluation; None: random.
    """

    sets: Sequence[PromptsToEvaluate]
    rollouts: Rollouts
    # Generates while the trainer is at work.
    rollouts_beside_training: Rollouts
    scorer: Scorer
    right_from: float = 1.0
    seed: int | None = None

    def due(self, iteration: int) -> list[PromptsToEvaluate]:
        """Return the sets that are evaluated after an iteration that is neither the first nor the last."""
        return [asked for asked in self.sets if iteration % asked.every == 0]

    async def evaluate(
        self,
        sets: Sequence[PromptsToEvaluate],
        policy_version: int,
        *,
        beside_training: bool = False,
        replicas: Sequence[Replica] = (),
    ) -> list[EvaluationResult]:
        """Generate and score completions of each set, one set after another.

        Args:
            beside_training: whether the trainer may be at work.
            replicas: that do it; none: all that serve.
        Raises: as `Rollouts.generate` and `Scorer.score`.
        """
        rollouts = self.rollouts
        if beside_training:
            rejoin_s = min(rollouts.patience.rejoin_s, BESIDE_REJOIN_S)
            rollouts = self.rollouts_beside_training
            rollouts = replace(rollouts, patience=replace(rollouts.patience, rejoin_s=rejoin_s))
        if replicas:  # none of another version can take over what they leave
            patience = replace(rollouts.patience, rejoin_s=0.0)
            rollouts = replace(rollouts, fleet=FixedFleet(replicas), patience=patience)
        return [await self._evaluate(asked, policy_version, rollouts) for asked in sets]

    async def _evaluate(self, asked: PromptsToEvaluate, policy_version: int, rollouts: Rollouts) -> EvaluationResult:
        order = Order(
            policy_version=policy_version, num_completions=asked.num_samples, sampling=asked.sampling, seed=self.seed
        )
        prompts = islice(asked.prompts, asked.num_prompts)
        groups = {f"eval.{asked.name}.{prompt.name}": prompt for prompt in prompts}
        generation = await rollouts.generate(groups, order)
        scored = await self.scorer.score(generation.groups)
        texts = iter(self.scorer.texts(generation.groups))
        answers_PG = [
            [answer_in(after_prompt(group.prompt.text, next(texts))) for _ in group.completions]
            for group in generation.groups
        ]
        prompts_P = [tuple(group.prompt.token_ids) for group in generation.groups]
        return EvaluationResult(
            name=asked.name,
            policy_version=policy_version,
            generation=generation,
            scored=scored,
            estimates=estimates(asked.measures, scored.scores_PG, answers_PG, self.right_from, prompts_P),
        )
