"""The interface of an inference engine, and the data that goes in and out. No protobuf, no SGLang here."""

import asyncio
import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

# What has come of a completion is passed on in parts of so many tokens: each costs the coordinator some 30 us.
PART_TOKENS = 512
# Completions that are slower are passed on each so many looks, whatever they have.
LOOKS_PER_PART = 60


class Finish(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are sampled. temperature 0 is greedy; top_k -1, top_p 1 and min_p 0 keep the full distribution.

    Attributes:
        repetition_penalty: divides positive logits of tokens that have occurred, multiplies negative ones; 1: none.
        stop: texts that end a completion; their tokens belong to it.
    """

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt and the number of completions asked for.

    Attributes:
        seed: of its completions, which differ in spite of it; None: random.
        prefixes: the completions that are asked for, by their index, with the tokens that they have; empty: all, from
            their beginnings.
        prompts: those that completions follow in place of the group's, by their index.
    """

    group_id: str
    prompt_ids: list[int]
    num_completions: int
    seed: int | None = None
    prefixes: Mapping[int, Sequence[int]] = field(default_factory=dict)
    prompts: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def starts(self) -> Mapping[int, Sequence[int]]:
        """Return the tokens that each completion continues, by its index."""
        return self.prefixes or dict.fromkeys(range(self.num_completions), ())


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens [start, end) of a completion that one policy version sampled."""

    start: int
    end: int
    policy_version: int


@dataclass(kw_only=True, slots=True)
class SampledCompletion:
    """One sampled completion, or a part of it.

    Attributes:
        index: which one of its group.
        token_ids: without the prefix that it continues.
        logprobs: natural logarithms at the sampling temperature, one per token.
        finish: None: it is under way, and this is a part.
        spans: of these tokens, which begin with 0.
    """

    group_id: str
    index: int
    token_ids: list[int]
    logprobs: list[float]
    finish: Finish | None
    spans: list[Span]
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SampledGroup:
    """Completions of a group: all of it, or those that have news."""

    group_id: str
    completions: list[SampledCompletion]


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Limits of a request, in tokens; longest_request counts prompt and completion together.

    Attributes:
        kv_tokens: for which the KV cache has room.
        why_no_stop: why stop strings cannot be found; "": they can.
    """

    vocab_size: int
    longest_request: int
    kv_tokens: int
    why_no_stop: str = ""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How busy an engine is.

    Attributes:
        requests: in the engine now.
        waiting_requests: waiting for room, as last reported.
        kv_cache_usage: share of the KV cache in use, as last reported.
        progress: a number that changes whenever tokens were computed, as last reported.
    """

    requests: int
    waiting_requests: int
    kv_cache_usage: float
    progress: int


class EngineProcesses(Protocol):
    """The processes of an engine on one host. All methods run on the service's event loop."""

    @property
    def failed(self) -> "asyncio.Future[None]":
        """A future that fails as soon as the processes can no longer serve (a rank died); never done otherwise."""
        ...

    # gRPC addresses of the ShardReceiverService of the ranks on this host, in rank order.
    rank_addresses: list[str]

    async def start(self) -> None:
        """Load the model and get ready to generate. Raises: RuntimeError: the engine did not start."""

    def cpu_s(self) -> tuple[float, ...]:
        """Return the seconds of CPU that each rank on this host has used; empty where they compute on GPUs."""

    async def shutdown(self) -> None:
        """End every process. Idempotent."""


class EngineStream(Protocol):
    """Groups that are sampled alike, submitted one after the other."""

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        """Begin groups, whose ids this stream does not have yet."""

    def cancel(self, group_id: str) -> None:
        """Ask what runs of a group to end with Finish.ABORT; does not wait for it."""

    def news(self, every_s: float | None = None) -> AsyncIterator[list[SampledCompletion]]:
        """Yield what is new since the last time: completions that have ended, in one list those that end together.

        Args:
            every_s: every so often the parts of those under way too, or an empty list; None: only the ended ones. A
                part has PART_TOKENS tokens, or what came in LOOKS_PER_PART times.
        Raises: RuntimeError: the engine failed a request.
        """
        ...

    def close(self) -> None:
        """Abort what still runs. Idempotent."""


class RolloutEngine(EngineProcesses, Protocol):
    """An engine that generates, with weights written from outside; it starts with meaningless ones, at version 0."""

    limits: EngineLimits

    def open_stream(self, sampling: SamplingSettings) -> EngineStream:
        """Begin a stream, which lives until it is closed."""
        ...

    def load(self) -> EngineLoad:
        """Return the load; takes microseconds, from any thread."""

    async def freeze(self) -> None:
        """Stop at the next token boundary, keeping running requests and their KV cache.

        May return before that; calls made later take effect after it.
        """

    async def retract(self) -> None:
        """Drop the KV cache of a frozen engine's requests, not their tokens; thaw() computes it anew. Idempotent."""

    async def thaw(self) -> None:
        """Continue after freeze()."""

    async def abort_running(self) -> None:
        """Ask all running requests to end with Finish.ABORT; does not wait for them."""

    async def begin_update(self) -> None:
        """Allow writes to the ranks' parameters until end_update(). Nothing may be generating."""

    async def end_update(self) -> None:
        """End the writes; the engine recomputes what it derives from the parameters."""

    async def set_version(self, policy_version: int) -> None:
        """Attribute the tokens sampled from now on to this version."""

    async def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Forget cached prefixes. Returns: False if requests are still held after `timeout_s`."""
