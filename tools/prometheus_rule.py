"""Writes deploy/monitoring/prometheus-rule.yaml: rules/tandem.yaml as an object of the Prometheus operator.

    python -m tools.prometheus_rule

A test compares the committed file with what this makes.
"""

from pathlib import Path

import yaml

MONITORING = Path(__file__).resolve().parent.parent / "deploy" / "monitoring"
RULES, OBJECT = MONITORING / "rules" / "tandem.yaml", MONITORING / "prometheus-rule.yaml"
_HEADER = "# GENERATED from rules/tandem.yaml by `python -m tools.prometheus_rule`; change that file.\n"


def prometheus_rule(rules: str) -> str:
    """The object's YAML. Args: rules: a Prometheus rule file; its `groups` are taken as they are."""
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
    return _HEADER + yaml.safe_dump(rule, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    OBJECT.write_text(prometheus_rule(RULES.read_text(encoding="utf-8")), encoding="utf-8")
