"""A run whose rewards are a list of a reward server and a judge; the server is away for a while and comes back."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import EXAMPLE, Tandem, rows_of, run_arguments
from tests.fakes.fake_judge import Endpoint, said
from tests.integration.coordinator.test_reward_server import Servers
from tests.kit.processes import free_port
from tests.kit.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

Start = Callable[..., Tandem]
REWARD = """[
  {{kind: remote, address: "127.0.0.1:{server}", security: none, retries: 20}},
  {{kind: judge, url: "http://127.0.0.1:{judge}/v1", model: m, weight: 0.2,
    prompt: "{{{{ prompt }}}}|{{{{ completion }}}}"}},
]"""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with Servers(tmp_path) as started:
        yield started


@pytest.fixture
async def judge() -> AsyncIterator[tuple[Endpoint, int]]:
    """A judge that always says 7.5 of 10, and its port."""
    endpoint = Endpoint([said("Fine. Score: 7.5")])
    server = await asyncio.start_server(endpoint.serve, "127.0.0.1", 0)
    yield endpoint, server.sockets[0].getsockname()[1]
    server.close()


async def test_a_run_is_scored_by_both_and_waits_for_the_server_that_restarts(
    tandem: Start, servers: Servers, judge: tuple[Endpoint, int], tmp_path: Path
) -> None:
    (endpoint, judge_port), heldout = judge, tmp_path / "heldout.jsonl"
    lines = (EXAMPLE.parent / "heldout.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    heldout.write_text("".join(lines[:8]), encoding="utf-8")
    server = servers.start(port := free_port())
    reward = " ".join(REWARD.format(server=port, judge=judge_port).split())
    run = tandem(*run_arguments(run__iterations=3, run__evaluate_every=3, data__heldout=heldout, reward=reward))
    await asyncio.to_thread(run.wait_iteration, 1)
    server.kill()
    asked = len(endpoint.requests)
    # The judge is asked about completions that the server, which is away, is asked about too.
    await asyncio.to_thread(until, lambda: len(endpoint.requests) > asked, 240.0)
    servers.start(port)
    assert await asyncio.to_thread(run.wait_end, 300) == 0, run.output()

    folder = tmp_path / "runs" / "small"
    rows = rows_of(folder)
    assert [(row["iteration"], row["reward_errors"], row["dropped_samples"]) for row in rows] == [
        (number, 0, 0) for number in (1, 2, 3)
    ]
    for row in rows:
        assert row["reward/judge_mean"] == pytest.approx(0.75)
        assert row["reward_mean"] == pytest.approx(row["reward/remote_mean"] + 0.15)
    assert rows[-1]["heldout_reward/judge_mean"] == pytest.approx(0.75)
    assert any(re.match(r" *iter +reward +remote +judge x 0.2 ", line) for line in run.lines), run.output()

    shown = tandem("samples", str(folder), "--iteration", "2", "--best", "1000", "--json")
    assert await asyncio.to_thread(shown.wait_end) == 0, shown.output()
    samples = [json.loads(line) for line in shown.lines]
    assert len(samples) == 16 * 8
    asked_about = {request["messages"][0]["content"] for request in endpoint.requests}
    for sample in samples:
        text = re.sub(r"<\w+>", "", sample["completion"])  # servers get it without special tokens
        right = float([int(number) for number in re.findall(r"\d+", text)][-1:] == [int(sample["answer"])])
        parts = sample["reward_parts"]
        assert (parts["judge"], parts["remote"], parts["remote_right"]) == pytest.approx((0.75, right, right))
        assert sample["reward"] == pytest.approx(right + 0.15)
        assert f"{sample['prompt']}|{text}" in asked_about
