"""docs/monitoring.md lists every metric, with the words of the code."""

from tests.house.repository import REPO
from tests.monitoring.declared import reference

HEADING = "## Metrics\n\n"


def test_the_reference_is_what_the_code_declares() -> None:
    text = (REPO / "docs" / "monitoring.md").read_text(encoding="utf-8")
    written = text.partition(HEADING)[2].partition("### ")
    assert written[1] + written[2] == reference(), "put the output of tests.monitoring.declared.reference() there"


def test_the_reference_names_what_matters() -> None:
    for name in ("tandem_kl_old", "tandem_kv_cache_usage_ratio", "tandem_train_steps_total", "tandem_rpc_total"):
        assert f"`{name}`" in reference()
