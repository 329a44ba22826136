"""The table of metrics: each metric once, names as Prometheus wants them."""

import re

from tandem_files.metrics_table import ITERATION_PARTS, METRICS, STEP_PARTS


def test_a_metric_has_one_row_and_one_name_at_each_service() -> None:
    for attribute in ("name", "exported", "trainer"):
        names = [name for metric in METRICS if (name := getattr(metric, attribute))]
        assert len(set(names)) == len(names)


def test_exported_names_and_texts_are_those_of_prometheus() -> None:
    for metric in METRICS:
        for name in filter(None, (metric.exported, metric.trainer)):
            assert re.fullmatch("tandem_[a-z0-9_]+", name)
        assert metric.help.endswith(".")
        assert metric.source != "step" or metric.trainer, f"{metric.name} is shown nowhere"


def test_every_part_of_an_iteration_and_of_a_step_has_a_row() -> None:
    names = {metric.name for metric in METRICS}
    assert {f"{part}_s" for part in ITERATION_PARTS} | {f"train_{part}_s" for part in STEP_PARTS} <= names
