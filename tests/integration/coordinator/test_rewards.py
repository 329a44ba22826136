import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import uvloop

from coordinator.rewards.base import Reward, ScoredText, Scores, StoppedOnly
from coordinator.rewards.exact_match import ExactMatch
from coordinator.rewards.registry import build_reward
from coordinator.workers.pool import RewardWorkers
from coordinator.workers.process import WorkerLost, WorkerProcess
from coordinator.workers.task import Answer, Task
from coordinator.workers.tasks import REGEX
from tandem_config.sections.reward import ExactMatchReward, MathVerifyReward, RegexReward
from tandem_config.sections.rewards.base import RewardSection
from tests.kit.processes import is_alive
from tests.kit.waiting import until

pytestmark = pytest.mark.integration

# The pattern of a user who means well; on n digits without "=" it takes time exponential in n.
SLOW_PATTERN = r"(\d+)+=(\d+)"


def text(completion: str, answer: str = "42", *, truncated: bool = False) -> ScoredText:
    return ScoredText(completion=completion, answer=answer, truncated=truncated)


def regex_workers(pattern: str) -> RewardWorkers:
    return RewardWorkers(Task(name=REGEX, settings={"pattern": pattern}, timeout_s=30), count=1)


def regex(pattern: str, **settings: Any) -> Reward:
    return build_reward(RegexReward(kind="regex", pattern=pattern, require_stop=False, **settings), max_new_tokens=8)


def math_verify(**settings: Any) -> Reward:
    section = MathVerifyReward(kind="math_verify", workers=1, require_stop=False, **settings)
    return build_reward(section, max_new_tokens=8)


async def scores(reward: Reward, *items: ScoredText) -> Scores:
    try:
        return await reward.score(items)
    finally:
        await reward.close()


async def values(reward: Reward, *items: ScoredText) -> list[float]:
    return (await scores(reward, *items)).values


async def test_exact_match() -> None:
    items = [text("42"), text("42 "), text("042"), text("42", truncated=True)]
    assert await values(ExactMatch(), *items) == [1.0, 0.0, 0.0, 1.0]
    assert await values(StoppedOnly(ExactMatch()), *items) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "section",
    [
        ExactMatchReward(),
        RegexReward(kind="regex", pattern=r"(\d+)"),
        MathVerifyReward(kind="math_verify", workers=1),
    ],
    ids=lambda section: section.label,
)
async def test_a_completion_that_was_cut_off_is_not_paid_by_any_reward(section: RewardSection) -> None:
    items = [text("42", truncated=True), text("42"), text("41"), text("", "", truncated=True)]
    assert await values(build_reward(section, max_new_tokens=8), *items) == [0.0, 1.0, 0.0, 0.0]


async def test_unless_it_is_configured_so() -> None:
    section = RegexReward(kind="regex", pattern=r"(\d+)", require_stop=False)
    reward = build_reward(section, max_new_tokens=8)
    assert await values(reward, text("42", truncated=True), text("42")) == [1.0, 1.0]


async def test_regex_compares_group_one_of_the_last_match() -> None:
    reward = regex(r"answer: *(\d+)")
    items = [text("answer: 42"), text("answer: 1, no, answer: 42"), text("answer: 42, no, answer: 1"), text("42")]
    assert await values(reward, *items) == [1.0, 1.0, 0.0, 0.0]


async def test_regex_without_a_group_asks_for_the_format_only() -> None:
    assert await values(regex(r"^<a>.*</a>$"), text("<a>7</a>"), text("7")) == [1.0, 0.0]


@pytest.mark.parametrize("pattern", ["(", "(" * 5000 + ")" * 5000, "a{99999999999999999999}"])
def test_a_pattern_that_does_not_compile_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        regex(pattern)


async def test_a_pattern_that_takes_for_ever_costs_its_scores_and_nobody_else() -> None:
    gaps, beating = [], True

    async def heart() -> None:
        while beating:
            started = time.perf_counter()
            await asyncio.sleep(0.02)
            gaps.append(time.perf_counter() - started)

    heartbeat = asyncio.create_task(heart())
    reward = regex(SLOW_PATTERN, workers=1, timeout_s=0.3)
    found = await scores(reward, text("7=42", "7"), text("1" * 60), text("8=1", "8"), text("é\ud800" * 9, "8"))
    beating = False
    await heartbeat
    assert found == Scores(values=[1.0, 0.0, 1.0, 0.0], late=frozenset({1}))
    # A search that holds the interpreter would make one gap of it all; a busy host makes small ones.
    assert max(gaps) < 0.2 + 0.1 * sum(gaps)


async def test_when_most_take_too_long_the_rest_is_not_tried() -> None:
    reward = regex(SLOW_PATTERN, workers=1, timeout_s=0.02)
    found = await scores(reward, *[text("1" * 60)] * 100, text("1=1", "1"))
    assert (len(found.late), found.errors, sum(found.values)) == (101, {}, 0.0)


async def test_a_number_too_large_to_compute_costs_its_score() -> None:
    reward = math_verify(timeout_s=1)
    found = await scores(reward, text("1", "1"), text("1", r"9^{9^{9^{9}}}"), text("2", "2"))
    assert found == Scores(values=[1.0, 0.0, 1.0], late=frozenset({1}))


def test_the_kernel_ends_a_worker_whose_code_looks_at_no_signal() -> None:
    """Some minutes of C. Whoever waits for the answer would do so for ten times its time."""
    code = (
        "import hashlib; from coordinator.workers.limits import CpuTimer;"
        "CpuTimer(0.1).run(lambda: hashlib.pbkdf2_hmac('sha256', b'x', b'y', 2**31 - 1))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == -signal.SIGXCPU


async def test_a_worker_killed_by_sigxcpu_counts_as_a_timeout() -> None:
    workers = regex_workers("(4+2)")
    jobs = [{"completion": "42", "answer": "42"}] * 2
    try:
        await workers.map(jobs)
        (process,) = workers._idle
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        working = asyncio.create_task(workers.map(jobs))
        await asyncio.to_thread(until, lambda: workers._idle == [None])
        os.kill(process.pid, signal.SIGXCPU)
        os.kill(process.pid, signal.SIGCONT)
        assert await working == [Answer(late=True), Answer(value=1.0)]
    finally:
        await workers.close()


async def test_a_dead_worker_costs_one_score_and_is_replaced() -> None:
    workers = regex_workers("(4+2)")
    jobs = [{"completion": "42", "answer": "42"}] * 3
    try:
        assert await workers.map(jobs) == [Answer(value=1.0)] * 3
        (process,) = workers._idle
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        working = asyncio.create_task(workers.map(jobs))
        await asyncio.to_thread(until, lambda: workers._idle == [None])
        os.kill(process.pid, signal.SIGKILL)
        died = Answer(error="its worker process was ended by SIGKILL (out of memory?)")
        assert await working == [died, Answer(value=1.0), Answer(value=1.0)]
    finally:
        await workers.close()


async def test_a_worker_that_cannot_start_says_why() -> None:
    workers = regex_workers("(")
    (answer,) = await workers.map([{"completion": "", "answer": ""}])
    assert "is not a regular expression" in answer.error
    await workers.close()


async def test_workers_end_with_their_owner() -> None:
    reward = regex(SLOW_PATTERN, workers=1, timeout_s=300)

    def works(child: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            return "coordinator.workers.worker" in child.cmdline()
        return False

    def working() -> set[int]:
        return {child.pid for child in psutil.Process().children() if works(child)}

    earlier = working()  # of other tests that this process ran
    scoring = asyncio.create_task(reward.score([text("1" * 60)]))
    await asyncio.to_thread(until, lambda: bool(working() - earlier))
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
    await reward.close()
    assert working() - earlier == set()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_worker_whose_start_is_cancelled_does_not_stay(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """uvloop, which SGLang makes the policy of its process, forgets a process whose spawning is cancelled."""

    async def cancelled_after(turns: int) -> None:
        before = {child.pid for child in psutil.Process().children()}
        starting = asyncio.create_task(WorkerProcess.start(Task(name=REGEX, settings={"pattern": "1"}, timeout_s=5)))
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        left = [child for child in psutil.Process().children() if child.pid not in before]
        assert [child.pid for child in left if is_alive(child)] == []

    async def at_every_turn() -> None:
        for turns in range(8):
            await cancelled_after(turns)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(at_every_turn())


async def test_a_call_that_is_cancelled_ends_when_all_of_its_processes_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process that was gone had the ends of the others interrupted: they were killed, and not waited for."""
    reward = regex(SLOW_PATTERN, workers=4, timeout_s=300)
    gone, until_gone, start = list[int | None](), WorkerProcess._wait_ended, WorkerProcess.start
    started = asyncio.Semaphore(0)

    async def noted_start(task: Task) -> WorkerProcess:
        process = await start(task)
        started.release()
        return process

    async def noted_end(process: WorkerProcess) -> None:
        await asyncio.sleep(0.02 * len(gone))  # one after the other
        await until_gone(process)
        gone.append(process.returncode)

    monkeypatch.setattr(WorkerProcess, "start", noted_start)
    monkeypatch.setattr(WorkerProcess, "_wait_ended", noted_end)
    scoring = asyncio.create_task(reward.score([text("1" * 60)] * 4))
    for _ in range(4):
        await asyncio.wait_for(started.acquire(), 60)
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
    assert gone == [-signal.SIGKILL] * 4
    await reward.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_process_that_has_ended_is_lost_at_its_next_answer_in_any_event_loop(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """uvloop refuses to write to it."""

    async def use() -> None:
        process = await WorkerProcess.start(Task(name=REGEX, settings={"pattern": "."}, timeout_s=30))
        await process.end()
        process.send([(0, "text")])
        with pytest.raises(WorkerLost, match="died"):
            await process.answer()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(use())


async def test_nothing_of_a_completion_is_said_anywhere(capfd: pytest.CaptureFixture[str]) -> None:
    secret = "SECRET" + "9" * 50
    items = [text(rf"\boxed{{{secret}^{{9^{{9^9}}}}}}", "3"), text(f"${secret}$", "\\frac{")]
    found = await scores(math_verify(timeout_s=0.5), *items)
    printed = capfd.readouterr()
    assert "SECRET" not in printed.out + printed.err + repr(found)


async def test_math_verify_knows_equal_values() -> None:
    items = [
        text(r"so it is $\frac{1}{2}$", "0.5"),
        text(r"\boxed{42}"),
        text("The answer is 41"),
        text(r"$x^2 + 2x + 1$", "$(x+1)^2$"),
        text("no number at all"),
        text(r"\boxed{42}", " "),
    ]
    found = await scores(math_verify(), *items)
    assert found == Scores(values=[1.0, 1.0, 0.0, 1.0, 0.0, 0.0], unreadable={5: "is empty"})
