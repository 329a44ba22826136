"""Every setting that docs/coming-from.md promises exists, and takes the value that it shows."""

import re

import pytest
import yaml
from pydantic import TypeAdapter

from tandem_config.keys import all_keys, kinds
from tandem_config.schema import RunConfig
from tests.house.repository import REPO

PAGE = (REPO / "docs" / "coming-from.md").read_text(encoding="utf-8")
TABLES = {
    part.partition("\n")[0]: re.findall(r"^\| (.+?) \| (.+?) \|", part, re.MULTILINE)
    for part in PAGE.split("\n## ")[1:5]
}
CELLS = [pytest.param(ours, id=f"{name}: {theirs}") for name, rows in TABLES.items() for theirs, ours in rows[1:]]


@pytest.mark.parametrize("name", ["verl", "TRL", "slime", "prime-rl"])
def test_there_is_a_table_of_each(name: str) -> None:
    assert TABLES[name][0] == (name, "Tandem")
    assert len(TABLES[name]) > 20


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_ours_exists(cell: str) -> None:
    named = re.findall(r"`(.+?)`", cell)
    assert named or cell == "no", "neither a setting nor `no`"
    for text in named:
        key, _, value = text.partition(": ")
        if key == "reward":
            entry = yaml.safe_load(value)
            kinds("reward")[entry["kind"]].model_validate(entry)
        elif not text.startswith("tandem run "):
            assert key in all_keys()
            section, _, field = key.partition(".")
            if value:
                sections = RunConfig.model_fields[section].annotation
                TypeAdapter(sections.model_fields[field].annotation).validate_python(yaml.safe_load(value))  # type: ignore[union-attr]


def test_settings_in_the_text_exist() -> None:
    prose = "\n".join(line for line in PAGE.partition("\n## ")[0].splitlines() if "did you mean" not in line)
    named = re.findall(r"`((?:grpo|data|reward|trainer|rollout|run)\.\w+)`", prose)
    assert len(named) >= 3
    assert set(named) <= set(all_keys())
