"""`tandem run` with the real engines when every service demands certificates."""

from pathlib import Path

import pytest

from servicekit.certificates import role_name
from tests.certificates import Authority, variables, write_files
from tests.e2e.conftest import Tandem, rows_of, run_arguments

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(280)]


def test_a_run_over_tls_ends_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority("ours")
    names = [role_name(role) for role in ("coordinator", "trainer", "rollout", "operator")]
    for name, value in variables(write_files(tmp_path / "tls", authority.issue(names), authority.pem)).items():
        monkeypatch.setenv(name, value)
    run = Tandem(run_arguments(), tmp_path)
    try:
        assert run.wait_end(240) == 0, run.output()
        assert [row["iteration"] for row in rows_of(tmp_path / "runs" / "small")] == [1, 2]
        for service in ("trainer-0", "rollout-0", "coordinator"):
            log = (tmp_path / "runs" / "small" / "logs" / f"{service}.log").read_text()
            assert '"tls": true' in log, log[-2000:]
            assert '"tls": false' not in log
    finally:
        if run.process.poll() is None:
            run.process.kill()
        run.assert_nothing_left()
