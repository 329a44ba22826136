"""Writes deploy/monitoring/prometheus-rule.yaml: rules/tandem.yaml as an object of the Prometheus operator.

    python -m tools.prometheus_rule
    python -m tools.prometheus_rule --runbook URL    also: alerts link to the runbook there, in both files

The dashboards link to where the rules do: `python -m tools.dashboards write` after that.
A test compares the committed file with the generated one.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

MONITORING = Path(__file__).resolve().parent.parent / "deploy" / "monitoring"
RULES, OBJECT = MONITORING / "rules" / "tandem.yaml", MONITORING / "prometheus-rule.yaml"
_HEADER = "# GENERATED from rules/tandem.yaml by `python -m tools.prometheus_rule`; change that file.\n"


def prometheus_rule(rules: str) -> str:
    """Generate the object's YAML.

    Args:
        rules: text of a Prometheus rule file; its `groups` are copied.
    """
    rule = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {
            "name": "tandem",
            "namespace": "tandem",
            "labels": {"app.kubernetes.io/name": "tandem"},
        },
        "spec": {"groups": yaml.safe_load(rules)["groups"]},
    }
    return _HEADER + str(yaml.safe_dump(rule, sort_keys=False, width=120, allow_unicode=True))


def with_runbook(rules: str, url: str) -> str:
    """Make the alerts of a rule file link to their entries of the runbook at `url`.

    >>> with_runbook("runbook_url: docs/runbook.md#tandemdiskfull", "https://docs.example.com/runbook")
    'runbook_url: https://docs.example.com/runbook#tandemdiskfull'
    """
    return re.sub(r"(?<=runbook_url: )[^#\s]*(?=#)", lambda _: url, rules)


def runbook_address(source: Path = RULES) -> str:
    """Return the address of the runbook that the rules link to."""
    found = re.search(r"runbook_url: ([^#\s]*)#", source.read_text(encoding="utf-8"))
    assert found is not None, f"{source} has no alert with a runbook_url"
    return found[1]


def main(arguments: Sequence[str] | None = None, source: Path = RULES, target: Path = OBJECT) -> None:
    """Write the object `target`, and with --runbook the rules `source` first."""
    parser = argparse.ArgumentParser(prog="tools.prometheus_rule", description="Write prometheus-rule.yaml.")
    parser.add_argument("--runbook", metavar="URL", help="where docs/runbook.md can be read")
    url = parser.parse_args(arguments).runbook
    if url is not None and re.fullmatch(r"https?://[^#\s]+", url) is None:
        parser.error(f"--runbook {url}: not an http address without a #")
    rules = source.read_text(encoding="utf-8")
    if url is not None:
        rules = with_runbook(rules, url)
        source.write_text(rules, encoding="utf-8")
    target.write_text(prometheus_rule(rules), encoding="utf-8")


if __name__ == "__main__":
    main()
