"""The rewards of examples/math and examples/code: their rows, and completions that attack the one that runs them."""

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.rewards.base import Reward, ScoredText, Scores
from coordinator.rewards.function import OwnFunction
from coordinator.rewards.registry import build_reward
from examples.code import rewards
from tandem_config.sections.reward import FunctionReward, MathVerifyReward
from tests.house.repository import REPO

pytestmark = pytest.mark.integration

MATH, CODE = REPO / "examples" / "math", REPO / "examples" / "code"


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of all files of an example."""
    lines = [line for file in sorted(folder.glob("*.jsonl")) for line in file.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines]


async def scores(reward: Reward, texts: Sequence[ScoredText]) -> Scores:
    try:
        await reward.start(["tests", "entry_point"])
        return await reward.score(texts)
    finally:
        await reward.close()


async def test_the_solution_of_a_math_row_is_right_and_that_of_another_is_wrong() -> None:
    solutions = [row["solution"] for row in rows(MATH)]
    others = solutions[1:] + solutions[:1]
    texts = [
        ScoredText(completion=completion, answer=answer, truncated=False)
        for completion, answer in zip(solutions + others, solutions * 2, strict=True)
    ]
    reward = build_reward(MathVerifyReward(kind="math_verify", workers=2, timeout_s=20.0), max_new_tokens=8)
    found = await scores(reward, texts)
    assert found == Scores(values=[1.0] * len(solutions) + [0.0] * len(solutions))


async def test_the_solution_of_a_code_row_passes_its_tests_in_the_workers_of_a_run() -> None:
    section = yaml.safe_load((CODE / "code.yaml").read_text(encoding="utf-8"))["reward"][0]
    section = section | {"function": f"{CODE}/{section['function']}"}
    texts = [
        ScoredText(completion=f"So:\n```python\n{row['solution']}```", answer="", truncated=False, columns=row)
        for row in rows(CODE)
    ]
    nothing = ScoredText(completion="No block.", answer="", truncated=False, columns=rows(CODE)[0])
    found = await scores(OwnFunction(FunctionReward(**section)), [*texts, nothing])
    assert found == Scores(values=[1.0] * len(texts) + [0.0])


TESTS = ["assert f(2) == 4", "assert f(3) == 9"]
SQUARE = "def f(x): return x * x\n"


async def score(code: str, tests: list[str] | str = TESTS) -> float:
    return await rewards.passed(f"```python\n{code}\n```", tests, "f", cpu_s=1)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (SQUARE, 1.0),
        ("def f(x): return 4", 0.5),
        ("def g(x): return x * x", 0.0),
        ("def f(x: return", 0.0),
        ("def f(x):\n    if x == 3: raise SystemExit\n    return 4", 0.5),
        ("def f(x):\n    while x == 3: pass\n    return 4", 0.5),
        ("def f(x):\n    import time\n    time.sleep(1000 * (x == 3))\n    return 4", 0.5),
        ("def f(x):\n    return [0] * 10**10 if x == 3 else 4", 0.5),
        ("def f(x):\n    kept = []\n    while x == 2: kept.append(bytearray(1 << 20))\n    return 9", 0.5),
        ("def f(x): return f(x + 1)", 0.0),
        ("for _ in range(20_000): print('x' * 100)\n" + SQUARE, 1.0),
        ("import sys\nsys.exit()\n" + SQUARE, 0.0),
        ("import os\nos._exit(0)\n" + SQUARE, 0.0),
        ("import os\nos.write(3, b'ready\\n 0\\n 1\\n0\\n1\\n')\n", 0.0),
        ("import os\nfor _ in range(10_000): os.write(3, b'x' * 100)\n", 0.0),
        ("x = '\ud800\0'\n" + SQUARE, 0.0),
    ],
)
async def test_what_code_does_costs_its_own_score(code: str, expected: float) -> None:
    assert await score(code) == expected


async def test_tests_may_be_json_text_and_must_be_some() -> None:
    assert await score(SQUARE, json.dumps(TESTS)) == 1.0
    with pytest.raises(ValueError, match="the row has no tests"):
        await score(SQUARE, [])


# Each raises an error, and so has no f, unless it gets what it wants.
ATTACKS = {
    "environment": "import os\nos.environ['HF_TOKEN_OF_A_TEST']",
    "environment of its parent": "import os\nopen(f'/proc/{os.getppid()}/environ', 'rb')",
    "file": "open('/etc/passwd').read()",
    "folder": "import os\nos.listdir('/')",
    "new file": "import os\nos.close(os.open('new', os.O_CREAT))",
    "fork": "import os\nos.fork()",
    "thread": "import _thread\n_thread.start_new_thread(int, ())",
    "program": "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    "socket": "import _socket\n_socket.socket()",
    "signal": "import os\nos.kill(os.getppid(), 0)",
    "limit": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU))",
    "alarm": "import _signal\n_signal.alarm(1000)\n_signal.signal(14, _signal.SIG_IGN)",
}


@pytest.mark.parametrize("attack", ATTACKS)
async def test_code_can_only_compute(attack: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN_OF_A_TEST", "hf_secret")
    code = f"{ATTACKS[attack]}\n{SQUARE}"
    free = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, timeout=60, capture_output=True, check=False)  # noqa: ASYNC221 - nothing else runs
    assert free.returncode == 0, f"this must work without the limits: {free.stderr.decode()}"
    assert await score(code) == 0.0


async def test_where_code_cannot_be_confined_it_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (CODE / "child.py").read_text(encoding="utf-8")
    (tmp_path / "child.py").write_text(text.replace("libseccomp.so.2", "libseccomp.so.none"))
    monkeypatch.setattr(rewards, "__file__", str(tmp_path / "rewards.py"))
    with pytest.raises(RuntimeError, match=r"cannot be run confined here: OSError: libseccomp.so.none"):
        await score(SQUARE)


def start_and_end(number: int) -> None:
    """Processes that do nothing."""
    for _ in range(number):
        subprocess.run([sys.executable, "-I", "-c", "pass"], check=True, timeout=60)


def cpu_s_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def test_a_completion_costs_little_more_than_a_process() -> None:
    """So that 128 of them take seconds. Seen: twice the CPU time of a Python that does nothing."""
    ratios = []
    for _ in range(3):  # beside other tests, one of them may be four times as much
        before_s = cpu_s_of_children()
        for _ in range(4):
            assert await score(SQUARE) == 1.0
        between_s = cpu_s_of_children()
        start_and_end(4)
        ratios.append((between_s - before_s) / (cpu_s_of_children() - between_s))
    assert min(ratios) < 5, ratios
