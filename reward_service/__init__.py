"""A reward as a service: write a `RewardScorer`, and `run_reward_server` serves it to runs (docs/remote-rewards.md)."""

from reward_service.scorer import NotScored, RewardSample, RewardScorer, SampleScore
from reward_service.serve import run_reward_server

__all__ = ["NotScored", "RewardSample", "SampleScore", "RewardScorer", "run_reward_server"]
