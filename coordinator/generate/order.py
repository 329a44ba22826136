"""What a dispatch gets beside the prompts: which policy to sample, and how."""

from dataclasses import dataclass

from tandem_api.rollout.v1 import rollout_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are sampled."""

    # 0 is greedy.
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]

    def to_proto(self) -> rollout_pb2.SamplingParams:
        """Return the wire form, with top-p and top-k off: the trainer's log-probs are of the full distribution."""
        return rollout_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=1.0,
            top_k=-1,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Which policy version to sample, how many completions per prompt, and how."""

    policy_version: int
    num_completions: int
    sampling: Sampling
