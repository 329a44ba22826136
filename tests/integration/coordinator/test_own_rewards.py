"""A user's own function in real worker processes: what it gets, what it may do wrong, and what becomes of it."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from coordinator.rewards.base import ScoredText, Scores
from coordinator.rewards.exact_match import ExactMatch
from coordinator.rewards.function import OwnFunction
from coordinator.workers import output, task
from tandem_config.sections.reward import FunctionReward
from tests.house.repository import REPO

pytestmark = pytest.mark.integration


def items(count: int, **columns: Any) -> list[ScoredText]:
    """Texts `text 0`, ... of groups of four."""
    return [
        ScoredText(completion=f"text {place}", answer=str(place), truncated=place == 1, num_tokens=place,
                   prompt="p", columns=columns, sample_id=f"s{place}", group=place // 4)
        for place in range(count)
    ]  # fmt: skip


async def scores(folder: Path, code: str, texts: Sequence[ScoredText], **settings: Any) -> Scores:
    (folder / "mine.py").write_text(code)
    settings = {"workers": 1, "timeout_s": 0.5, "max_error_share": 1.0} | settings
    reward = OwnFunction(FunctionReward(function=f"{folder}/mine.py:score", **settings))
    try:
        await reward.start(sorted({name for text in texts for name in text.columns}))
        return await reward.score(texts)
    finally:
        await reward.close()


@pytest.fixture(autouse=True)
def _short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "_SLACK_S", 1.0)


async def test_a_function_gets_what_it_names(tmp_path: Path) -> None:
    code = """
def score(completion, answer, num_tokens, truncated, level, scale, bonus=1):
    return scale * num_tokens + level + 10 * truncated + bonus * completion.endswith(answer)
"""
    found = await scores(tmp_path, code, items(3, level=0.5), args={"scale": 100})
    assert found == Scores(values=[1.5, 111.5, 201.5])


@pytest.mark.parametrize("batch", [False, True])
async def test_a_dict_is_a_score_with_parts(tmp_path: Path, batch: bool) -> None:
    code = """
def one(answer):
    if answer == "1":
        return 3
    return {"score": 2.0, "format": answer == "2", "pred": answer} if answer != "3" else {"pred": 0}
"""
    code += "def score(answers): return [one(answer) for answer in answers]" if batch else "score = one"
    found = await scores(tmp_path, code, items(3 if batch else 4))
    assert found.values[:3] == [2.0, 3.0, 2.0]
    assert {name: str(part[:3]) for name, part in found.parts.values.items()} == {"format": "[0.0, nan, 1.0]"}
    assert found.errors == ({} if batch else {3: "it returned a dict without 'score' ('pred')"})


# As their users write them.
VERLS = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "own/sums" and extra_info == {"index": 7}
    return {"score": float(solution_str.endswith(ground_truth)), "acc": solution_str == ground_truth, "pred": "x"}
"""
TRLS = """
def score(prompts, completions, answer, trainer_state=None, log_extra=None, log_metric=None, **kwargs):
    log_extra("given", answer)
    log_extra("length", [len(text) for text in completions])
    log_metric("step", trainer_state.global_step)
    return [None if text == "text 2" else float(text.endswith(right)) for text, right in zip(completions, answer)]
"""
CHAT = """
import re
def score(prompts, completions, solution, **kwargs):
    assert [prompt[-1]["content"] for prompt in prompts] == ["p"] * len(prompts)
    responses = [completion[0]["content"] for completion in completions]
    return [1.0 if re.search(right, text) else 0.0 for text, right in zip(responses, solution)]
"""


async def test_verls_and_trls_functions_run_as_they_are(tmp_path: Path) -> None:
    texts = items(
        3, data_source="own/sums", extra_info={"index": 7}, reward_model={"ground_truth": "0"}, solution="[01]"
    )
    verl = await scores(tmp_path, VERLS, texts)
    assert (verl.values, verl.errors) == ([1.0, 0.0, 0.0], {})
    assert verl.parts.values == {"acc": [0.0, 0.0, 0.0]}
    numbered = [replace(text, sample_id=f"i5.g0.row1#{place}") for place, text in enumerate(texts)]
    trl = await scores(tmp_path, TRLS, numbered)
    assert (trl.values, set(trl.absent), trl.errors) == ([1.0, 1.0, 0.0], {2}, {})
    assert trl.parts.values == {"step": [5.0] * 3, "length": [6.0] * 3}
    chat = await scores(tmp_path, CHAT, texts, completions="messages")
    assert (chat.values, chat.errors) == ([1.0, 1.0, 0.0], {})


@pytest.mark.parametrize(
    ("signature", "settings", "sizes"),
    [
        ("completions", {"workers": 2, "batch_size": 3}, [3, 3, 3, 1]),
        ("completions", {"workers": 2}, [5, 5]),
        ("completions", {"per": "group"}, [4, 4, 2]),
    ],
)
async def test_batches_and_groups(tmp_path: Path, signature: str, settings: dict[str, Any], sizes: list[int]) -> None:
    code = f"def score({signature}): return [len(completions)] * len(completions)"
    found = await scores(tmp_path, code, items(10), **settings)
    assert found.values == [float(size) for size in sizes for _ in range(size)]


async def test_coroutines_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits until all eight are running; one at a time, none would end in time."""
    code = """
import asyncio
running, all_are = 0, asyncio.Event()
async def score(completion):
    global running
    running += 1
    if running == 8:
        all_are.set()
    await all_are.wait()
    return 1
"""
    assert (await scores(tmp_path, code, items(8), concurrency=8, timeout_s=20)).values == [1.0] * 8
    assert len((await scores(tmp_path, code, items(8), concurrency=7)).errors) == 7


BROKEN = """
import os, sys, time
def score(completion, sample_id):
    if sample_id == "s1": raise KeyError("no such word")
    if sample_id == "s2": return float("nan")
    if sample_id == "s3": os._exit(7)
    if sample_id == "s4": time.sleep(60)
    if sample_id == "s5": sys.exit("enough")
    if sample_id == "s6": return [0] * (1 << 30)
    if sample_id == "s7":
        while True:
            try: time.sleep(60)
            except BaseException: pass
    return 1
"""


async def test_whatever_a_call_does_costs_its_own_score(tmp_path: Path) -> None:
    with capture_logs() as log:
        found = await scores(tmp_path, BROKEN, items(10), memory_mib=1024)
    # What can be interrupted does not cost the process.
    assert [entry["why"] for entry in log if entry["event"] == "reward worker lost"] == [
        "died",
        "no answer within 1.5 s",
    ]
    assert found.values == [1.0, *[0.0] * 7, 1.0, 1.0]
    assert found.errors == {
        1: "KeyError: no such word (mine.py:4)",
        2: "it returned nan, which is not finite",
        3: "its worker process exited with status 7",
        4: "it took longer than timeout_s = 0.5 s",
        5: "SystemExit: enough (mine.py:8)",
        6: "MemoryError (mine.py:9)",
        7: "it took longer than timeout_s = 0.5 s",
    }


async def test_a_process_whose_memory_stays_used_up_is_replaced(tmp_path: Path) -> None:
    code = "kept = []\ndef score(completion):\n    kept.append(bytes(60 << 20))\n    return 1"
    found = await scores(tmp_path, code, items(9), memory_mib=256)
    assert set(found.errors.values()) == {"its worker process was ended by SIGKILL (out of memory?)"}
    assert 0 < len(found.errors) <= 3


async def test_of_several_calls_at_a_time_the_one_to_blame_is_found(tmp_path: Path) -> None:
    code = """
import asyncio, os, time
async def score(sample_id):
    await asyncio.sleep(0)
    if sample_id == "s3": os._exit(7)
    if sample_id == "s5": time.sleep(60)
    if sample_id == "s6": raise TimeoutError("mine")
    if sample_id == "s7": await asyncio.sleep(60)
    return 1
"""
    found = await scores(tmp_path, code, items(8), concurrency=4)
    late = "it took longer than timeout_s = 0.5 s"
    why = {3: "its worker process exited with status 7", 5: late, 6: "TimeoutError: mine (mine.py:7)", 7: late}
    assert (found.values, found.errors) == ([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0], why)


async def test_a_batch_that_fails_costs_all_of_its_scores(tmp_path: Path) -> None:
    code = "def score(completions): return completions[0] == 'text 0' and [1.0] * len(completions) or [1.0]"
    found = await scores(tmp_path, code, items(6), batch_size=3)
    assert found.values == [1.0] * 3 + [0.0] * 3
    assert set(found.errors.values()) == {"it returned 1 scores for 3 completions"}


@pytest.mark.parametrize(("on_error", "tried"), [("zero", 6), ("stop", 1)])
async def test_too_many_failures_end_the_attempts(tmp_path: Path, on_error: str, tried: int) -> None:
    code = "def score(completion): raise ValueError(completion)"
    found = await scores(tmp_path, code, items(400), on_error=on_error, max_error_share=0.0)
    untried = [why for why in found.errors.values() if why == "it was not tried, because too many before it had failed"]
    assert len(found.errors) == 400
    # What a worker had ahead is done.
    assert 400 - 2 * tried - 64 <= len(untried) < 400


async def test_what_it_prints_is_logged_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_LINES", 20)
    code = """
import os, subprocess, sys
print("imported")
def score(completion):
    print("said", completion)
    print("to stderr", file=sys.stderr)
    os.write(1, b"raw bytes \\xff\\n")
    subprocess.run(["echo", "from a child"])
    assert sys.stdin.read() == ""
    print("x" * 3000)
    return 1
"""
    with capture_logs() as said:
        found = await scores(tmp_path, code, items(5), timeout_s=20)
    assert found == Scores(values=[1.0] * 5)
    *lines, last = [entry for entry in said if entry["reward"] == "score"]
    assert [entry["text"] for entry in lines[:6]] == [
        *("imported", "said text 0", "to stderr", "raw bytes \ufffd", "from a child"),
        "x" * 1000 + "... (3000 characters)",
    ]
    assert (len(lines), last["event"], last["lines"]) == (20, "reward output left out", 6)


async def test_a_function_finds_its_neighbours_and_keeps_its_name(tmp_path: Path) -> None:
    """A helper beside it; and a file that is called like a library, which others still find."""
    (tmp_path / "helper.py").write_text("def half(): return 0.5\n")
    (tmp_path / "json.py").write_text(
        "import helper\nfrom coordinator.rewards import base\ndef score(completion): return helper.half()\n"
    )
    reward = OwnFunction(FunctionReward(function=f"{tmp_path}/json.py:score", workers=1))
    await reward.start([])
    assert (await reward.score(items(1))).values == [0.5]
    await reward.close()


UNUSABLE = [
    ("def scorre(completion): return 1", {}, r"mine.py has no score; did you mean scorre\?"),
    ("score = 5", {}, "score in .*mine.py is an int, not a function"),
    ("def score(completion:", {}, r"mine.py is not Python: .* \(mine.py:1\)"),
    ("import no_such_library\ndef score(): pass", {}, r"ModuleNotFoundError: No module .* \(mine.py:1\)"),
    ("import sys\nsys.exit('not today')", {}, r"failed: SystemExit: not today \(mine.py:2\)"),
    ("import os\nos._exit(4)", {}, "its worker process exited with status 4"),
    ("import time\ntime.sleep(60)", {"start_timeout_s": 1}, "not ready within 1 s"),
    ("def score(response): pass", {}, "score takes 'response', which nothing fills .* 'completion'"),
    ("def score(completion): pass", {"args": {"depth": 1}}, "args.depth: it takes no such parameter"),
    ("def score(completion): pass", {"concurrency": 4}, "concurrency does nothing, because .* is not `async def`"),
    ("def score(completion): pass", {"batch_size": 4}, "batch_size does nothing, because .* scores one sample"),
]


@pytest.mark.parametrize(("code", "settings", "message"), UNUSABLE, ids=[row[0] for row in UNUSABLE])
async def test_what_cannot_be_used_is_found_at_the_start(
    tmp_path: Path, code: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        await scores(tmp_path, code, items(1), **settings)


async def test_a_missing_file_is_named_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("")
    reward = OwnFunction(FunctionReward(function=f"{tmp_path}/reward.py:score", workers=1))
    with pytest.raises(ValueError, match=r"reward.py does not exist; did you mean rewards.py\?"):
        await reward.start([])


async def test_a_module_is_imported_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "mine.py").write_text("def score(completion): return 2\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    reward = OwnFunction(FunctionReward(function="package.mine:score", workers=1))
    await reward.start([])
    assert (await reward.score(items(2))).values == [2.0, 2.0]
    await reward.close()


@pytest.mark.parametrize("by", ["file", "module", "package"])
async def test_a_process_that_replaces_another_has_the_code_of_the_start(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / {"file": "kept.py", "module": f"pack{by}/kept.py", "package": f"pack{by}/__init__.py"}[by]
    file.parent.mkdir(exist_ok=True)
    if by == "module":  # imported before it is asked for
        (file.parent / "__init__.py").write_text("from .kept import score")
    file.write_text("import os\ndef score(answer): return 1 if answer != '1' else os._exit(7)")
    place = {"file": str(file), "module": "packmodule.kept", "package": "packpackage"}[by]
    reward = OwnFunction(FunctionReward(function=f"{place}:score", workers=1, max_error_share=1.0))
    try:
        await reward.start([])
        file.write_text("def score(answer): return 2.5")
        found = await reward.score(items(4))
    finally:
        await reward.close()
    assert found == Scores(values=[1.0, 0.0, 1.0, 1.0], errors={1: "its worker process exited with status 7"})


async def test_ten_thousand_samples_cost_the_coordinator_little(tmp_path: Path) -> None:
    """CPU time of this process: what is left of the rate on a busy machine."""
    texts = [replace(text, completion=f"{text.completion} " * 80) for text in items(10_000)]
    code = "def score(completion, answer): return completion.startswith('text ' + answer)"
    started_s = time.process_time()
    found = await scores(tmp_path, code, texts, workers=2, timeout_s=60)
    assert found.values == [1.0] * 10_000
    assert time.process_time() - started_s < 3
    started_s = time.process_time()
    await ExactMatch().score(texts)
    assert time.process_time() - started_s < 0.1


@pytest.mark.parametrize(("completion", "score"), [("46", 1.0), ("51", 0.5), ("86", 0.0), ("4 6", 0.0), ("", 0.0)])
async def test_the_examples_reward(completion: str, score: float) -> None:
    function = f"{REPO}/examples/arithmetic/closeness.py:closeness"
    reward = OwnFunction(FunctionReward(function=function, workers=1, args={"tolerance": 10}))
    await reward.start(["prompt", "answer"])
    found = await reward.score([ScoredText(completion=completion, answer="46", truncated=False)])
    await reward.close()
    assert found == Scores(values=[score])
