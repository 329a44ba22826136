"""A rank that dies while it starts is explained by its own error, not by SGLang's guess."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_service.sglang_engine.rank_errors import explain, remember_errors
from servicekit.errors import ConfigError

GUESS = RuntimeError(
    "Rank 1 scheduler died during initialization (exit code: 0). ... `dmesg -T | grep -i oom` to check."
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    logger = logging.getLogger("sglang")
    before = logger.handlers[:]
    yield
    logger.handlers[:] = before


def end(error: str) -> None:
    """As sglang/srt/managers/scheduler.py does it."""
    logging.getLogger("sglang.srt.managers.scheduler").error(
        "Scheduler hit an exception: Traceback (most recent call last):\n  File x\n%s\n", error
    )


def test_a_configuration_error_of_a_rank_is_one_of_the_service(tmp_path: Path) -> None:
    remember_errors(tmp_path)
    logging.getLogger("sglang.srt").error("some other line")
    end("servicekit.errors.ConfigError: FFN size = 45 does not divide by tensor parallel size 2")
    end("RuntimeError: what follows from it")
    found = explain(tmp_path, GUESS)
    assert isinstance(found, ConfigError)
    assert str(found) == "FFN size = 45 does not divide by tensor parallel size 2"


def test_the_first_rank_that_died_explains_the_others(tmp_path: Path) -> None:
    for number, reason in enumerate(
        ["RuntimeError: Connection closed by peer", "ValueError: Unsupported activation: gelu"]
    ):
        path = tmp_path / f"{number}.died"
        path.write_text(reason)
        os.utime(path, ns=(0, 10 - number))
    assert str(explain(tmp_path, GUESS)) == "a rank of SGLang did not start: ValueError: Unsupported activation: gelu"


def test_without_a_word_of_a_rank_sglangs_own_error_stays(tmp_path: Path) -> None:
    assert explain(tmp_path, GUESS) is GUESS
