"""A run whose services demand certificates, and whose certificates are renewed while it runs."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from servicekit.environment import ServiceEnvironment
from servicekit.security.certificates import TlsFiles, role_name
from tandem_config.schema import RunConfig
from tests.contract.coordinator_runs import rows, variables_of, with_settings, write_config
from tests.kit.certificates import Authority, variables, write_files
from tests.kit.waiting import until

ROLES = {"fleet": ["trainer", "rollout"], "coordinator": ["coordinator"]}


def issue(folder: Path, authority: Authority, owner: str) -> TlsFiles:
    return write_files(folder / owner, authority.issue([role_name(role) for role in ROLES[owner]]), authority.pem)


def test_a_run_over_tls_goes_on_while_certificates_are_renewed(
    config: RunConfig,
    environment: ServiceEnvironment,
    tmp_path: Path,
    authority: Authority,
    spawn: Callable[..., "subprocess.Popen[str]"],
) -> None:
    config = with_settings(config, run={"iterations": 1_000_000})
    processes = []
    for owner, arguments in (
        ("fleet", ["tests.fakes.fake_fleet", environment.redis_url, environment.run_id]),
        ("coordinator", ["coordinator", "--config", write_config(config, tmp_path)]),
    ):
        own = variables_of(environment) | variables(issue(tmp_path, authority, owner))
        with (tmp_path / f"{owner}.log").open("w") as log:
            processes.append(spawn(*arguments, variables=own, stderr=log))

    def log_lines(owner: str) -> list[dict[str, object]]:
        text = (tmp_path / f"{owner}.log").read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def iterations() -> int:
        if processes[1].poll() is not None:
            raise AssertionError((tmp_path / "coordinator.log").read_text()[-3000:])
        return len(rows(environment)) if (environment.run_dir / "metrics.jsonl").exists() else 0

    until(lambda: iterations() > 2, timeout_s=60)
    assert all(line["tls"] for line in log_lines("fleet") if line["message"] == "serving")
    for owner in ("fleet", "coordinator"):
        issue(tmp_path, authority, owner)
    until(lambda: any(line["message"] == "certificate changed" for line in log_lines("coordinator")), timeout_s=60)
    renewed_at = iterations()
    until(lambda: iterations() > renewed_at + 2, timeout_s=60)
    # The coordinator's new channels made new handshakes, at which the services have looked at their own files.
    until(lambda: any(line["message"] == "certificate changed" for line in log_lines("fleet")), timeout_s=60)
    processes[1].send_signal(signal.SIGTERM)
    assert processes[1].wait(timeout=60) == 0
