"""Every command that the documents show is known, is run by a test, and has options and settings that exist."""

import re
from pathlib import Path

import click
import pytest
import typer

from tandem_config.schema import RunConfig
from tests.house.commands import FOREIGN, NEEDS_A_CLUSTER, RUN_BY, Command, commands_in, documents
from tests.house.repository import REPO

COMMANDS = [command for document in documents() for command in commands_in(document)]
TANDEM = [command for command in COMMANDS if command.kind.startswith("tandem ")]


def subcommands() -> dict[str, click.Command]:
    from launcher.cli import app

    group = typer.main.get_command(app)
    return dict(getattr(group, "commands", {}))


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_the_command_is_run_by_a_test(command: Command) -> None:
    if command.words[0] in FOREIGN or command.kind in NEEDS_A_CLUSTER:
        return
    assert command.kind in RUN_BY, f"{command}: add it to RUN_BY in tests/house/commands.py, with the test that runs it"


@pytest.mark.parametrize(("kind", "run_by"), RUN_BY.items())
def test_the_test_that_runs_it_exists(kind: str, run_by: tuple[str, str]) -> None:
    name, text = run_by
    assert text in (REPO / name).read_text(encoding="utf-8"), f"{kind}: {name} no longer holds {text!r}"


@pytest.mark.parametrize("command", TANDEM, ids=str)
def test_its_options_exist(command: Command) -> None:
    name = command.words[1]
    if name.startswith("-"):
        return
    assert name in subcommands(), f"tandem has no subcommand {name}"
    known = {option for parameter in subcommands()[name].params for option in parameter.opts} | {"--help"}
    used = {word.partition("=")[0] for word in command.words[2:] if word.startswith("-")}
    assert used <= known


@pytest.mark.parametrize("command", TANDEM, ids=str)
def test_its_settings_and_files_exist(command: Command) -> None:
    for option, value in zip(command.words, command.words[1:], strict=False):
        if option == "--set":
            section, _, key = value.partition("=")[0].partition(".")
            field = RunConfig.model_fields.get(section)
            settings = getattr(field.annotation, "model_fields", {}) if field is not None else {}
            assert key in settings, f"{value}: no such setting"
        if option in ("-c", "--config") and value.startswith("examples/"):
            assert (REPO / value).is_file(), f"{value} does not exist"


def test_what_needs_a_cluster_is_said_where_it_is_shown() -> None:
    shown = {command.document for command in COMMANDS if command.kind in NEEDS_A_CLUSTER}
    verbs = {kind.split()[1] for kind in NEEDS_A_CLUSTER}
    for document in shown:
        (sentence,) = re.findall(r"^Needs a cluster: (.+)\.$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(re.findall(r"`kubectl ([a-z-]+)`", sentence)) == verbs


def test_commands_are_found(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(
        "```console\n$ make demo\noutput\n$ A=1 tandem run -c x.yaml \\\n  --set a.b=1\n```\n"
        "```bash\n# a comment\ncd x && .venv/bin/python -m tools.proto write\n```\n```yaml\nmake: no\n```\n"
    )
    kinds = [command.kind for command in commands_in(document)]
    assert kinds == ["make demo", "tandem run", "cd x", "python -m tools.proto"]
