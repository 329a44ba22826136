"""What the environment gave, as a reward."""

from collections.abc import Sequence

from coordinator.rewards.base import Parts, Reward, ScoredText, Scores


class EpisodeReward(Reward):
    """The sum of what the environment gave for an episode's turns."""

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores; 0.0 where the environment gave none."""
        remarks = {}
        if items and all(item.episode_reward is None for item in items):
            remarks["none"] = f"the environment gave no reward for any of {len(items)} episodes; each counts as 0"
        return Scores(values=[item.episode_reward or 0.0 for item in items], parts=Parts(remarks=remarks))
