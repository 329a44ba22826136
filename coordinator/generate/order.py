"""What a dispatch is asked for, beside the prompts."""

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
        """The wire form, without top-p and top-k: the trainer's log-probs are of the full distribution."""
        return rollout_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=1.0,
            top_k=-1,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The policy that is sampled, and how much of it."""

    policy_version: int
    num_completions: int
    sampling: Sampling
