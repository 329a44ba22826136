"""Held-out accuracy: one greedy completion per held-out prompt, scored like those of the training data."""

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.flow import Generation, Prompt, Scored
from coordinator.generate.order import Order, Sampling
from coordinator.generate.rollouts import Rollouts
from coordinator.learn.scoring import Scorer


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Measures the policy on held-out prompts.

    Attributes:
        prompts: held-out prompts.
        sampling: greedy, with the run's length limit and stop tokens.
    """

    prompts: Iterable[Prompt]
    rollouts: Rollouts
    scorer: Scorer
    sampling: Sampling

    async def score(self, policy_version: int) -> tuple[Generation, Scored]:
        """Generate and score one completion of every held-out prompt.

        Returns: the completions; [P, 1] scores and the accuracy.

        Raises: as `Rollouts.generate` and `Scorer.score`.
        """
        order = Order(policy_version=policy_version, num_completions=1, sampling=self.sampling)
        groups = {f"eval.{prompt.name}": prompt for prompt in self.prompts}
        generation = await self.rollouts.generate(groups, order)
        return generation, await self.scorer.score(generation.groups)
