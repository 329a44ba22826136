"""The committed dashboards are what the code says, show what they should, and ask for what is exported."""

import re
from pathlib import Path

import pytest
import yaml

from tests.monitoring.boards import ALL, FILES, Query, board, panels
from tests.monitoring.promql import problems, selectors
from tests.monitoring.test_rules import ALERTS, RUNBOOK_URL, promtool
from tests.monitoring.tools import DASHBOARDS, MONITORING
from tools.dashboards import __main__ as generator
from tools.metrics_reference import JOBS, metrics_of, series_of

# Metrics that are on no panel, and why.
UNSHOWN = {
    "tandem_run_start_timestamp_seconds": "the rules tell runs of one name apart by it",
    "tandem_standby": "of coordinators with --standby only; the rule TandemStandbyMissing asks for it",
    "tandem_schedule": "what runs of another schedule idle is by design; the rules tell them apart by it",
    "tandem_clip_fraction": "the trainer's own; the coordinator's tandem_clip_fraction_*_ratio are shown",
    "tandem_logprob_abs_diff": "the trainer's own; the coordinator's tandem_logprob_abs_diff_* are shown",
    "tandem_logprob_diff_of_limit_ratio": "what the rule judges by; the differences themselves are shown",
    "tandem_logprob_diff_rise_ratio": "what the rule judges by; the mean itself is shown",
    "tandem_train_samples_total": "what the coordinator's tandem_trained_samples_total, which is shown, counts as sent",
    "tandem_weight_sync_received_bytes_total": "by replica; shown are all ranks' bytes and each replica's bandwidth",
}
SERIES = {job: series_of(job) for job in JOBS}
# What each dashboard is for: a metric that must be on it.
SHOWN = {
    "tandem-weight-sync.json": (
        "tandem_weight_sync_seconds_bucket",
        "tandem_replica_weight_sync_seconds",
        "tandem_weight_sync_bytes_total",
        "tandem_weight_sync_goodput_bytes_per_second",
        "tandem_weight_sync_predicted_goodput_bytes_per_second",
        "tandem_weight_sync_outcomes_total",
        "tandem_weight_sync_epoch",
        "tandem_replica_policy_version",
        "tandem_generation_pause_seconds_bucket",
        "tandem_weight_sync_last_seconds",
    ),
    "tandem-training.json": (
        "tandem_reward_mean",
        "tandem_entropy",
        "tandem_kl_old",
        "tandem_clip_fraction_low_ratio",
        "tandem_clip_fraction_high_ratio",
        "tandem_grad_norm",
        "tandem_response_length_tokens",
        "tandem_logprob_abs_diff_max",
        "tandem_evaluation",
        "tandem_reward_score_mean",
        "tandem_reward_errors_total",
        "tandem_reward_call_seconds_bucket",
        "tandem_reward_circuit_open",
        "tandem_train_tokens_per_second",
        "tandem_train_model_flops_utilization_ratio",
        "tandem_train_peak_memory_bytes",
        "tandem_packing_efficiency_ratio",
        "tandem_prompt_sharing_ratio",
        "tandem_train_step_seconds_sum",
        "tandem_train_step_seconds_count",
    ),
    "tandem-fleet.json": (
        "tandem_replica_state",
        "tandem_generated_tokens_total",
        "tandem_engine_waiting_requests",
        "tandem_kv_cache_usage_ratio",
        "tandem_replica_starts_total",
        "tandem_expected_replicas",
        "tandem_gpus",
    ),
}


def test_the_committed_files_are_what_the_code_says() -> None:
    assert generator.check() == 0


def test_a_change_by_hand_is_drift(tmp_path: Path) -> None:
    assert generator.write(tmp_path) == 0
    assert generator.check(tmp_path) == 0
    changed = tmp_path / "tandem-fleet.json"
    changed.write_text(changed.read_text().replace("tandem_running_groups", "tandem_groups"))
    (tmp_path / "old.json").write_text("{}")
    assert generator.check(tmp_path) == 1
    assert generator.write(tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_every_dashboard_is_looked_at() -> None:
    assert sorted(path.name for path in DASHBOARDS.glob("*.json")) == sorted(FILES)
    assert len({board(file)["uid"] for file in FILES}) == len(FILES)


@pytest.mark.parametrize("file", FILES)
def test_a_dashboard_shows_what_it_is_for(file: str) -> None:
    shown = {selector.name for query in ALL if query.board == file for selector in selectors(query.expr)}
    assert [metric for metric in SHOWN[file] if metric not in shown] == []


def test_a_train_step_s_seconds_are_shown_by_part() -> None:
    """Each part, and not their total beside them."""
    shown = [query for query in ALL if "tandem_train_step_seconds_sum" in query.expr]
    assert [query.legend for query in shown] == ["{{part}}"]
    assert shown[0].expr.count("sum by (part) (") == 2
    assert {selector.value("part") for selector in selectors(shown[0].expr)} == {("!=", "total")}


def test_every_metric_is_on_a_panel_or_there_is_a_reason_why_not() -> None:
    shown = {selector.name for query in ALL for selector in selectors(query.expr)}
    known = {metric.name: metric for job in JOBS for metric in metrics_of(job)}
    assert sorted(name for name, metric in known.items() if shown.isdisjoint(metric.series)) == sorted(UNSHOWN)


@pytest.mark.parametrize("file", FILES)
def test_panels_are_apart_and_explained(file: str) -> None:
    ids = [panel["id"] for panel in board(file)["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels(file)]
    assert len(set(places)) == len(places)
    assert [panel["title"] for panel in panels(file) if len(panel["description"]) < 10] == []


@pytest.mark.parametrize("file", FILES)
def test_a_dashboard_selects_a_run_and_links_to_the_others_and_to_the_runbook(file: str) -> None:
    shown = board(file)
    variables = {variable["name"]: variable for variable in shown["templating"]["list"]}
    assert list(variables) == ["datasource", "namespace", "run", "replica", "window"]
    assert not variables["run"].get("includeAll"), "quantiles over several runs say nothing of any of them"
    assert [link["type"] for link in shown["links"]] == ["dashboards", "link"]
    assert (shown["links"][0]["tags"], shown["links"][0]["includeVars"]) == (["tandem"], True)
    assert shown["links"][1]["url"] == RUNBOOK_URL
    links = [link["url"] for panel in panels(file) for link in panel.get("links", [])]
    assert len(links) >= 5
    assert set(links) <= {rule["annotations"]["runbook_url"] for rule in ALERTS}
    (annotation,) = shown["annotations"]["list"]
    assert 'alertstate="firing"' in annotation["expr"]


@pytest.mark.parametrize("query", ALL, ids=str)
def test_a_query_selects_the_run(query: Query) -> None:
    """In every selector, because series of other runs have the same names."""
    for selector in selectors(query.expr):
        assert (selector.value("namespace"), selector.value("tandem_run_id")) == (("=~", "$namespace"), ("=~", "$run"))
        job = selector.value("job")
        assert job != ("=", "rollout") or selector.value("replica") == ("=~", "$replica")


@pytest.mark.parametrize("file", FILES)
def test_quantiles_have_a_heatmap_beside_them_and_exemplars(file: str) -> None:
    kinds = {panel["type"] for panel in panels(file)}
    assert {"timeseries", "heatmap"} <= kinds
    for panel in panels(file):
        for target in panel["targets"]:
            assert target["exemplar"] == ("_bucket{" in target["expr"])
            assert (panel["type"] == "heatmap") == (target.get("format") == "heatmap")


@pytest.mark.parametrize("query", ALL, ids=str)
def test_a_query_asks_for_what_is_exported(query: Query) -> None:
    assert selectors(query.expr)
    assert problems(query.over("5m"), SERIES, set()) == []


@pytest.mark.parametrize("file", FILES)
def test_bytes_have_their_unit(file: str) -> None:
    of_bytes = [panel for panel in panels(file) for target in panel["targets"] if "bytes" in target["expr"]]
    assert of_bytes
    ratio = ("percentunit", "none")  # of two such
    for panel in of_bytes:
        exprs = [target["expr"] for target in panel["targets"]]
        wanted = ("Bps",) if "per_second" in exprs[0] else ("bytes",)
        assert panel["fieldConfig"]["defaults"]["unit"] in (ratio if " / (" in exprs[0] else wanted), panel["title"]


def test_no_share_is_asked_of_what_may_be_none() -> None:
    """A held-out score is a mean reward, of any sign and scale, unless its reward is 0 or 1."""
    for panel in panels("tandem-training.json"):
        if any(
            re.search("reward_(score_)?mean|heldout_.*accuracy|tandem_evaluation{", one["expr"])
            for one in panel["targets"]
        ):
            assert panel["fieldConfig"]["defaults"]["unit"] == "short", panel["title"]
            assert not {"min", "max"} & panel["fieldConfig"]["defaults"].keys(), panel["title"]


def test_the_disk_has_a_line_of_each_service_that_uses_it(tmp_path: Path) -> None:
    (query,) = [query for query in ALL if query.panel == "Disk of the run's folder"]
    labels = 'job="{}", namespace="a", tandem_run_id="b"'
    series = [
        {"series": f"tandem_run_dir_{name}_bytes{{{labels.format(job)}}}", "values": f"{value}x5"}
        for job, values in (("coordinator", (50, 100)), ("rollout", (0, 0)))
        for name, value in zip(("free", "size"), values, strict=True)
    ]
    wanted = [{"labels": f"{{{labels.format('coordinator')}}}", "value": 0.5}]
    case = {"expr": query.over("5m"), "eval_time": "3m", "exp_samples": wanted}
    tests = {"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [case]}]}
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(tests))
    done = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configurations_can_be_read() -> None:
    done = promtool("check", "config", "--syntax-only", str(MONITORING / "prometheus.yml"))
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert sorted(job["job_name"] for job in jobs) == sorted(JOBS)
    for path in (MONITORING / "grafana").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text(encoding="utf-8"))["apiVersion"] == 1
