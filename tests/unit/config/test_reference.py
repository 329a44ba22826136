"""The pages of the configuration say what the settings say, all of them and no others."""

import ast
import re
import shutil
from pathlib import Path

import pytest
from pydantic import BaseModel

from servicekit.environment import ServiceEnvironment
from tandem_config.keys import all_keys, description, note, sections
from tandem_config.schema import GrpoSection, RolloutSection, SyncSection, TrainerSection
from tests.house.repository import PACKAGES, parse, python_files
from tools import configuration_reference as reference
from tools.configuration_reference import INDEX, VARIABLES, default_text, main, pages, type_text

# Set by a service for its own ranks; nobody else has a reason to.
INTERNAL = {"TANDEM_SERVICE_PID", "TANDEM_RECEIVER_"}


@pytest.mark.runs("python -m tools.configuration_reference")
def test_the_pages_are_what_the_settings_say() -> None:
    assert main(["check"]) == 0, "run: python -m tools.configuration_reference write"


def test_every_section_has_a_page_that_the_index_links() -> None:
    index = INDEX.read_text(encoding="utf-8")
    assert [name for name in sections() if f"[`{name}`](configuration/{name}.md)" not in index] == []


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder docs/ with the pages as they are, which the tool takes for the repository's."""
    shutil.copytree(INDEX.parent / "configuration", tmp_path / "docs" / "configuration")
    shutil.copy(INDEX, tmp_path / "docs")
    folder = tmp_path / "docs" / "configuration"
    monkeypatch.setattr(reference, "REPO", tmp_path)
    monkeypatch.setattr(reference, "INDEX", tmp_path / "docs" / "configuration.md")
    monkeypatch.setattr(reference, "VARIABLES", folder / "variables.md")
    monkeypatch.setattr(reference, "FOLDER", folder)
    return folder


def test_a_page_that_lags_behind_is_noticed_and_written(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    current = (copy / "grpo.md").read_text(encoding="utf-8")
    old = current.replace("| `group_size` | integer >= 2 ", "| `group_size` | integer >= 1 ")
    assert old != current
    (copy / "grpo.md").write_text(old, encoding="utf-8")
    (copy / "trainer.md").unlink()
    (copy / "forgotten.md").write_text("# a section that is gone\n", encoding="utf-8")
    assert main(["check"]) == 1
    named = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert named == [f"docs/configuration/{name}.md" for name in ("forgotten", "grpo", "trainer")]
    assert main(["write"]) == main(["check"]) == 0
    assert (copy / "grpo.md").read_text(encoding="utf-8") == current
    assert not (copy / "forgotten.md").exists()


def test_pages_that_a_text_names_are_links() -> None:
    texts = pages()
    assert "[numerics.md](../numerics.md)" in texts[INDEX.parent / "configuration" / "grpo.md"]
    assert "[numerics.md](numerics.md)" in texts[INDEX]


def test_every_setting_has_a_description_a_unit_and_a_reason() -> None:
    assert [key for key in all_keys() if not description(key)] == []
    assert [key for key in all_keys() if not note(key, "why")] == []


@pytest.mark.parametrize("suffix", ["s", "mib", "gbit", "tokens", "layers", "iterations"])
def test_units_are_those_that_the_names_say(suffix: str) -> None:
    units = {"s": "s", "mib": "MiB", "gbit": "Gbit/s"}
    named = [key for key in all_keys() if key.rpartition(".")[2].endswith(f"_{suffix}")]
    named = [key for key in named if key != "rollout.skip_special_tokens"]  # a switch, by the field's name for it
    assert named
    assert {note(key, "unit") for key in named} == {units.get(suffix, suffix)}


def test_every_variable_of_the_services_is_described() -> None:
    fields = ServiceEnvironment.model_fields.values()
    assert [field.alias for field in fields if not field.description or not field.alias] == []


def test_every_variable_that_the_code_names_is_on_the_page() -> None:
    named = {
        node.value
        for package in PACKAGES
        for path in python_files(package)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"TANDEM_[A-Z_]+", node.value)
    }
    assert "TANDEM_TLS_CERT" in named
    page = VARIABLES.read_text(encoding="utf-8")
    assert sorted(name for name in named - INTERNAL if f"`{name}`" not in page) == []


def test_every_variable_on_the_page_is_named_by_the_code() -> None:
    code = "".join(path.read_text(encoding="utf-8") for package in PACKAGES for path in python_files(package))
    shown = set(re.findall(r"`(TANDEM_[A-Z_]+)`", VARIABLES.read_text(encoding="utf-8")))
    assert shown
    assert sorted(name for name in shown if name not in code) == []


@pytest.mark.parametrize(
    ("section", "key", "type_", "default"),
    [
        (GrpoSection, "group_size", "integer >= 2 <= 65536", "`16`"),
        (GrpoSection, "clip_low", "number > 0 < 1", "`0.2`"),
        (GrpoSection, "correction_high", "number >= 1, or null", "null"),
        (TrainerSection, "sequence_parallel", "boolean", "`false`"),
        (RolloutSection, "context_length", "integer > 0, or null", "null"),
        (SyncSection, "dtype", "one of `same`, `bfloat16`", "`same`"),
    ],
)
def test_types_and_defaults_are_told_as_they_are_written(
    section: type[BaseModel], key: str, type_: str, default: str
) -> None:
    field = section.model_fields[key]
    assert (type_text(field), default_text(field)) == (type_, default)


def test_the_tool_knows_its_two_words() -> None:
    with pytest.raises(SystemExit):
        main(["chekc"])
