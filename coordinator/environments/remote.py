"""Episodes in a server of their own: an EnvironmentService, by gRPC (docs/environments.md).

A call that was lost is sent again; the server knows it by episode and index, and repeats its reply. A server that has
started again knows none of the episodes: each is built again before its next call, as those of a lost worker are.
"""

import asyncio
import itertools
import json
import os
import random
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args

import grpc

from coordinator.environments.pool import MAX_REPLAYS, EpisodeFailed, FailureKind, TurnReply, repeat
from coordinator.workers.episodes.replies import AssistantTurn, Message, messages_of, step_of
from coordinator.workers.episodes.serving import RESET
from servicekit.errors import Aborted, DeadlineExceeded, NotFound, Unavailable, from_rpc_error
from servicekit.logs import get_logger
from servicekit.rpc.channel import DeadlineChannel, open_channel
from servicekit.security.tls import Identity
from tandem_api.environment.v1 import environment_pb2 as pb
from tandem_api.environment.v1.environment_pb2_grpc import EnvironmentServiceStub
from tandem_clients.probing import ASK_S, until_it_serves
from tandem_config.sections.environment import EnvironmentSection

ROLE = "environment"
SERVICE = pb.DESCRIPTOR.services_by_name["EnvironmentService"].full_name
# Version of what the calls mean, in DescribeResponse.
PROTOCOL = 1
# Seconds beside a turn's own for its reply to arrive; an attempt that took longer than them had reached the server.
TRANSIT_S = 10.0
# Seconds that a server keeps an episode after the last call that this one may still make.
_SLACK_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0
_LONGEST_NAME = 512
# Kinds of failures, as they are on the wire.
KINDS: Mapping["pb.FailureKind.ValueType", FailureKind] = {
    pb.FailureKind.Value(f"FAILURE_KIND_{kind.upper()}"): kind for kind in get_args(FailureKind)
}

log = get_logger(__name__)


class OpenEpisode(Protocol):
    """An open episode. Its calls are one after another."""

    async def step(self, turn: AssistantTurn) -> TurnReply:
        """Hand a turn of the policy over. Raises: EpisodeFailed; only close() may follow it, or `done`."""
        ...

    async def close(self) -> None:
        """Let the environment release what it has; idempotent. What fails is logged."""
        ...


class EpisodeHost(Protocol):
    """Where episodes are: worker processes (EnvironmentPool), or a server.

    Attributes:
        tools: OpenAI's schemas of the tools, once it is started; None: a class is the environment.
    """

    tools: Sequence[Mapping[str, Any]] | None

    async def start(self) -> None:
        """Get ready. Raises: ValueError: says why it cannot be used; nothing is left running."""
        ...

    async def open(self, row: Mapping[str, Any], seed: int, key: str) -> tuple[OpenEpisode, Sequence[Message]]:
        """Begin an episode, as EnvironmentPool.open. Raises: EpisodeFailed."""
        ...

    async def close(self) -> None:
        """End it; calls that wait fail."""
        ...


class RemoteEnvironment:
    """A server that has the environment, or the tools.

    Args:
        section: its settings, with an address.
        run_id: whose episodes these are.
        identity: of this process, for mutual TLS with `security: run`; None: no TLS.
    """

    def __init__(self, section: EnvironmentSection, *, run_id: str, identity: Identity | None = None) -> None:
        assert section.address is not None
        self.section, self.address = section, section.address
        self.owner = f"{run_id} {socket.gethostname()}:{os.getpid()}"
        self.tools: Sequence[Mapping[str, Any]] | None = None
        self._identity = identity
        # Names of episodes are unique among those of all callers.
        self._names = map(f"{uuid.uuid4().hex}/{{}}".format, itertools.count())
        self._channel: DeadlineChannel | None = None
        self._stub: EnvironmentServiceStub | None = None
        self.is_closed = False

    async def start(self) -> None:
        """Wait until the server serves. Raises: ValueError: not in time, or it is none that this release can use."""
        own = self.section.security == "run"
        identity = self._identity if own else None
        self._channel = open_channel(self.address, identity=identity, peer=ROLE, token=None if own else "")
        self._stub = EnvironmentServiceStub(self._channel)
        try:
            await self._describe(self._channel)
        except BaseException:
            await self.close()
            raise

    async def _describe(self, channel: DeadlineChannel) -> None:
        found = await until_it_serves(
            lambda: self.stub.Describe(pb.DescribeRequest(), timeout=ASK_S), channel,
            service=SERVICE, kind=ROLE, address=self.address, timeout_s=self.section.start_timeout_s,
        )  # fmt: skip
        where = f"environment server {self.address} ({found.name})"
        if found.protocol != PROTOCOL:
            raise ValueError(f"{where} speaks protocol {found.protocol}, this release {PROTOCOL}: update the older one")
        try:
            self.tools = [_tool(schema) for schema in json.loads(found.tools_json)] if found.tools_json else None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{where}: its tools are no list of OpenAI's schemas: {error!r}") from error
        log.info("environment server found", address=self.address, environment=found.name)

    @property
    def stub(self) -> EnvironmentServiceStub:
        """The calls of the server, which must have been started."""
        assert self._stub is not None, "a call before start()"
        return self._stub

    async def open(self, row: Mapping[str, Any], seed: int, key: str) -> tuple["RemoteEpisode", Sequence[Message]]:
        """As EnvironmentPool.open."""
        name = f"{next(self._names)}/{key.encode('ascii', 'replace').decode()}"[:_LONGEST_NAME]
        episode = RemoteEpisode(self, name, key)
        try:
            return episode, await episode.reset(row, seed)
        except BaseException:
            await episode.close()
            raise

    async def close(self) -> None:
        """Close the connection; the server closes what is open when its lifetime is over."""
        self.is_closed = True
        if self._channel is not None:
            await self._channel.close()

    async def send(self, method: str, request: Any, key: str) -> Any:
        """Make a call, again while the server is unreachable, for start_timeout_s.

        Returns: the reply. Raises: NotFound: the server does not know the episode; EpisodeFailed.
        """
        clock, most_s = asyncio.get_running_loop().time, self.section.turn_timeout_s
        lost_s, pause_s = clock(), _FIRST_PAUSE_S
        while True:
            if self.is_closed:
                raise EpisodeFailed(key, "killed", "the environment is closed")
            sent_s = clock()
            try:
                return await getattr(self.stub, method)(request, timeout=most_s + TRANSIT_S)
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
            if isinstance(failure, NotFound):
                raise failure
            if isinstance(failure, DeadlineExceeded):
                raise EpisodeFailed(key, "late", f"{self.address} took longer than turn_timeout_s = {most_s:g} s")
            why = f"{self.address}: {type(failure).__name__}: {failure}"
            if not isinstance(failure, Unavailable | Aborted):
                raise EpisodeFailed(key, "error", why)
            if clock() - sent_s > TRANSIT_S:
                lost_s, pause_s = clock(), _FIRST_PAUSE_S
            if clock() + pause_s - lost_s > self.section.start_timeout_s:
                unreached = f"for start_timeout_s = {self.section.start_timeout_s:g} s"
                raise EpisodeFailed(key, "killed", f"its server was unreachable {unreached}: {why}")
            await asyncio.sleep(max(failure.after_s, random.uniform(pause_s / 2, pause_s)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class RemoteEpisode:
    """An open episode in a server; `RemoteEnvironment.open` makes it.

    Args:
        name: on the wire.
        key: in errors and logs.
    """

    def __init__(self, host: RemoteEnvironment, name: str, key: str) -> None:
        self._host, self._name, self._key = host, name, key
        # The calls so far, and what they returned.
        self._past: list[tuple[tuple[str, Any], Any]] = []
        self._is_open = True

    async def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begin it. Returns: messages to append. Raises: EpisodeFailed."""
        section = self._host.section
        request = pb.ResetRequest(
            episode=self._name,
            owner=self._host.owner,
            row_json=json.dumps(row),
            seed=seed,
            lifetime_s=section.episode_timeout_s + section.turn_timeout_s + _SLACK_S,
        )
        messages: Sequence[Message] = await self._call(("Reset", request))
        return messages

    async def step(self, turn: AssistantTurn) -> TurnReply:
        """As Episode.step."""
        given = json.dumps({name: getattr(turn, name) for name in AssistantTurn.__slots__})
        request = pb.StepRequest(episode=self._name, index=len(self._past) - 1, turn_json=given)
        return TurnReply.of(await self._call(("Step", request)))

    async def close(self) -> None:
        """As Episode.close; an episode that the server cannot be asked to close is closed after its lifetime."""
        if not self._is_open or self._host.is_closed:
            return
        self._is_open = False
        most_s = self._host.section.turn_timeout_s + TRANSIT_S
        try:
            await self._host.stub.Close(pb.CloseRequest(episode=self._name), timeout=most_s)
        except grpc.RpcError as error:
            why = f"{self._host.address}: {from_rpc_error(error)}"
            log.warning("environment not closed", episode=self._key, why=why)

    async def _call(self, call: tuple[str, Any]) -> Any:
        """Make a call, after the episode was built again if the server has lost it. Raises: EpisodeFailed."""
        assert self._is_open, "a call of an episode that is closed"
        losses = 0
        while True:
            try:
                if losses:
                    await repeat(self._key, self._past, self._value, f"{self._host.address} had lost it")
                value = await self._value(call)
                self._past.append((call, value))
                return value
            except NotFound as lost:
                losses += 1
                if losses > MAX_REPLAYS:
                    text = f"{self._host.address} has lost it {losses} times, the last time with {lost}"
                    raise EpisodeFailed(self._key, "killed", text) from lost
                log.info("environment lost by its server: built again", episode=self._key, address=self._host.address)

    async def _value(self, call: tuple[str, Any]) -> Any:
        """Return the value of a reply. Raises: NotFound; EpisodeFailed."""
        reply = await self._host.send(*call, self._key)
        if reply.WhichOneof("outcome") == "failure":
            raise EpisodeFailed(self._key, KINDS.get(reply.failure.kind, "error"), reply.failure.text)
        try:
            if isinstance(reply, pb.ResetResponse):
                return messages_of(json.loads(reply.messages_json), RESET)
            said = reply.reply
            reward = said.reward if said.HasField("reward") else None
            follows = {"messages": json.loads(said.messages_json), "token_ids": [*said.token_ids]}
            if said.conversation_json:
                follows["conversation"] = json.loads(said.conversation_json)
            return step_of({**follows, "reward": reward, "done": said.done})
        except (ValueError, RecursionError) as error:
            raise EpisodeFailed(self._key, "bad_reply", f"{self._host.address}: {error}") from error


def _tool(schema: Any) -> Mapping[str, Any]:
    """Return a tool's schema. Raises: ValueError, TypeError, KeyError: it is none."""
    if schema["type"] != "function" or not isinstance(schema["function"]["name"], str):
        raise ValueError(f"{schema!r:.100} names no function")
    found: Mapping[str, Any] = schema
    return found
