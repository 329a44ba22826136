"""What a dispatch gets beside the prompts: which policy to sample, and how."""

from dataclasses import dataclass

import xxhash

from tandem_api.rollout.v1 import rollout_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How completions are sampled; the defaults keep the full distribution, which training needs."""

    # 0 is greedy.
    temperature: float
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    # Texts that end a completion.
    stop: tuple[str, ...] = ()
    top_p: float = 1.0
    # -1: all tokens.
    top_k: int = -1
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def to_proto(self) -> rollout_pb2.SamplingParams:
        """Return the wire form."""
        return rollout_pb2.SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=self.stop_token_ids,
            stop=self.stop,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Which policy version to sample, how many completions per prompt, and how."""

    policy_version: int
    num_completions: int
    sampling: Sampling
    # With it a group's completions are a function of it, the group's id, the prompt and the weights. None: random.
    seed: int | None = None

    def group_seed(self, group_id: str) -> int | None:
        """Return the seed of a group, whose id holds iteration, place and row; None: its completions are random."""
        return None if self.seed is None else xxhash.xxh3_64_intdigest(f"{self.seed}/{group_id}".encode())
