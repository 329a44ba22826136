"""OpenEnv: an environment that a server runs; each episode is a session of its own, over a WebSocket."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.environments.adapters import library, user
from coordinator.workers.episodes.replies import AssistantTurn, Message

_connect = library("websockets.asyncio.client", "openenv").connect

_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", flags=re.DOTALL)
_OWN = ("done", "reward", "metadata")
_MAX_BYTES = 64 << 20


class OpenEnv:
    """A session of a running server.

    Args:
        url: of the server, http(s) or ws(s); the session is at /ws below it.
        action: the field of the action that a turn's text is; None: the text is the action, a JSON object.
        observation: the field of the observation that is the message; None: all of it, as JSON.
        reset: arguments of reset, besides the seed.
        columns: names of columns that are arguments of reset too.
        invalid_reward: of a turn that is no action, which is no step of the environment.
    """

    def __init__(
        self,
        url: str,
        action: str | None = None,
        observation: str | None = None,
        reset: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
        invalid_reward: float = 0.0,
    ) -> None:
        scheme, _, address = url.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not address:
            raise ValueError(f"url: {url!r} is none of a server: http://HOST:PORT")
        self._url = f"{scheme.replace('http', 'ws')}://{address.rstrip('/')}/ws"
        self._action, self._observation, self._columns = action, observation, columns
        self._reset = dict(reset or {})
        self._invalid_reward = invalid_reward
        self._socket: Any = None

    @classmethod
    def check_args(cls, **args: Any) -> None:
        """Look at the arguments; a server is not called. Raises: ValueError."""
        cls(**args)

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Open a session and begin."""
        self._socket = await _connect(self._url, max_size=_MAX_BYTES)
        columns = {name: row["columns"][name] for name in self._columns}
        begun = await self._call("reset", {"seed": seed % 2**31, **self._reset, **columns})
        return user(self._text(begun["data"]["observation"]))

    async def step(self, turn: AssistantTurn) -> tuple[list[Message], float | None, bool]:
        """Send the turn as an action; the policy reads why the server refuses one."""
        text = str(turn.message["content"] or "").strip()
        try:
            reply = await self._call("step", self._parsed(text))
        except _NoAction as error:
            return user(f"That is no valid action: {error}"), self._invalid_reward, False
        data = reply["data"]
        return [] if data["done"] else user(self._text(data["observation"])), data["reward"], bool(data["done"])

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.send(json.dumps({"type": "close"}))
            await self._socket.close()

    def _parsed(self, text: str) -> dict[str, Any]:
        if self._action is not None:
            return {self._action: text}
        fenced = _FENCED.search(text)
        try:
            action = json.loads(fenced[1] if fenced else text)
        except ValueError as error:
            raise _NoAction(f"it is not JSON ({error})") from error
        if not isinstance(action, dict):
            raise _NoAction("it is no JSON object")
        return action

    async def _call(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Send a message and return the answer. Raises: _NoAction; RuntimeError: the server's error."""
        await self._socket.send(json.dumps({"type": kind, "data": data}))
        reply = json.loads(await self._socket.recv())
        if reply["type"] != "error":
            return reply
        error = reply["data"]
        if kind == "step" and error.get("code") == "VALIDATION_ERROR":
            raise _NoAction(str(error.get("errors") or error.get("message")))
        raise RuntimeError(f"the server answers {kind} with {error.get('code')}: {error.get('message')}")

    def _text(self, observation: Mapping[str, Any]) -> str:
        shown: Any = {name: part for name, part in observation.items() if name not in _OWN}
        if self._observation is not None:
            shown = observation[self._observation]
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)


class _NoAction(ValueError):
    """A turn is no action; the policy reads why."""
