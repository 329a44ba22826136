"""docs/monitoring.md lists every metric, with the words of the code."""

import pytest

from tools.metrics_reference import main, reference


def test_the_reference_is_what_the_code_declares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0, capsys.readouterr().out


def test_the_reference_names_what_matters() -> None:
    for name in ("tandem_kl_old", "tandem_kv_cache_usage_ratio", "tandem_train_steps_total", "tandem_rpc_total"):
        assert f"`{name}`" in reference()
