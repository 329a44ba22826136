"""Adapters of other libraries: whole episodes in real workers, with the libraries of `make check-adapters`.

Without them: importing the coordinator imports none of them, and a missing one is named with its extra.
"""

import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.environments.pool import EnvironmentPool, EpisodeFailed, TurnReply
from coordinator.workers.episodes.replies import AssistantTurn
from tandem_config.sections.environment import EnvironmentSection
from tests.house.repository import REPO
from tests.kit.waiting import until

SIDE = REPO / ".cache/adapters-venv"
EXAMPLES = REPO / "examples/adapters"
ADAPTERS = "coordinator.environments.adapters"
EXTRAS = {
    "gymnasium": "gymnasium",
    "textarena": "textarena",
    "websockets": "openenv",
    "verifiers": "verifiers",
    "reasoning_gym": "reasoning-gym",
}
START_S = 120.0

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]
needs_libraries = pytest.mark.skipif(
    not (SIDE / "installed.txt").exists(),
    reason="no libraries: `make check-adapters` installs requirements/adapters.txt",
)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> str:
    """Workers find the libraries before the packages of .venv. Returns: PYTHONPATH for other processes."""
    (packages,) = SIDE.glob("lib/python3*/site-packages")
    for place in (str(EXAMPLES), str(packages)):
        monkeypatch.syspath_prepend(place)
    return f"{packages}:{EXAMPLES}:{REPO}"


def of_example(name: str) -> dict[str, Any]:
    """Returns the environment of an example."""
    section = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8"))["environment"]
    return {**section, "workers": 1, "turn_timeout_s": 300.0, "start_timeout_s": 300.0}


@asynccontextmanager
async def pool_of(name: str, **args: Any) -> AsyncIterator[EnvironmentPool]:
    given = of_example(name)
    given["args"] = given["args"] | args
    pool = EnvironmentPool(EnvironmentSection(**given))
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def row(text: str = "Play.", **columns: Any) -> dict[str, Any]:
    return {"prompt": text, "messages": [{"role": "user", "content": text}], "answer": "", "columns": columns}


def turn(index: int, text: str, calls: Sequence[Any] = ()) -> AssistantTurn:
    message = {"role": "assistant", "content": text, "tool_calls": list(calls)}
    return AssistantTurn(text=text, message=message, tool_calls=calls, index=index)


async def play(
    pool: EnvironmentPool, turns: Sequence[str], seed: int = 0, **columns: Any
) -> tuple[str, list[TurnReply]]:
    """Returns what the environment said first, and its replies to the turns."""
    episode, opening = await pool.open(row(**columns), seed, "e")
    replies = [await episode.step(turn(index, text)) for index, text in enumerate(turns)]
    await episode.close()
    return opening[0]["content"], replies


def said(replies: Sequence[TurnReply]) -> list[str]:
    return [reply.messages[0]["content"] for reply in replies if not reply.done]


def test_importing_the_coordinator_imports_no_library() -> None:
    code = f"""
import importlib, pkgutil, sys
import coordinator
for module in pkgutil.walk_packages(coordinator.__path__, "coordinator."):
    if not module.name.startswith("{ADAPTERS}.") and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print([name for name in {list(EXTRAS)} if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=START_S)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(("library", "extra"), EXTRAS.items())
async def test_a_missing_library_is_named_with_its_extra(
    library: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{library}.py").write_text(f'raise ModuleNotFoundError("No module named {library!r}")')
    monkeypatch.syspath_prepend(str(tmp_path))
    module = {"websockets": "openenv"}.get(library, library)
    pool = EnvironmentPool(EnvironmentSection(function=f"{ADAPTERS}.{module}:Any", workers=1, start_timeout_s=START_S))
    with pytest.raises(ValueError) as raised:
        await pool.start()
    assert f"needs: pip install 'tandem[{extra}]'" in str(raised.value)


@pytest.mark.slow
@needs_libraries
async def test_gymnasium(libraries: str) -> None:
    way = ["I go down.", "DOWN", "up? No: right", "right", "down", "right"]
    async with pool_of("frozen_lake") as pool:
        first, replies = await play(pool, way)
        assert first == "SFFF\nFHFH\nFFFH\nHFFG"
        assert [reply.reward for reply in replies] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]
        assert [reply.done for reply in replies] == [False] * 5 + [True]
        assert said(replies)[0].splitlines()[0] == "(Down)"
        _, (invalid, into_a_hole, lost) = await play(pool, ["Downstairs?", "right", "down"])
        assert invalid.reward == -0.1
        assert said([invalid]) == ["That is no valid action. Answer with one of: left, down, right, up"]
        assert (into_a_hole.reward, lost.reward, lost.done) == (0.0, 0.0, True)
    async with pool_of("frozen_lake", make={"max_episode_steps": 2}, actions=None) as pool:
        first, replies = await play(pool, ["0", "My action: 0."])
        assert (first, [reply.done for reply in replies]) == ("0", [False, True])
    # The seed is Gymnasium's: slippery ice is the same for the same seed only.
    async with pool_of("frozen_lake", make={"is_slippery": True}, actions=None) as pool:
        games = [said((await play(pool, ["2"] * 3, seed=seed))[1]) for seed in (3, 3, *range(4, 12))]
        assert games[0] == games[1]
        assert any(game != games[0] for game in games)


@pytest.mark.slow
@needs_libraries
@pytest.mark.parametrize(
    ("name", "args", "part"),
    [
        ("frozen_lake", {"id": "FrozenLake-v9"}, "Environment version `v9` for environment `FrozenLake` doesn't exist"),
        ("frozen_lake", {"make": {"map_nam": "4x4"}}, "map_nam"),
        ("frozen_lake", {"actions": ["left", "right"]}, "2 names, and FrozenLake-v1 has the action space Discrete(4)"),
        ("guess_number", {"id": "Guess"}, "Environment Guess not found in registry"),
        ("guess_number", {"players": 2}, "2 players: name a function as opponent"),
        ("counting", {"url": "localhost:80"}, "url: 'localhost:80' is none of a server: http://HOST:PORT"),
        ("capitals", {"id": "capitols"}, "taskset 'capitols' not found"),
        ("capitals", {"environment": {"agnet": {}}}, "agnet"),
    ],
)
async def test_wrong_arguments_are_named_before_the_run(
    libraries: str, name: str, args: dict[str, Any], part: str
) -> None:
    with pytest.raises(ValueError) as raised:
        async with pool_of(name, **args):
            pass
    assert part in str(raised.value)
    assert "refuses environment.args" in str(raised.value)


@pytest.mark.slow
@needs_libraries
async def test_textarena(libraries: str, tmp_path: Path) -> None:
    async with pool_of("guess_number") as pool:
        first, replies = await play(pool, ["I think [10]", "no brackets here?", "[1]", "[1]", "[1]"], seed=5)
        assert "guess the number between 1 and 20" in first
        assert said(replies)[0] in ("The target number is lower.", "The target number is higher.")
        # Episodes do not disturb each other's numbers, whatever their order.
        alone = [await found(pool, seed) for seed in range(4)]
        episodes = [(await pool.open(row(), seed, str(seed)))[0] for seed in range(4)]
        together = [await search(episode) for episode in reversed(episodes)]
        assert together == alone[::-1]
        assert len({number for number, _ in alone}) > 1
        assert {reward for _, reward in alone} == {1.0}
    # What a game draws later depends on its own seed and moves only.
    async with pool_of("guess_number", id="Bandit-v0") as pool:
        pulls = said((await play(pool, ["[red]"] * 8, seed=1))[1])
        episodes = [(await pool.open(row(), 1, str(place)))[0] for place in range(2)]
        texts = [said([await episode.step(turn(index, "[red]"))])[0] for index in range(8) for episode in episodes]
        assert [texts[::2], texts[1::2]] == [pulls, pulls]
        assert len(set(pulls)) > 1
    (tmp_path / "other.py").write_text("def play(seen):\n    return '[4]' if 'You are Player 1' in seen else '[8]'\n")
    async with pool_of("guess_number", id="TicTacToe-v0", players=2, opponent=f"{tmp_path}/other.py:play") as pool:
        first, replies = await play(pool, ["[0]", "[1]", "[2]"])
        assert "You are Player 0" in first
        assert "Player 1 placed their symbol (X) in cell 4" in said(replies)[0]
        assert [(reply.reward, reply.done) for reply in replies] == [(None, False), (None, False), (1.0, True)]


async def search(episode: Any) -> tuple[int, float | None]:
    """Returns the number of a game, found by halves, and its reward."""
    low, high = 1, 20
    for index in range(10):
        guess = (low + high) // 2
        reply = await episode.step(turn(index, f"[{guess}]"))
        if reply.done:
            await episode.close()
            return guess, reply.reward
        low, high = (guess + 1, high) if "higher" in reply.messages[0]["content"] else (low, guess - 1)
    raise AssertionError("not found")


async def found(pool: EnvironmentPool, seed: int) -> tuple[int, float | None]:
    episode, _ = await pool.open(row(), seed, "alone")
    return await search(episode)


@pytest.fixture
def server(libraries: str) -> Iterator[str]:
    """The example's server of OpenEnv. Yields: its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(SIDE / "bin/python"), str(EXAMPLES / "count_server.py"), str(port), "2"]
    process = subprocess.Popen(command, env={"PYTHONPATH": libraries, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"})
    try:

        def listens() -> bool:
            assert process.poll() is None
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        until(listens, START_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@needs_libraries
async def test_openenv(server: str) -> None:
    async with pool_of("counting", url=server) as pool:
        first, replies = await play(pool, ['{"by": 3}', 'So:\n```json\n{"by": 3}\n```', '{"by": 2}'], seed=2, to=10)
        assert first == "Count from 2 to 10"
        assert said(replies) == ["at 5", "at 8"]
        assert [(reply.reward, reply.done) for reply in replies] == [(0.0, False), (0.0, False), (1.0, True)]
        _, replies = await play(pool, ["three", '{"by": 7}', "[3]", '{"by": 1}'], to=1)
        assert [reply.reward for reply in replies] == [-0.1, -0.1, -0.1, 1.0]
        assert "it is not JSON" in said(replies)[0]
        assert "less than or equal to 3" in said(replies)[1]
        assert "no JSON object" in said(replies)[2]
        # Each episode has a session of its own.
        episodes = [(await pool.open(row(to=9), seed, "e"))[0] for seed in (0, 1)]
        for place, episode in enumerate(episodes):
            assert said([await episode.step(turn(0, '{"by": 2}'))]) == [f"at {place + 2}"]
            await episode.close()
    async with pool_of("counting", url=server, action="by") as pool:
        assert said((await play(pool, ["3"], to=9))[1]) == ["at 3"]
    async with pool_of("counting", url="http://127.0.0.1:9") as pool:
        with pytest.raises(EpisodeFailed) as raised:
            await play(pool, [], to=9)
        assert "ConnectionRefusedError" in str(raised.value)


def call(country: str, place: int = 0) -> Mapping[str, Any]:
    return {
        "id": f"call0000{place}",
        "type": "function",
        "function": {"name": "look_up", "arguments": {"country": country}},
    }


def run(libraries: str, *arguments: str, given: str = "") -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", *arguments]
    env = {"PYTHONPATH": libraries, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, input=given, capture_output=True, text=True, cwd=REPO, env=env, timeout=300)


@pytest.mark.slow
@needs_libraries
async def test_verifiers(libraries: str) -> None:
    written = run(libraries, "-m", f"{ADAPTERS}.verifiers", "capitals", "--size", "9")
    assert written.returncode == 0, written.stderr
    assert written.stdout == (EXAMPLES / "capitals.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in written.stdout.splitlines()]
    assert len(rows) == 4
    assert rows[1]["tools"][0]["function"]["name"] == "look_up"
    given = {"prompt": "", "messages": rows[1]["prompt"], "answer": "", "columns": rows[1]}
    async with pool_of("capitals") as pool:
        episode, opening = await pool.open(given, 0, "e")
        assert opening == []
        reply = await episode.step(turn(0, "", [call("Peru"), call("Atlantis", 1)]))
        assert [message["content"] for message in reply.messages] == ["Lima", "no such country"]
        assert [message["role"] for message in reply.messages] == ["tool", "tool"]
        assert [message["tool_call_id"] for message in reply.messages] == ["call00000", "call00001"]
        reply = await episode.step(turn(1, "", [call("Japan")]))
        assert [message["content"] for message in reply.messages] == ["Tokyo"]
        reply = await episode.step(turn(2, "It is Lima."))
        assert (reply.messages, reply.reward, reply.done) == ([], 1.5, True)
        await episode.close()
        episodes = [(await pool.open(given, 0, str(place)))[0] for place in range(3)]
        answers = ["Lima", "Bern", "Lima"]
        rewards = [(await episode.step(turn(0, answers[place]))).reward for place, episode in enumerate(episodes)]
        assert rewards == [1.0, 0.0, 1.0]
        await pool.open(given, 0, "left open, so that it ends with its process")
        with pytest.raises(EpisodeFailed) as raised:
            await pool.open({**given, "columns": {"task": 2}}, 0, "e")
        assert "the row's messages are not those of task 2" in str(raised.value)
    # A limit of verifiers ends an episode as it does there: what there is is scored.
    async with pool_of("capitals", environment={"agent": {"max_turns": 1}}) as pool:
        episode, _ = await pool.open(given, 0, "e")
        reply = await episode.step(turn(0, "Lima", [call("Peru")]))
        assert (reply.messages, reply.reward, reply.done) == ([], 1.0, True)


@pytest.mark.slow
@needs_libraries
def test_reasoning_gym(libraries: str) -> None:
    module = (libraries, "-m", f"{ADAPTERS}.reasoning_gym")
    written = run(*module, "chain_sum", "--size", "20", "--seed", "1", "--config", '{"max_terms": 3}')
    assert written.stdout == (EXAMPLES / "chain_sum.jsonl").read_text(encoding="utf-8"), written.stderr
    rows = [json.loads(line) for line in written.stdout.splitlines()]
    assert len({row["prompt"] for row in rows}) == 20
    code = f"""
import json, sys
from {ADAPTERS}.reasoning_gym import score
for line in sys.stdin:
    row = json.loads(line)
    right, column = row["answer"], row["reasoning_gym"]
    texts = [right, f"<think>1</think> {{right}}", f"1 <answer>{{right}}</answer>", f"{{right}}<answer>none</answer>"]
    print([score(text, column) for text in texts])
"""
    scored = run(libraries, "-c", code, given=written.stdout)
    assert scored.stdout.splitlines() == ["[1.0, 1.0, 1.0, 0.0]"] * 20, scored.stderr
    assert "no data set 'chain_smu'; did you mean chain_sum?" in run(*module, "chain_smu").stderr
    assert "unexpected keyword argument 'max_term'" in run(*module, "chain_sum", "--config", '{"max_term": 3}').stderr
    assert "as JSON it scores its answer otherwise" in run(*module, "arc_agi", "--size", "1").stderr
