"""A reward as a service: write a `Scorer`, and `run_reward_server` serves it to runs (docs/remote-rewards.md)."""

from reward_service.scorer import NotScored, Sample, SampleScore, Scorer
from reward_service.serve import run_reward_server

__all__ = ["NotScored", "Sample", "SampleScore", "Scorer", "run_reward_server"]
