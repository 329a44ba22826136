"""Environments in a server of their own: lost calls, restarts, lifetimes, servers that are none, and what is left."""

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from coordinator.environments import remote
from coordinator.environments.conversations import Environments, started_environment
from coordinator.environments.pool import EpisodeFailed, TurnReply
from coordinator.environments.remote import SERVICE, RemoteEnvironment
from environment_service import servicer as servicer_module
from servicekit.errors import (
    AlreadyExists,
    ConfigError,
    InvalidRequest,
    NotFound,
    Overloaded,
    Unavailable,
    from_rpc_error,
)
from servicekit.rpc.server import GrpcServer
from servicekit.security.run_token import VARIABLE
from servicekit.security.tls import Identity
from tandem_api.environment.v1 import environment_pb2 as pb
from tandem_api.environment.v1 import environment_pb2_grpc
from tandem_config.loading import load_config
from tandem_config.sections.environment import EnvironmentSection
from tests.chats import QWEN, renderer_of, train_tokenizer
from tests.integration.coordinator.test_conversations import GUESS, Policy, prompt
from tests.integration.coordinator.test_environments import (
    COUNTER,
    TOOLS,
    failure,
    opened,
    play,
    row,
    server_of,
    turn,
)
from tests.integration.coordinator.test_reward_server import Servers, services
from tests.kit.certificates import Authority, files_of, variables
from tests.kit.processes import free_port
from tests.kit.waiting import until

pytestmark = pytest.mark.integration

TOKEN = "a-token-of-this-run"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Starts processes that serve the counter."""
    (tmp_path / "mine.py").write_text(COUNTER)
    command = ("-m", "environment_service", "--function", f"{tmp_path}/mine.py:Env", "--args", '{"scale": 10}')
    with Servers(tmp_path, *command, "--workers", "1") as started:
        yield started


@pytest.fixture
async def connected() -> AsyncIterator[Callable[..., RemoteEnvironment]]:
    """`host = connected(port, **settings)`, not started."""
    async with AsyncExitStack() as stack:

        def make(port: int, identity: Identity | None = None, **settings: Any) -> RemoteEnvironment:
            section = EnvironmentSection(address=f"127.0.0.1:{port}", **settings)
            host = RemoteEnvironment(section, run_id="math-7", identity=identity)
            stack.push_async_callback(host.close)
            return host

        yield make


Connected = Callable[..., RemoteEnvironment]


async def killed(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    await asyncio.to_thread(process.wait, 30)


@pytest.mark.runs("python -m environment_service")
async def test_a_run_waits_for_the_server_which_drains(servers: Servers, connected: Connected) -> None:
    host = connected(port := free_port())
    starting = asyncio.create_task(host.start())
    process = servers.start(port)
    await starting
    assert host.tools is None
    episode, messages = await host.open(row(), 7, "e")
    assert messages == [{"role": "user", "content": "p 7"}]
    assert await play(episode) == 37.0
    await episode.close()
    assert await services(port) >= {SERVICE, "grpc.health.v1.Health"}
    file = servers.folder / "said"
    await host.open(row(file=str(file)), 8, "left open")
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 30) == 0
    assert file.read_text() == "closed "


async def test_a_restart_builds_episodes_again_and_fails_none(servers: Servers, connected: Connected) -> None:
    """Two calls are under way when the server is killed; three are between their turns, one cannot be repeated."""
    first = servers.start(port := free_port())
    host = connected(port)
    await host.start()
    async with AsyncExitStack() as stack:
        episodes = await opened(stack, host, "waits", "waits", "", "", "differ")
        playing = [asyncio.create_task(play(episode, 1)) for episode in episodes[:2]]
        await asyncio.sleep(0.1)
        await killed(first)
        playing.append(asyncio.create_task(play(episodes[2], 1)))
        servers.start(port)
        assert await asyncio.gather(*playing) == [30.0, 40.0, 50.0]
        assert await play(episodes[3], 1) == 60.0
        kind, text = await failure(episodes[4].step(turn(1)))
    assert kind == "not_repeatable"
    assert text.startswith(f"e4: 127.0.0.1:{port} had lost it, and when turn 0 was repeated, it returned ([{{'role'")


async def test_a_server_that_stays_away_fails_its_episodes_by_name(servers: Servers, connected: Connected) -> None:
    process = servers.start(port := free_port())
    await (before := connected(port)).start()
    host = connected(port, start_timeout_s=1.0)
    host._channel, host._stub = before._channel, before._stub
    episode, _ = await host.open(row(), 0, "e")
    await killed(process)
    kind, text = await failure(episode.step(turn()))
    assert (kind, text.partition(": 127")[0]) == (
        "killed",
        "e: its server was unreachable for start_timeout_s = 1 s",
    )
    assert f"127.0.0.1:{port}: Unavailable: " in text
    with capture_logs() as logs:
        await episode.close()
    assert [line["event"] for line in logs] == ["environment not closed"]


async def test_an_absent_server_is_named(connected: Connected) -> None:
    with pytest.raises(ValueError, match=r"no environment server at 127.0.0.1:1 within start_timeout_s = 0.3 s: .*ref"):
        await connected(1, start_timeout_s=0.3).start()


async def test_the_runs_token_keeps_others_away(
    servers: Servers, connected: Connected, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.start(port := free_port(), **{VARIABLE: TOKEN})
    monkeypatch.setenv(VARIABLE, TOKEN)
    await connected(port).start()
    with pytest.raises(ValueError, match=r"environment server .*: Unauthenticated: .*without the run's token"):
        await connected(port, security="none").start()


async def test_mutual_tls_needs_a_certificate_of_the_role_environment(
    servers: Servers, connected: Connected, tmp_path: Path
) -> None:
    authority = Authority("test authority")
    files = {role: files_of(tmp_path, authority, role) for role in ("environment", "coordinator", "reward")}
    servers.start(port := free_port(), **variables(files["environment"]))
    host = connected(port, Identity(files["coordinator"], "coordinator"))
    await host.start()
    episode, _ = await host.open(row(), 0, "e")
    assert await play(episode) == 30.0
    refused = servers.start(other := free_port(), **variables(files["reward"]))
    assert await asyncio.to_thread(refused.wait, 60) == 2
    assert "environment.tandem" in (tmp_path / f"log-{other}").read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--function", "mine.py:Evn"], 2, "environment: {folder}/mine.py has no Evn; did you mean Env?"),
        (["--function", "mine.py:Env", "--args", "{"], 2, "--args is no JSON: Expecting property name"),
        (["--function", "mine.py:Env", "--args", "[1]"], 2, "--args: Input should be a valid dictionary"),
        (["--tools", "mine.py:Env", "--args", '{"a": 1}'], 2, "it has args, which tools do not get"),
        (["--function", "Env"], 2, "--function: needs the form FILE.py:NAME"),
        (["--function", "mine.py:Env", "--workers", "0"], 2, "--workers: Input should be greater than 0"),
    ],
)
def test_options_that_are_wrong_are_named(
    servers: Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], code: int, said: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    servers.command = ("-m", "environment_service", *options)
    assert servers.start(0).wait(60) == code
    line = json.loads((tmp_path / "log-0").read_text().splitlines()[-1])
    assert said.format(folder=tmp_path) in line["error"]


@asynccontextmanager
async def served(folder: Path, code: str = COUNTER, **settings: Any) -> AsyncIterator[Any]:
    """The calls of a servicer, and itself."""
    async with server_of(folder, code, **settings) as host:
        yield host.stub, host


def begin(episode: str = "a", lifetime_s: float = 60.0, **columns: Any) -> pb.ResetRequest:
    return pb.ResetRequest(
        episode=episode, owner="r", row_json=json.dumps(row(**columns)), seed=5, lifetime_s=lifetime_s
    )


def take(index: int, text: str = "1", episode: str = "a") -> pb.StepRequest:
    given = {"text": text, "message": {"role": "assistant", "content": text}, "index": index}
    return pb.StepRequest(episode=episode, index=index, turn_json=json.dumps(given))


def content(reply: pb.StepResponse) -> str:
    (message,) = json.loads(reply.reply.messages_json)
    return str(message["content"])


async def refused(call: Any) -> Exception:
    with pytest.raises(grpc.RpcError) as raised:
        await call
    return from_rpc_error(raised.value)


async def test_a_call_that_is_made_again_gets_the_recorded_reply(tmp_path: Path) -> None:
    async with served(tmp_path) as (stub, _):
        first = await stub.Reset(begin(does="waits", at=1), timeout=20)
        assert await stub.Reset(begin(does="waits", at=1), timeout=20) == first
        assert content(await stub.Step(take(0), timeout=20)) == content(await stub.Step(take(0), timeout=20)) == "6"
        lost = stub.Step(take(1), timeout=20)
        await asyncio.sleep(0.2)
        lost.cancel()  # while its work, of 0.6 s, is under way
        assert content(await stub.Step(take(1), timeout=20)) == "7"
        last = await stub.Step(take(2), timeout=20)
        assert (last.reply.reward, last.reply.done, last.reply.messages_json) == (8.0, True, "[]")
        await stub.Close(pb.CloseRequest(episode="a"), timeout=20)
        await stub.Close(pb.CloseRequest(episode="a"), timeout=20)


async def test_calls_that_cannot_be_right_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as (stub, _):

        async def said(call: Any) -> tuple[type, str]:
            error = await refused(call)
            return type(error), str(error)

        assert await said(stub.Step(take(0), timeout=20)) == (NotFound, "a is not open here: begin it again")
        await stub.Reset(begin(), timeout=20)
        kind, text = await said(stub.Reset(begin(does="else"), timeout=20))
        assert (kind, text) == (AlreadyExists, "a has begun with another row, seed, owner or lifetime")
        await stub.Step(take(0), timeout=20)
        for wrong in (take(0, "2"), take(2)):
            kind, text = await said(stub.Step(wrong, timeout=20))
            assert (kind, "which has begun 1: neither the next one nor the last again" in text) == (
                InvalidRequest,
                True,
            )
        for given, part in (("[]", "a list, not an object"), ("{", "is no JSON"), ('{"txt": 1}', "argument 'txt'")):
            bad = pb.StepRequest(episode="a", index=1, turn_json=given)
            kind, text = await said(stub.Step(bad, timeout=20))
            assert (kind, part in text) == (InvalidRequest, True)
        monkeypatch.setattr(servicer_module, "MOST_EPISODES", 1)
        kind, text = await said(stub.Reset(begin("b"), timeout=20))
        assert (kind, text.startswith("1 episodes are open")) == (Overloaded, True)
        await stub.Close(pb.CloseRequest(episode="a"), timeout=20)


async def test_an_episode_without_calls_ends_and_is_built_again_if_its_caller_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says whose it was; one whose call takes long is not without calls."""
    monkeypatch.setattr(remote, "_SLACK_S", 0.0)
    file = tmp_path / "said"
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(server_of(tmp_path))
        host.section = host.section.model_copy(update={"episode_timeout_s": 0.4, "turn_timeout_s": 0.1})
        with capture_logs() as logs:
            (episode,) = await opened(stack, host, "", file=str(file))
            await asyncio.to_thread(until, file.exists)
        said = [(line["owner"].split()[0], line["lifetime_s"]) for line in logs if "lifetime_s" in line]
        assert said == [("r", 0.5)]
        assert await play(episode, 1) == 3.0
    assert file.read_text() == "closed closed "


async def test_a_call_is_not_cut_off_by_the_lifetime_that_was_left(tmp_path: Path) -> None:
    async with served(tmp_path) as (stub, _):
        await stub.Reset(begin(lifetime_s=1.0, does="waits", at=0), timeout=20)
        await asyncio.sleep(0.7)
        assert content(await stub.Step(take(0), timeout=20)) == "6"
        await stub.Close(pb.CloseRequest(episode="a"), timeout=20)


async def test_200_episodes_leave_nothing_behind(tmp_path: Path) -> None:
    """A tenth raises, a tenth is left in the middle of a call, one in twenty ends its process. server_of looks."""
    kinds = ["raises", "hangs", "", "", "", "", "", "", "", ""] * 20
    kinds[19::20] = ["exits"] * 10
    found: dict[str, int] = {}

    async def one(host: RemoteEnvironment, free: asyncio.Semaphore, place: int) -> None:
        async with free:
            result = "right"
            try:
                episode, _ = await host.open(row(does=kinds[place], at=place % 3), place, f"e{place}")
                try:
                    async with asyncio.timeout(3.0 if kinds[place] == "hangs" else None):
                        assert await play(episode) == place + 3
                finally:
                    await episode.close()
            except TimeoutError:
                result = "left"
            except EpisodeFailed as failed:
                result = failed.kind
            found[f"{kinds[place]} {result}"] = found.get(f"{kinds[place]} {result}", 0) + 1

    async with server_of(tmp_path) as host:
        free = asyncio.Semaphore(64)
        await asyncio.gather(*(one(host, free, place) for place in range(200)))
    assert found == {"raises error": 20, "hangs left": 20, "exits killed": 10, " right": 150}


class Says(environment_pb2_grpc.EnvironmentServiceServicer):
    """A server of others: its replies are given."""

    def __init__(self, **replies: Any) -> None:
        self.replies = {
            "Describe": pb.DescribeResponse(protocol=1, name="theirs"),
            "Reset": pb.ResetResponse(messages_json="[]"),
            "Step": pb.StepResponse(reply=pb.Reply(messages_json="[]", done=True)),
        } | replies

    async def Describe(self, request: Any, context: Any) -> Any:
        return self.replies["Describe"]

    async def Reset(self, request: Any, context: Any) -> Any:
        return self.replies["Reset"]

    async def Step(self, request: Any, context: Any) -> Any:
        reply = self.replies["Step"]
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def Close(self, request: Any, context: Any) -> Any:
        return pb.CloseResponse()


@asynccontextmanager
async def theirs(connected: Connected, **replies: Any) -> AsyncIterator[RemoteEnvironment]:
    server = GrpcServer("environment")
    server.add(environment_pb2_grpc.add_EnvironmentServiceServicer_to_server, Says(**replies), SERVICE)
    address = await server.start()
    server.set_ready(True)
    host = connected(int(address.rpartition(":")[2]), security="none", start_timeout_s=5.0)
    try:
        yield host
    finally:
        await host.close()
        await server.drain(0)


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (pb.DescribeResponse(protocol=2, name="next"), r"\(next\) speaks protocol 2, this release 1: update the older"),
        (pb.DescribeResponse(protocol=1, tools_json="{"), "its tools are no list of OpenAI's schemas: .*Expecting"),
        (pb.DescribeResponse(protocol=1, tools_json='["add"]'), "its tools are no list of OpenAI's schemas: "),
        (pb.DescribeResponse(protocol=1, tools_json="[{}]"), "its tools are no list of OpenAI's schemas: "),
        (pb.DescribeResponse(protocol=1, tools_json='[{"type": "x"}]'), "names no function"),
    ],
)
async def test_a_server_that_cannot_be_used_is_named_at_the_start(
    connected: Connected, reply: pb.DescribeResponse, part: str
) -> None:
    async with theirs(connected, Describe=reply) as host:
        with pytest.raises(ValueError, match=rf"environment server 127.0.0.1:\d+ .*{part}"):
            await host.start()


async def test_a_server_of_something_else_is_named(connected: Connected) -> None:
    server = GrpcServer("other")
    port = int((await server.start()).rpartition(":")[2])
    with pytest.raises(ValueError, match=r"environment server .*: .*it must serve tandem_api.environment.v1"):
        await connected(port).start()
    await server.drain(0)


def reply(messages: str, **fields: Any) -> pb.StepResponse:
    return pb.StepResponse(reply=pb.Reply(messages_json=messages, **fields))


@pytest.mark.parametrize(
    ("replies", "kind", "part"),
    [
        ({"Reset": pb.ResetResponse()}, "bad_reply", "Expecting value"),
        ({"Reset": pb.ResetResponse(messages_json="5")}, "bad_reply", "reset returned an int, not a list of messages"),
        ({"Step": pb.StepResponse()}, "bad_reply", "Expecting value"),
        ({"Step": reply("[" * 100_000)}, "bad_reply", "recursion"),
        ({"Step": reply("[]")}, "bad_reply", "neither messages nor done"),
        ({"Step": reply('[{"role": "user"}]')}, "bad_reply", "step returned a message (0) without 'content'"),
        ({"Step": reply("[]", done=True, reward=float("nan"))}, "bad_reply", "which is not finite"),
        ({"Step": reply("[]", conversation_json="{}")}, "bad_reply", "neither messages nor done"),
        ({"Step": reply("[]", conversation_json="7")}, "bad_reply", "an int as conversation"),
        ({"Step": reply("[]", token_ids=[3], done=True)}, "bad_reply", "token_ids and not done=False"),
        ({"Step": pb.StepResponse(failure=pb.Failure(kind=77, text="odd"))}, "error", "e: odd"),  # type: ignore[arg-type]
        ({"Step": ConfigError("no such level")}, "error", "ConfigError: no such level"),
        ({"Step": NotFound("who?")}, "killed", "has lost it 3 times, the last time with who?"),
    ],
)
async def test_replies_that_are_none_fail_the_episode(
    connected: Connected, replies: dict[str, Any], kind: str, part: str
) -> None:
    async with theirs(connected, **replies) as host:
        await host.start()

        async def playing() -> TurnReply:
            episode, _ = await host.open(row(), 0, "e")
            try:
                return await episode.step(turn())
            finally:
                await episode.close()

        found, text = await failure(playing())
    assert found == kind
    assert part in text
    assert part == "e: odd" or f"e: {host.address}" in text


async def test_a_server_that_is_busy_for_a_while_is_asked_again(connected: Connected) -> None:
    async with theirs(connected, Step=Unavailable("draining")) as host:
        await host.start()
        episode, _ = await host.open(row(), 0, "e")
        step = asyncio.create_task(episode.step(turn()))
        await asyncio.sleep(0.1)
        assert not step.done()
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step


async def test_a_call_that_waits_fails_when_its_host_is_closed(connected: Connected, tmp_path: Path) -> None:
    async with theirs(connected, Step=Unavailable("draining")) as host:
        await host.start()
        episode, _ = await host.open(row(), 0, "e")
        step = asyncio.create_task(episode.step(turn()))
        await asyncio.sleep(0.1)
        await host.close()
        assert await failure(step) == ("killed", "e: the environment is closed")
        await episode.close()


async def test_a_conversation_whose_environment_is_a_server(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([QWEN, "How much? Guess a number up to 9; seed no a number!"])
    async with server_of(tmp_path, GUESS, function=f"{tmp_path}/mine.py:Guess", args={"most": 5}) as host:
        limits = {"max_new_tokens": 200, "max_prompt_tokens": 200, "seed": 3}
        renderer = renderer_of(tokenizer, "qwen", tools=host.tools)
        made = Environments(pool=host, section=host.section, renderer=renderer, **limits)
        prompts = await made.opened({"g": prompt()})
        policy = Policy(tokenizer, made, prompts["g"])
        assert prompts["g"].messages is not None
        assert prompts["g"].messages[-1]["content"].startswith("Guess a number up to 5")
        assert await policy.says("3") == "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
        assert await policy.says("7") is None
        assert policy.ended() == ("done", [None, 1.0], False)


async def test_tools_of_a_server_give_no_reward(tmp_path: Path) -> None:
    tools = {"function": None, "tools": (f"{tmp_path}/mine.py:add",)}
    async with server_of(tmp_path, TOOLS, **tools) as host:
        assert host.tools is not None
        assert [tool["function"]["name"] for tool in host.tools] == ["add"]
        (tmp_path / "run.yaml").write_text(
            f"model: {{path: m}}\ndata: {{train: rows.jsonl, heldout: h.jsonl}}\nreward: {{kind: environment}}\n"
            f"environment: {{address: '{host.address}', security: none}}\n"
        )
        with pytest.raises(ConfigError, match="environment: the reward environment needs a class: tools give no"):
            async with started_environment(load_config(tmp_path / "run.yaml"), "r", None):
                pass
