"""The ranks of one host: who they are, that they end together, and with which exit code."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from servicekit.errors import ConfigError
from tests.kit.waiting import until
from trainer_service.host import HOST_INDEX, PER_HOST, ranks_here

# Runs RANK 0 and 1 as the shell commands that follow; the grace period is its first argument.
HOST = """
import sys
from trainer_service.host import RankProcesses
ranks = [{"RANK": str(rank), "SCRIPT": script} for rank, script in enumerate(sys.argv[2:])]
sys.exit(RankProcesses(grace_s=float(sys.argv[1])).run(["sh", "-c", 'eval "$SCRIPT"'], ranks))
"""
DEADLINE_S = 60.0
FOREVER = "while :; do sleep 0.05; done"


def start(*scripts: str, grace_s: float = DEADLINE_S) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", HOST, str(grace_s), *scripts])


def test_all_ranks_are_here_unless_said_otherwise() -> None:
    assert ranks_here({}, 2) == [
        {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"},
    ]


def test_a_second_host_goes_on_counting() -> None:
    ranks = ranks_here({PER_HOST: "4", HOST_INDEX: "1"}, 8)
    assert [rank["RANK"] for rank in ranks] == ["4", "5", "6", "7"]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({PER_HOST: "3"}, "TANDEM_RANKS_PER_HOST=3 does not divide the trainer's 8 ranks"),
        ({PER_HOST: "0"}, "TANDEM_RANKS_PER_HOST=0"),
        ({PER_HOST: "4", HOST_INDEX: "2"}, "hosts 0 to 1"),
        ({HOST_INDEX: "-1"}, "TANDEM_HOST_INDEX=-1"),
        ({HOST_INDEX: "one"}, "'one' is not a whole number"),
    ],
)
def test_what_cannot_be_is_said(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ranks_here(environ, 8)


def test_ranks_that_finish_end_the_host_well() -> None:
    """However fast: each exit code is seen."""
    assert start(*["exit 0"] * 8).wait(DEADLINE_S) == 0


def test_the_first_failure_ends_the_others_and_is_the_exit_code(tmp_path: Path) -> None:
    up, told = tmp_path / "up", tmp_path / "told"
    fails = f"until [ -e {up} ]; do sleep 0.05; done; exit 3"
    assert start(fails, f"trap 'touch {told}; exit 4' TERM; touch {up}; {FOREVER}").wait(DEADLINE_S) == 3
    assert told.exists()


def test_a_rank_that_a_signal_ended_has_failed() -> None:
    assert start("kill -KILL $$", FOREVER).wait(DEADLINE_S) == 128 + signal.SIGKILL


def test_sigterm_reaches_every_rank_and_is_no_failure(tmp_path: Path) -> None:
    up, told = [tmp_path / f"up{rank}" for rank in (0, 1)], [tmp_path / f"told{rank}" for rank in (0, 1)]
    scripts = [f"trap 'touch {told[rank]}; exit 0' TERM; touch {up[rank]}; {FOREVER}" for rank in (0, 1)]
    host = start(*scripts)
    until(lambda: all(path.exists() for path in up), DEADLINE_S)
    host.send_signal(signal.SIGTERM)
    assert host.wait(DEADLINE_S) == 0
    assert all(path.exists() for path in told)


def test_a_rank_that_does_not_listen_yet_is_no_failure(tmp_path: Path) -> None:
    up = tmp_path / "up"
    host = start(f"touch {up}; {FOREVER}")
    until(up.exists, DEADLINE_S)
    host.send_signal(signal.SIGTERM)
    assert host.wait(DEADLINE_S) == 0


def test_a_rank_that_does_not_heed_it_is_killed(tmp_path: Path) -> None:
    up = tmp_path / "up"
    host = start(f"trap '' TERM; touch {up}; {FOREVER}", grace_s=0.2)
    until(up.exists, DEADLINE_S)
    host.send_signal(signal.SIGTERM)
    assert host.wait(DEADLINE_S) == 128 + signal.SIGKILL
