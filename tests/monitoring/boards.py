"""The committed dashboards, as Grafana reads them."""

import json
from dataclasses import dataclass
from typing import Any

from tests.monitoring.tools import DASHBOARDS

FILES = ("tandem-weight-sync.json", "tandem-training.json", "tandem-fleet.json")
# What has no data in a run whose replicas are all there from the start.
JOINERS = "tandem_joiner_seeding_seconds"
# What has no data in a run without a reference policy, or whose samples are young.
OF_A_REFERENCE = (
    *("tandem_kl_reference", "tandem_kl_loss", "tandem_kl_reward"),
    *("tandem_flip_abs_diff", "tandem_trained_length"),
)
# What has no data in a run without a reward that a server gives, an environment, TLS and a reference policy, and in
# which no sample is of an older policy.
OF_OTHER_RUNS = (
    *("tandem_episodes_total", "tandem_episode_turns", "tandem_environment_step_seconds"),
    "tandem_policy_shift",
    "tandem_reward_call_seconds",
    "tandem_reward_circuit_open",
    "tandem_tls_certificate_expiry",
    JOINERS,
    *OF_A_REFERENCE,
)


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    board: str
    panel: str
    legend: str
    expr: str

    def __str__(self) -> str:
        return f"{self.board}: {self.panel} [{self.legend}]"

    def over(self, window: str) -> str:
        """The expression as Grafana sends it, with its variables filled in."""
        filled = self.expr
        for variable in ("namespace", "run", "replica"):
            filled = filled.replace(f'"${variable}"', '".*"')
        return filled.replace("$window", window).replace("$__rate_interval", window)


def board(file: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DASHBOARDS / file).read_text(encoding="utf-8"))
    return loaded


def panels(file: str) -> list[dict[str, Any]]:
    return [panel for panel in board(file)["panels"] if panel["type"] != "row"]


def queries(file: str) -> list[Query]:
    return [
        Query(board=file, panel=panel["title"], legend=target["legendFormat"], expr=target["expr"])
        for panel in panels(file)
        for target in panel["targets"]
    ]


ALL = [query for file in FILES for query in queries(file)]
