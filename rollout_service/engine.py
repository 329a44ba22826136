"""What the service needs of an inference engine, and the data that goes in and out. No protobuf, no SGLang here."""

import asyncio
import enum
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol


class Finish(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """How tokens are drawn. temperature 0 is greedy; top_k -1 and top_p 1 leave the full distribution."""

    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class GroupRequest:
    """One prompt and the number of completions asked for."""

    group_id: str
    prompt_ids: list[int]
    num_completions: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """Tokens [start, end) of a completion that one policy version sampled."""

    start: int
    end: int
    policy_version: int


@dataclass(frozen=True, kw_only=True)
class SampledCompletion:
    """One sampled completion; logprobs are natural logarithms at the sampling temperature, one per token."""

    token_ids: list[int]
    logprobs: list[float]
    finish: Finish
    spans: list[Span]
    cached_tokens: int


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """All completions of a group."""

    group_id: str
    completions: list[SampledCompletion]


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What a request must fit. Tokens; longest_request counts prompt and completion together."""

    vocab_size: int
    longest_request: int


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How busy an engine is: requests in it; as it last reported, those that wait, and the share of KV cache in use.

    progress: another number whenever tokens have been computed, of running requests too, as it last reported.
    """

    requests: int
    waiting_requests: int
    kv_cache_usage: float
    progress: int


class EngineProcesses(Protocol):
    """The processes of an engine on one host. All methods run on the service's event loop."""

    # Done with an exception as soon as they can no longer serve (a rank died); never done otherwise.
    @property
    def failed(self) -> "asyncio.Future[None]":
        """Done with an error once a rank has died."""
        ...

    # gRPC addresses of the ShardReceiverService of the ranks on this host, in rank order.
    rank_addresses: list[str]

    async def start(self) -> None:
        """Load and become able to generate. Raises: RuntimeError: the engine did not come up."""

    async def shutdown(self) -> None:
        """End every process. Idempotent."""


class RolloutEngine(EngineProcesses, Protocol):
    """An engine that generates, and whose weights somebody else writes.

    It starts with meaningless weights and version 0.
    """

    limits: EngineLimits

    def generate(
        self, groups: Sequence[GroupRequest], sampling: SamplingSettings
    ) -> AsyncIterator[list[FinishedGroup]]:
        """Yield groups as they become whole, several at once when they finish together.

        Closing the iterator aborts what still runs. Raises: RuntimeError: the engine failed the requests.
        """

    def load(self) -> EngineLoad:
        """How busy it is; takes microseconds, from any thread."""

    async def freeze(self) -> None:
        """Stop at the next token boundary, keeping running requests and their KV cache.

        May return before; what is called after it is done after it.
        """

    async def thaw(self) -> None:
        """Go on after freeze()."""

    async def abort_running(self) -> None:
        """Ask all running requests to end with Finish.ABORT; does not wait for them."""

    async def begin_update(self) -> None:
        """From here to end_update() the ranks' parameters may be written. Nothing must be generating."""

    async def end_update(self) -> None:
        """The parameters are whole; the engine derives from them what it caches."""

    async def set_version(self, policy_version: int) -> None:
        """Tokens sampled from now on belong to this version."""

    async def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Forget cached prefixes. Returns: False if requests are still held after `timeout_s`."""
