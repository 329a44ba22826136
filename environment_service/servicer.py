"""EnvironmentService over an EnvironmentPool: open episodes by name, the last reply of each, and lifetimes."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from coordinator.environments.pool import EnvironmentPool, Episode, EpisodeFailed
from coordinator.environments.remote import KINDS, PROTOCOL
from coordinator.workers.episodes.replies import AssistantTurn
from servicekit.errors import AlreadyExists, ConfigError, InvalidRequest, NotFound, Overloaded, Unavailable
from servicekit.lifecycle.tasks import cancel, to_its_end
from servicekit.logs import get_logger
from tandem_api.environment.v1 import environment_pb2 as pb
from tandem_api.environment.v1 import environment_pb2_grpc

# A few times as many as replicas sample at a time; each costs its row, and what the environment keeps.
MOST_EPISODES = 2**14
_NUMBERS = {kind: number for number, kind in KINDS.items()}

T = TypeVar("T")
log = get_logger(__name__)


@dataclass(kw_only=True)
class _Kept:
    """An episode that is open.

    Attributes:
        begun: digest of the request that began it.
        expiry: closes it, unless a call comes before.
        reset: the work of that request.
        num_turns: taken or under way.
        last: the work of the last turn, and `turn` the digest of its request.
    """

    name: str
    owner: str
    lifetime_s: float
    begun: bytes
    expiry: asyncio.TimerHandle
    reset: "asyncio.Task[pb.ResetResponse] | None" = None
    episode: Episode | None = None
    num_turns: int = 0
    turn: bytes = b""
    last: "asyncio.Task[pb.StepResponse] | None" = None


class EnvironmentServicer(environment_pb2_grpc.EnvironmentServiceServicer):
    """Keeps a call's work apart from the call: one that is lost on its way is made again, and gets the same reply.

    Args:
        pool: not started; closed with this.
        name: of the environment, for people.
    """

    def __init__(self, pool: EnvironmentPool, name: str) -> None:
        self._pool = pool
        self._name = name
        self._is_ready = False
        self._kept: dict[str, _Kept] = {}
        self._ending: set[asyncio.Future[None]] = set()

    async def load(self) -> None:
        """Start the workers; until then calls are refused. Raises: ConfigError: the code cannot be used."""
        try:
            await self._pool.start()
        except ValueError as error:
            raise ConfigError(f"environment: {error}") from error
        self._is_ready = True

    async def close(self) -> None:
        """Close the episodes that are left, then the workers."""
        self._is_ready = False
        left = [kept for name in list(self._kept) if (kept := self._taken(name)) is not None]
        await asyncio.gather(*map(self._end, left), *self._ending)
        await self._pool.close()

    async def Describe(self, request: pb.DescribeRequest, context: grpc.aio.ServicerContext) -> pb.DescribeResponse:
        """Return what is served."""
        self._check_ready()
        tools = "" if self._pool.tools is None else json.dumps(self._pool.tools)
        return pb.DescribeResponse(protocol=PROTOCOL, name=self._name, tools_json=tools)

    async def Reset(self, request: pb.ResetRequest, context: grpc.aio.ServicerContext) -> pb.ResetResponse:
        """Begin an episode, or repeat what it began with."""
        self._check_ready()
        kept = self._kept.get(request.episode)
        if kept is None:
            if len(self._kept) >= MOST_EPISODES:
                raise Overloaded(f"{len(self._kept)} episodes are open, the most; more workers end them sooner")
            row = _object(request.row_json, "row_json")
            kept = self._kept[request.episode] = _Kept(
                name=request.episode,
                owner=request.owner,
                lifetime_s=request.lifetime_s,
                begun=_digest(request),
                expiry=self._expiry(request.episode, request.lifetime_s),
            )
            kept.reset = asyncio.create_task(self._reset(kept, row, request.seed), name=f"reset of {kept.name}")
        elif kept.begun != _digest(request):
            raise AlreadyExists(f"{request.episode} has begun with another row, seed, owner or lifetime")
        assert kept.reset is not None
        return await self._result(kept, kept.reset)

    async def Step(self, request: pb.StepRequest, context: grpc.aio.ServicerContext) -> pb.StepResponse:
        """Take a turn, or repeat the last one's reply."""
        self._check_ready()
        kept = self._kept.get(request.episode)
        if kept is None:
            raise NotFound(f"{request.episode} is not open here: begin it again")
        if request.index == kept.num_turns and kept.episode is not None and (kept.last is None or kept.last.done()):
            turn = _turn(request.turn_json)
            kept.num_turns, kept.turn = kept.num_turns + 1, _digest(request)
            kept.last = asyncio.create_task(_step(kept.episode, turn), name=f"turn of {kept.name}")
        elif request.index != kept.num_turns - 1 or kept.turn != _digest(request):
            which = f"turn {request.index} of {request.episode}"
            raise InvalidRequest(f"{which}, which has begun {kept.num_turns}: neither the next one nor the last again")
        assert kept.last is not None
        return await self._result(kept, kept.last)

    async def Close(self, request: pb.CloseRequest, context: grpc.aio.ServicerContext) -> pb.CloseResponse:
        """Close an episode, if it is open."""
        kept = self._taken(request.episode)
        if kept is not None:
            await self._end(kept)
        return pb.CloseResponse()

    def _check_ready(self) -> None:
        if not self._is_ready:
            raise Unavailable("the environment is being imported, or the server ends")

    async def _result(self, kept: _Kept, task: "asyncio.Task[T]") -> T:
        """Wait for a call's work, which continues if the caller is lost. Raises: NotFound: it was closed meanwhile."""
        self._renew(kept)
        await asyncio.wait([task])
        self._renew(kept)
        if task.cancelled():
            raise NotFound(f"{kept.name} was closed")
        return task.result()

    async def _reset(self, kept: _Kept, row: Mapping[str, Any], seed: int) -> pb.ResetResponse:
        try:
            kept.episode, messages = await self._pool.open(row, seed, kept.name)
        except EpisodeFailed as failed:
            return pb.ResetResponse(failure=_failure(failed))
        return pb.ResetResponse(messages_json=json.dumps(messages))

    def _expiry(self, name: str, lifetime_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(lifetime_s, self._expire, name)

    def _renew(self, kept: _Kept) -> None:
        if self._kept.get(kept.name) is kept:
            kept.expiry.cancel()
            kept.expiry = self._expiry(kept.name, kept.lifetime_s)

    def _taken(self, name: str) -> _Kept | None:
        """Forget an episode, which must be ended then. Returns: None: it is not open."""
        kept = self._kept.pop(name, None)
        if kept is not None:
            kept.expiry.cancel()
        return kept

    def _expire(self, name: str) -> None:
        """Close an episode whose caller is lost."""
        kept = self._taken(name)
        assert kept is not None, "the timer of an episode that is not open"
        about = {"owner": kept.owner, "lifetime_s": kept.lifetime_s}
        log.warning("episode closed: no call for its lifetime", episode=name, **about)
        ending = asyncio.ensure_future(self._end(kept))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    @to_its_end
    async def _end(self, kept: _Kept) -> None:
        await cancel(*(task for task in (kept.reset, kept.last) if task is not None))
        if kept.episode is not None:
            await kept.episode.close()


async def _step(episode: Episode, turn: AssistantTurn) -> pb.StepResponse:
    try:
        reply = await episode.step(turn)
    except EpisodeFailed as failed:
        return pb.StepResponse(failure=_failure(failed))
    found = pb.Reply(messages_json=json.dumps(reply.messages), reward=reply.reward, done=reply.done)
    if reply.conversation:
        found.conversation_json = json.dumps(reply.conversation)
    found.token_ids.extend(reply.token_ids)
    return pb.StepResponse(reply=found)


def _failure(failed: EpisodeFailed) -> pb.Failure:
    return pb.Failure(kind=_NUMBERS[failed.kind], text=failed.text.encode(errors="replace").decode())


def _digest(request: Message) -> bytes:
    return hashlib.blake2b(request.SerializeToString(deterministic=True)).digest()


def _object(text: str, field: str) -> dict[str, Any]:
    """Read a JSON object. Raises: InvalidRequest: it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRequest(f"{field} is a {type(found).__name__}, not an object")
    return found


def _turn(text: str) -> AssistantTurn:
    """Read a turn. Raises: InvalidRequest: it has not the fields of one."""
    try:
        return AssistantTurn(**_object(text, "turn_json"))
    except TypeError as error:
        raise InvalidRequest(f"turn_json: {error}") from error
