"""Alert rules: they fire when they should, ask for metrics that exist, and each says what to do."""

import inspect
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.record import health
from coordinator.web import alerts as conditions
from tandem_config.keys import fields_of, sections
from tandem_files import metrics_table
from tandem_files.metrics_table import THRESHOLDS, Threshold
from tests.house.repository import PACKAGES, REPO, python_files
from tests.monitoring.promql import problems, selectors
from tests.monitoring.tools import MONITORING, RULES, tool
from tools.metrics_reference import JOBS, series_of
from tools.prometheus_rule import main

RUNBOOK = REPO / "docs" / "runbook.md"
CASES = MONITORING / "tests" / "tandem_test.yaml"
FILES_OF_CASES = sorted((MONITORING / "tests").glob("*.yaml"))
GROUPS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
ALL_RULES = [rule for group in GROUPS for rule in group["rules"]]
ALERTS = [rule for rule in ALL_RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in ALL_RULES if "record" in rule}
SERIES = {job: series_of(job) for job in JOBS}
# One for all: `python -m tools.prometheus_rule --runbook URL` sets it.
RUNBOOK_URL = ALERTS[0]["annotations"]["runbook_url"].partition("#")[0]
PARTS = ("**Meaning.**", "**Look.**", "**Do.**")
# The state of what has this name, whichever run it is; when the run began; the disk.
OF_NO_RUN = ("tandem:run_state:last", "tandem_run_start_timestamp_seconds", "tandem_run_dir_free_bytes")
OF_THIS_RUN = "and on (namespace, tandem_run_id, started) tandem:run_started"
# promtool evaluates some hours of every minute: 10 s of a core, and the cores are shared.
PROMTOOL_S = 180.0


def promtool(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [tool("promtool"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROMTOOL_S, check=False)


def entries() -> dict[str, str]:
    """Alert to its entry in the runbook."""
    parts = re.split(r"^### (\w+)$", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("cases", FILES_OF_CASES, ids=lambda path: path.name)
def test_alerts_fire_when_they_should(cases: Path) -> None:
    done = promtool("test", "rules", str(cases))
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_sees_a_rule_that_fires_too_early(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "tests").mkdir()
    wrong = RULES.read_text(encoding="utf-8").replace("size_bytes\n        for: 5m", "size_bytes * 30\n        for: 5m")
    (tmp_path / "rules" / "tandem.yaml").write_text(wrong)
    head, *cases = CASES.read_text(encoding="utf-8").split("  - name: ")
    case = next(case for case in cases if case.startswith("the disk is full"))
    (tmp_path / "tests" / "t.yaml").write_text(f"{head}  - name: {case}")
    assert wrong != RULES.read_text(encoding="utf-8")
    done = promtool("test", "rules", str(tmp_path / "tests" / "t.yaml"))
    assert done.returncode != 0
    assert "TandemDiskFull" in done.stdout + done.stderr


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_is_exported(rule: dict[str, Any]) -> None:
    assert selectors(rule["expr"])
    assert problems(rule["expr"], SERIES, RECORDED) == []


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_what_looks_back_over_an_hour_looks_at_one_run(rule: dict[str, Any]) -> None:
    """In compose all runs have one name, and Prometheus keeps the last one's figures."""
    for name, span in re.findall(r"([\w:]+)(?:\{[^}]*\})?(\[\d+[hd]\]| offset )", rule["expr"]):
        assert name in {"tandem:of_run", *OF_NO_RUN}, f"{name}{span}"
    assert rule["expr"].count("tandem:of_run{") == rule["expr"].count(OF_THIS_RUN)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_to_do(rule: dict[str, Any]) -> None:
    name = rule["alert"]
    address, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    assert (address, anchor) == (RUNBOOK_URL, name.lower())
    assert rule["annotations"]["summary"]
    assert rule["labels"]["severity"] in ("info", "warning", "critical")
    entry = entries()[name]
    assert [part for part in PARTS if part not in entry] == []


def test_alerts_can_link_to_where_the_runbook_is_published(tmp_path: Path) -> None:
    rules, rule_object = tmp_path / "rules.yaml", tmp_path / "object.yaml"
    shutil.copy(RULES, rules)
    main(["--runbook", "https://docs.example.com/runbook"], rules, rule_object)
    written = rules.read_text(encoding="utf-8")
    for text in (written, rule_object.read_text(encoding="utf-8")):
        assert text.count("runbook_url: https://docs.example.com/runbook#tandem") == len(ALERTS)
    assert written.replace("https://docs.example.com/runbook", RUNBOOK_URL) == RULES.read_text(encoding="utf-8")


@pytest.mark.parametrize("url", ["docs/runbook.md", "https://docs.example.com/#runbook"])
def test_a_wrong_address_of_the_runbook_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--runbook", url])
    assert url in capsys.readouterr().err


def test_the_runbook_has_no_entry_without_its_alert() -> None:
    assert sorted(entries()) == sorted(rule["alert"] for rule in ALERTS)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_has_a_case_in_which_it_fires(rule: dict[str, Any]) -> None:
    cases = [case for path in FILES_OF_CASES for case in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]]
    fired = [sample["labels"] for case in cases for each in case["promql_expr_test"] for sample in each["exp_samples"]]
    assert f'{{alertname="{rule["alert"]}"}}' in fired


@pytest.mark.parametrize(
    "threshold", THRESHOLDS, ids=[f"{number} {threshold.alert}" for number, threshold in enumerate(THRESHOLDS)]
)
def test_the_rules_have_the_thresholds_of_the_table(threshold: Threshold) -> None:
    (rule,) = [rule for rule in ALERTS if rule["alert"] == threshold.alert]
    comparison = threshold.rule.replace("{}", f"{threshold.value:g}")
    assert re.search(rf"{re.escape(comparison)}(?![\d.])", rule["expr"])


def test_the_coordinator_judges_by_the_table_and_has_no_threshold_of_its_own() -> None:
    assert len(THRESHOLDS) == 12
    named = {name for name, value in vars(metrics_table).items() if isinstance(value, Threshold)}
    used = set(re.findall(r"\b[A-Z_]+\b", inspect.getsource(health) + inspect.getsource(conditions)))
    assert named <= used


def test_what_the_coordinator_sees_by_itself_has_an_alert() -> None:
    for module in (health, conditions):
        source = inspect.getsource(module)
        named = set(re.findall(r'"(Tandem\w+)"', source)) | {threshold.alert for threshold in THRESHOLDS}
        assert len(named) >= 12
        assert named <= {rule["alert"] for rule in ALERTS}
        assert 'name=""' not in source, "a trouble without an alert and an entry in the runbook"


def test_settings_that_the_runbook_names_exist() -> None:
    named = re.findall(r"`([a-z]+)\.([a-z_]+)[:`]", RUNBOOK.read_text(encoding="utf-8"))
    assert len(named) > 20
    for section, key in named:
        if section in sections():
            assert key in fields_of(section), f"{section}.{key}: no such setting"


def test_log_lines_that_the_runbook_names_are_written() -> None:
    quoted = set(re.findall(r"`([a-z]+(?: [a-z]+)+)`", RUNBOOK.read_text(encoding="utf-8")))
    lines = {text for text in quoted if not text.startswith(("kubectl", "tandem"))}
    assert len(lines) >= 8
    code = "\n".join(path.read_text(encoding="utf-8") for path in python_files(*PACKAGES))
    assert sorted(line for line in lines if line not in code) == []


@pytest.mark.parametrize(
    ("expression", "complaint"),
    [
        ("tandem_no_such_metric > 1", "tandem_no_such_metric is not exported"),
        ('tandem_kl_old{job="rollout"}', "is not exported by rollout"),
        ('tandem_replica_state{job="rollout", stat="poisoned"}', "has no label stat"),
        ("rate(tandem_iteration_seconds[5m])", "is not exported"),
        ("tandem:no:rule", "no recording rule"),
        ("kube_job_status_lost == 1", "kube-state-metrics has no kube_job_status_lost"),
        ('kube_job_failed{job="coordinator"} == 1', "kube_job_failed has no label job"),
    ],
)
def test_a_wrong_expression_is_seen(expression: str, complaint: str) -> None:
    assert complaint in "; ".join(problems(expression, SERIES, RECORDED))
