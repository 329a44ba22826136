"""The files of a ledger that nothing needs any more."""

from pathlib import Path

import pytest

from coordinator.ledger.files import LedgerFiles
from tandem_files.ledger.records import FOLDER, segment, segments


@pytest.mark.parametrize("steps", range(6))
def test_a_process_that_is_killed_while_it_tidies_leaves_no_gap(tmp_path: Path, steps: int) -> None:
    (tmp_path / FOLDER).mkdir()
    for number in range(1, 6):
        segment(tmp_path, number).touch()
    left = steps

    def killed() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt

    files, boundaries = LedgerFiles(tmp_path, 1, killed), {4: 0, 5: 9}
    try:
        files.tidy(1, boundaries, {}, 0)
    except KeyboardInterrupt:
        assert steps < 3
    assert list(segments(tmp_path)) == list(range(1 + min(steps, 3), 6))
