"""A reward that a RewardService gives: samples in batches, by gRPC."""

import asyncio
import math
import re
from collections.abc import Mapping, Sequence

import grpc

from coordinator.rewards.base import Reward, ScoredText, Scores, TakenColumns, parts_of
from coordinator.rewards.servers.calls import CallFailed, CallFailedForNow, FailureBudget, ServerCalls
from coordinator.rewards.servers.samples import batched, to_sample
from servicekit.errors import from_rpc_error
from servicekit.logs import get_logger
from servicekit.rpc.channel import DeadlineChannel, open_channel
from servicekit.security.tls import Identity
from tandem_api.reward.v1 import reward_pb2, reward_pb2_grpc
from tandem_clients.probing import ASK_S, PASSING, until_it_serves
from tandem_config.sections.rewards.servers import RemoteReward

ROLE = "reward"
SERVICE = reward_pb2.DESCRIPTOR.services_by_name["RewardService"].full_name
# How gRPC's implementations call a message that is over a limit of size, with RESOURCE_EXHAUSTED as for a full queue.
_OVER_SIZE = re.compile(r"message (?:larger than max|exceeds maximum size|too large)", re.IGNORECASE)

log = get_logger(__name__)


class RemoteScores(Reward):
    """Asks a server for scores.

    Args:
        identity: of this process, for mutual TLS with `security: run`; None: no TLS.
    """

    def __init__(self, section: RemoteReward, identity: Identity | None) -> None:
        self._section = section
        self._identity = identity
        self._calls = ServerCalls(section.address, section)
        self._needs = reward_pb2.DescribeResponse()
        self._channel: DeadlineChannel | None = None
        self._stub: reward_pb2_grpc.RewardServiceStub | None = None

    @property
    def takes(self) -> TakenColumns:
        """All columns are sent; the server says which it cannot do without."""
        return TakenColumns(required=tuple(self._needs.required_columns), everything=True)

    async def start(self, columns: Sequence[str]) -> None:
        """Wait until the server serves, and compare what it needs with the data."""
        own = self._section.security == "run"
        self._channel = open_channel(
            self._section.address,
            identity=self._identity if own else None,
            peer=ROLE,
            token=None if own else "",
        )
        self._stub = stub = reward_pb2_grpc.RewardServiceStub(self._channel)
        self._needs = await until_it_serves(
            lambda: stub.Describe(reward_pb2.DescribeRequest(), timeout=ASK_S),
            self._channel,
            service=SERVICE,
            kind=ROLE,
            address=self._section.address,
            timeout_s=self._section.start_timeout_s,
        )
        missing = [name for name in self._needs.required_columns if name not in columns]
        if missing:
            raise ValueError(
                f"{self._section.address} ({self._needs.name}) needs column {', '.join(missing)}, and the data has "
                f"{', '.join(columns)}: add it to the rows, or use another server"
            )
        log.info("reward server found", address=self._section.address, scorer=self._needs.name, of=self._needs.version)

    async def score(self, items: Sequence[ScoredText]) -> Scores:
        """Return [S] scores."""
        limit = self._needs.max_batch_size
        batches = batched(
            items,
            most=min(self._section.batch_size, limit) if limit else self._section.batch_size,
            whole_groups=self._needs.needs_whole_groups,
            token_ids=self._needs.needs_token_ids,
        )
        budget = FailureBudget(self._section, len(items))
        scoring = (self._score_batch([items[place] for place in batch], budget) for batch in batches)
        found = await asyncio.gather(*scoring)
        values, errors = [0.0] * len(items), dict[int, str]()
        parts: dict[int, Mapping[str, float]] = {}
        for batch, scores in zip(batches, found, strict=True):
            for place, score in zip(batch, scores, strict=True):
                if isinstance(score, str):
                    errors[place] = score
                    continue
                values[place] = score.value
                parts[place] = score.parts
        return Scores(values=values, errors=errors, parts=parts_of(parts, len(items)))

    async def close(self) -> None:
        """Close the connection."""
        if self._channel is not None:
            await self._channel.close()

    async def _score_batch(self, items: Sequence[ScoredText], budget: FailureBudget) -> "list[reward_pb2.Score | str]":
        """Return the score of each item, or why it has none."""
        try:
            response = await self._calls.call(lambda: self._send(items), budget)
        except CallFailed as error:
            budget.spend(len(items))
            return [str(error)] * len(items)
        scores = [_checked(score) for score in response.scores]
        budget.spend(sum(isinstance(score, str) for score in scores))
        return scores

    async def _send(self, items: Sequence[ScoredText]) -> reward_pb2.ScoreBatchResponse:
        assert self._stub is not None, "score() before start()"
        token_ids = self._needs.needs_token_ids
        try:
            request = reward_pb2.ScoreBatchRequest(samples=[to_sample(item, token_ids=token_ids) for item in items])
        except UnicodeEncodeError as error:  # half of a surrogate pair, in a row of the data
            raise CallFailed(f"a text of {items[0].sample_id} or after it cannot be sent: {error}") from error
        try:
            response: reward_pb2.ScoreBatchResponse = await self._stub.ScoreBatch(
                request, timeout=self._section.timeout_s
            )
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
            why = f"{self._section.address}: {type(failure).__name__}: {failure}"
            if _OVER_SIZE.search(why):
                raise CallFailed(_over_size(items, request.ByteSize(), why)) from error
            for_now = CallFailedForNow(why, failure.after_s)
            raise (for_now if isinstance(failure, PASSING) else CallFailed(why)) from error
        if [score.sample_id for score in response.scores] != [item.sample_id for item in items]:
            raise CallFailed(
                f"{self._section.address} answered with {len(response.scores)} scores for {len(items)} samples, or in "
                "another order: it must return one for each, with its sample_id"
            )
        return response


def _over_size(items: Sequence[ScoredText], size: int, why: str) -> str:
    what = items[0].sample_id
    if len(items) > 1:
        what = f"the group of {what}, {len(items)} samples that must stay together,"
    return (
        f"{what} makes a message of {size / 2**20:.1f} MiB, which is too large: raise the server's limit of messages "
        f"(grpc.max_receive_message_length), or lower grpc.max_new_tokens ({why})"
    )


def _checked(score: reward_pb2.Score) -> "reward_pb2.Score | str":
    """Return a score, or what is wrong with it."""
    if score.WhichOneof("outcome") is None:
        return "the server gave neither a value nor an error"
    if score.WhichOneof("outcome") == "error":
        return score.error or "the server gave no reason"
    return score if math.isfinite(score.value) else f"the server's score is {score.value}"
