"""Rank 0 and its followers as real processes, without a model: replies, refusals, failures, deaths."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from servicekit.redis.registry import Registry
from trainer_service.ranks.world import STORE_KEY

pytestmark = pytest.mark.integration
REPOSITORY = Path(__file__).parents[3]
Ranks = list[subprocess.Popen[str]]


@pytest.fixture
def start(redis_server: str) -> Iterator[Callable[[str], Ranks]]:
    """start(scenario) -> three ranks."""
    started: Ranks = []

    def ranks(scenario: str) -> Ranks:
        command = [sys.executable, "-W", "ignore", "-m", "tests.integration.trainer.ranks_worker"]
        environment = os.environ | {"REDIS_URL": redis_server, "OMP_NUM_THREADS": "1"}
        for rank in range(3):
            arguments = [*command, str(rank), "3", scenario]
            started.append(
                subprocess.Popen(
                    arguments,
                    cwd=REPOSITORY,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        return started

    yield ranks
    for process in started:
        process.kill()
        process.wait(timeout=10)


def output(process: "subprocess.Popen[str]") -> list[dict[str, Any]]:
    """Everything that a rank printed, once it has ended."""
    text, _ = process.communicate(timeout=60)
    return [json.loads(line) for line in text.splitlines()]


def test_replies_refusals_and_stop(start: Callable[[str], Ranks], redis_server: str) -> None:
    # the address of an earlier start that is no more
    Registry(redis_server, "ranks-test").set_value(STORE_KEY, "127.0.0.1 1 0123456789abcdef")
    ranks = start("works")
    lines = output(ranks[0])[1:]
    assert lines[0] == {"replies": ["0:one||three", "1:one||three", "2:one||three"]}
    assert lines[1] == {"refused": "DigestMismatch", "message": "trainer rank 1: bucket 3"}
    assert lines[2] == {"replies": ["0:", "1:", "2:"]}
    assert [process.wait(timeout=30) for process in ranks] == [0, 0, 0]


def test_unexpected_error_ends_every_rank_and_is_named(start: Callable[[str], Ranks]) -> None:
    ranks = start("fails")
    assert output(ranks[0])[-1]["failed"] == "rank 1: KeyError: 'lost parameter'"
    assert [process.wait(timeout=30) for process in ranks] == [1, 1, 1]


def test_killed_rank_is_named(start: Callable[[str], Ranks]) -> None:
    ranks = start("dies")
    assert output(ranks[0])[-1]["failed"].startswith("rank 1 ended without a word")
    assert [process.wait(timeout=30) for process in ranks] == [1, -signal.SIGKILL, 1]


def test_a_frozen_rank_is_named_after_the_commands_own_deadline(start: Callable[[str], Ranks]) -> None:
    ranks = start("freezes")
    lines = output(ranks[0])
    assert lines[1] == {"replies": ["0:", "1:", "2:"]}
    assert lines[-1]["failed"].startswith("rank 1 ended without a word or hangs")
    assert "Timed out waiting 3000ms" in lines[-1]["failed"]  # not the group's 30 s


def test_followers_end_when_rank_0_is_killed(start: Callable[[str], Ranks]) -> None:
    ranks = start("idle")
    for process in ranks:
        assert process.stdout is not None
        assert "met" in process.stdout.readline()
    ranks[0].kill()
    assert [process.wait(timeout=30) for process in ranks[1:]] == [1, 1]
