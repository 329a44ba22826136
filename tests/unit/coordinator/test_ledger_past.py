"""What a process may use of what earlier ones have left: by the policies that sampled it, and when its turn comes."""

from pathlib import Path

import pytest

from coordinator.data.cursor import CursorState
from coordinator.ledger.past import Past
from coordinator.record.state import RunState
from tandem_files.ledger.account import Account
from tandem_files.ledger.reading import LedgerContent


def past(run_dir: Path, *, sent: str = "", saved: int = 3, now: int = 3) -> Past:
    """Continued after iteration 3, whose steps were trained from versions 0, 1 and 2; up to two versions may pass."""
    found = LedgerContent(account=Account(problems=[], trained={1: 0, 2: 1, 3: 2}))
    made = Past(run_dir, found, rewards="", max_staleness=2, waves_ahead=3, warn=pytest.fail)
    cursor = CursorState(sources=(), waves=3)
    state = RunState(cursor=cursor, batch_rng={}, model_fingerprint="", iteration=3, policy_version=now)
    made.open(state, saved, sent)
    return made


def test_what_is_old_enough_for_its_turn_is_used(tmp_path: Path) -> None:
    found = past(tmp_path)
    assert [found.is_young(version, 4) for version in range(5)] == [False, True, True, True, False]
    assert [found.is_young(version, 5) for version in range(4)] == [False, False, True, True], "it waits a step longer"


def test_policies_keep_their_place_under_a_new_version(tmp_path: Path) -> None:
    found = past(tmp_path, now=9)
    assert [found.is_young(version, 4) for version in range(4)] == [False, True, True, True]


def test_the_policy_after_a_step_that_was_sent_is_known(tmp_path: Path) -> None:
    assert not past(tmp_path).is_young(4, 4)
    assert past(tmp_path, sent="i4.v3.a").is_young(4, 4)
