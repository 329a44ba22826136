"""Verifiers (version 1 of its API): an episode of one of its environments, in which Tandem's policy is the model.

The environment runs as it does everywhere, with its tools, stops and rewards, and calls a model over HTTP. That model
is here: a request is what follows the last turn, and the next turn is its answer. Rows of a task set:

python -m coordinator.environments.adapters.verifiers my-taskset --size 1000 > train.jsonl
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.environments.adapters import library
from coordinator.workers.episodes.replies import AssistantTurn, Message

vf = library("verifiers.v1", "verifiers")
_web = library("aiohttp.web", "verifiers")
_mcp = library("verifiers.v1.harnesses.utils.mcp", "verifiers")
_httpx = library("httpx", "verifiers")

_Harness: Any = vf.Harness
# The harness below, by the name under which verifiers finds it.
HARNESS = "tandem_in_process"
COLUMN = "task"
_SESSION = "X-Session-ID"
_KEPT = ("role", "content", "name", "tool_call_id")
__all__ = ["InProcess", "Verifiers"]


class InProcess(_Harness):  # type: ignore[misc] # it has no types here
    """Chats and calls tools as verifiers' `null` does, but without a process for each episode."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Mapping[str, str], data: Any
    ) -> Any:
        """Run the conversation to a turn without calls."""
        system, prompt = self.resolve_prompt(data)
        messages = [] if system is None else [{"role": "system", "content": system}]
        given = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or []
        messages += [message.model_dump(exclude_none=True) for message in given]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with contextlib.AsyncExitStack() as stack, _httpx.AsyncClient(timeout=None) as client:
            tools, dispatch, open_servers = await _mcp.connect_mcp(servers, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if reply.is_error:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")
                for call in message["tool_calls"]:
                    messages.append(await _tool_message(open_servers, dispatch, call))


async def _tool_message(servers: Any, dispatch: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    content = f"error: there is no tool {name!r}" if name not in dispatch else "error: the arguments are no object"
    if name in dispatch and isinstance(arguments, dict):
        content = await _mcp.call_mcp(servers, dispatch, name, arguments)
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


class _Served:
    """An environment of verifiers that serves all episodes of a process, and the model that it calls."""

    def __init__(self, config: Any) -> None:
        self.environment = vf.load_environment(config)
        # The episodes under way, by the ids of their traces.
        self.playing: dict[str, Verifiers] = {}
        self.model: Any = None
        self._tasks: list[Any] = []
        self._source = iter(self.environment.taskset)
        self._stack = contextlib.AsyncExitStack()  # never closed: what is in it ends with the process

    @classmethod
    async def started(cls, config: Any) -> "_Served":
        """Load an environment, listen, and start what its episodes share."""
        self = cls(config)
        app = _web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._complete)
        runner = _web.AppRunner(app)
        await runner.setup()
        await _web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self.model = vf.ModelContext(model="policy", client=vf.EvalClientConfig(base_url=address))
        await self._stack.enter_async_context(self.environment.serving())
        return self

    def task(self, index: int) -> Any:
        """Return a task by its place. Raises: IndexError: there are fewer."""
        self._tasks += itertools.islice(self._source, max(0, index + 1 - len(self._tasks)))
        return self._tasks[index]

    async def _complete(self, request: Any) -> Any:
        """Answer a request with the next turn of its episode."""
        body = await request.json()
        message = await self.playing[request.headers[_SESSION]].asked(body)
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        about = {"id": "turn", "created": 0, "model": body["model"], "usage": usage}
        choice = {"index": 0, "finish_reason": reason}
        return _web.json_response({**about, "object": "chat.completion", "choices": [{**choice, "message": message}]})


_SERVED: dict[str, "asyncio.Task[_Served]"] = {}


class Verifiers:
    """An episode of an environment.

    Args:
        id: of the task set: the package that exports it.
        environment: other settings of verifiers' EnvConfig: `taskset`, `id`, and those of its roles.
        role: the policy's; the others need a `client` in `environment`.
    """

    def __init__(
        self,
        id: str,
        environment: Mapping[str, Any] | None = None,
        role: str = "agent",
    ) -> None:
        self._config = _config(id, environment or {}, role)
        self._role = role
        self._asked: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._episode: asyncio.Task[Any] | None = None
        self._answer: asyncio.Future[Any] | None = None
        # What the environment has said and got so far.
        self.said: list[dict[str, Any]] = []
        self.tools: Any = None

    @classmethod
    def check_args(cls, **args: Any) -> None:
        """Load the environment. Raises: whatever verifiers does."""
        vf.load_environment(cls(**args)._config)

    async def reset(self, row: Mapping[str, Any], seed: int) -> list[Message]:
        """Begin the task that the row names; what its prompt has beyond the row's messages follows them."""
        del seed  # a task is what verifiers draws
        given = [{name: part for name, part in message.items() if name in _KEPT} for message in row["messages"]]
        opening = await self.begin(int(row["columns"][COLUMN]))
        if opening is None or opening[: len(given)] != given:
            raise ValueError(f"the row's messages are not those of task {row['columns'][COLUMN]}: write the rows again")
        return opening[len(given) :]

    async def begin(self, task: int) -> list[Message] | None:
        """Begin a task. Returns: the messages of the first request; None: there was none."""
        key = self._config.model_dump_json()
        if key not in _SERVED:
            _SERVED[key] = asyncio.create_task(_Served.started(self._config))
        self._served = await asyncio.shield(_SERVED[key])
        environment, model = self._served.environment, self._served.model
        running = environment.run_episode(self._served.task(task), model, on_trace=self._traced)
        self._episode = asyncio.create_task(running)
        return await self._next()

    async def step(self, turn: AssistantTurn) -> tuple[list[Message], float | None, bool]:
        """Answer the request. Returns: what the next one adds, or the sum of the task's rewards at its end."""
        assert self._answer is not None  # begun
        message: dict[str, Any] = {"role": "assistant", "content": turn.message["content"] or ""}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls:
            message["tool_calls"] = [_call(turn, place, call) for place, call in enumerate(turn.tool_calls)]
        self.said.append({"role": "assistant"})
        self._answer.set_result(message)
        following = await self._next()
        if following is not None:
            return following, None, False
        return [], self._reward(), True

    async def close(self) -> None:
        """End the episode, if it has not ended."""
        if self._episode is not None:
            self._episode.cancel()
            await asyncio.wait([self._episode])
            for trace in [name for name, playing in self._served.playing.items() if playing is self]:
                del self._served.playing[trace]

    async def asked(self, body: Mapping[str, Any]) -> Any:
        """Hand a request over, and wait for its answer."""
        answer = asyncio.get_running_loop().create_future()
        await self._asked.put((body, answer))
        return await answer

    def _traced(self, trace: Any) -> None:
        self._served.playing[trace.id] = self

    async def _next(self) -> list[Message] | None:
        """Wait for the next request, or the end. Returns: what the request adds; None: the episode has ended."""
        assert self._episode is not None
        asking = asyncio.create_task(self._asked.get())
        await asyncio.wait([asking, self._episode], return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            asking.cancel()
            return None
        body, self._answer = asking.result()
        before, self.tools = self.said, body.get("tools")
        self.said = [_message(message) for message in body["messages"]]
        roles = [message["role"] for message in before]
        if [message["role"] for message in self.said[: len(before)]] != roles:
            raise ValueError("the environment's request does not continue the conversation, which is not supported")
        return self.said[len(before) :]

    def _reward(self) -> float:
        """Add up the rewards of the policy's traces. Raises: RuntimeError: the episode has failed."""
        assert self._episode is not None
        episode = self._episode.result()
        traces = [trace for trace in episode.traces if trace.agent is None or trace.agent.name in (self._role, None)]
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not traces:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else f"no role {self._role}")
        return float(sum(trace.reward for trace in traces))


def _config(taskset: str, settings: Mapping[str, Any], role: str) -> Any:
    """Complete a configuration: the policy's role has the harness above, and runs here."""
    sys.modules.setdefault(HARNESS, sys.modules[__name__])
    own = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}, **settings.get(role, {})}
    return vf.resolve_env_config({**settings, "taskset": {**settings.get("taskset", {}), "id": taskset}, role: own})


def _call(turn: AssistantTurn, place: int, call: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": call["function"]["name"], "arguments": json.dumps(call["function"].get("arguments") or {})}
    return {"id": str(call.get("id") or f"call_{turn.index}_{place}"), "type": "function", "function": function}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a request with a text; other parts than texts stay, and are refused by name."""
    kept = {name: message[name] for name in _KEPT if message.get(name) is not None}
    parts = kept.get("content", "")
    if isinstance(parts, list) and all(part.get("type") == "text" for part in parts):
        kept["content"] = "\n".join(part["text"] for part in parts)
    return kept


async def _rows(taskset: str, size: int, environment: Mapping[str, Any], role: str) -> None:
    """Begin each task to its first request, and print that as a row."""
    for index in range(size):
        episode = Verifiers(taskset, environment, role)
        try:
            messages = await episode.begin(index)
            if messages is None:
                episode._reward()
        except IndexError:
            break
        finally:
            await episode.close()
        print(json.dumps({"prompt": messages, "tools": episode.tools, "answer": "", COLUMN: index}))
    sys.stdout.flush()
    os._exit(0)  # what serves the tasks ends with the process


def main(arguments: Sequence[str] | None = None) -> None:
    """Write rows to stdout."""
    parser = argparse.ArgumentParser(description="Write the tasks of a task set of verifiers as rows.")
    parser.add_argument("id", help="the package that exports the task set")
    parser.add_argument("--size", type=int, default=1000, help="rows, if there are as many tasks")
    parser.add_argument("--environment", type=json.loads, default={}, help="environment.args.environment, as JSON")
    parser.add_argument("--role", default="agent", help="the policy's")
    options = parser.parse_args(arguments)
    asyncio.run(_rows(options.id, options.size, options.environment, options.role))


if __name__ == "__main__":
    main()
