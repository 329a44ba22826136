"""Every command that the documents show is run by a test, which its marker `runs` names, and its options exist."""

import ast
from pathlib import Path

import click
import pytest
import typer

from tandem_config.overrides import parse_overrides
from tests.house.commands import Command, commands_in, documents
from tests.house.repository import REPO, dotted, parse, python_files

COMMANDS = [command for document in documents() for command in commands_in(document)]
# Programs that the documents show and that the reader's system does not bring; and what .ci/run itself runs.
OURS, RUN_BY_CI = ("docker", "kubectl", "make", "python", "tandem"), {"make test", "make venv"}
TANDEM = [command for command in COMMANDS if command.kind.startswith("tandem ")]


def subcommands() -> dict[str, click.Command]:
    from launcher.cli import app

    group = typer.main.get_command(app)
    return dict(getattr(group, "commands", {}))


def marked(tree: ast.Module) -> set[str]:
    """The commands that tests of a file say that they run: `@pytest.mark.runs("make demo")`."""
    tests = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    marks = [mark for test in tests if test.name.startswith("test_") for mark in test.decorator_list]
    runs = [mark for mark in marks if isinstance(mark, ast.Call) and dotted(mark.func) == "pytest.mark.runs"]
    return {argument.value for mark in runs for argument in mark.args if isinstance(argument, ast.Constant)}  # type: ignore[misc]


def test_every_command_is_run_by_a_test() -> None:
    shown = {command.kind for command in COMMANDS if Path(command.words[0]).name in OURS}
    run = set().union(*(marked(parse(path)) for path in python_files("tests"))) | RUN_BY_CI
    assert shown - run == set(), "no test is marked with pytest.mark.runs(...) of these"
    assert run - shown == set(), "no document shows these"


def test_a_mark_counts_on_a_test_only() -> None:
    mark = '@pytest.mark.runs("make {}")\ndef {}() -> None: ...\n'
    assert marked(ast.parse(mark.format("a", "test_it") + mark.format("b", "helper"))) == {"make a"}


@pytest.mark.parametrize("command", TANDEM, ids=str)
def test_its_options_exist(command: Command) -> None:
    name, *words = command.words[1:]
    if name.startswith("-"):
        return
    assert name in subcommands(), f"tandem has no subcommand {name}"
    meant = subcommands()[name]
    if nested := getattr(meant, "commands", {}):
        assert words, f"tandem {name} needs a subcommand"
        assert words[0] in nested, f"tandem {name} has no subcommand {words[0]}"
        meant, words = nested[words[0]], words[1:]
    known = {option for parameter in meant.params for option in parameter.opts} | {"--help"}
    used = {word.partition("=")[0] for word in words if word.startswith("-")}
    assert used <= known


@pytest.mark.parametrize("command", TANDEM, ids=str)
def test_its_settings_and_files_exist(command: Command) -> None:
    for option, value in zip(command.words, command.words[1:], strict=False):
        if option == "--set":
            assert wrong_with(value) == []
        if option in ("-c", "--config") and value.startswith("examples/"):
            assert (REPO / value).is_file(), f"{value} does not exist"


def wrong_with(setting: str) -> list[str]:
    """What `--set` refuses of it, by the command's own parser; places in lists (`reward.1.weight`) are fine."""
    return [f"{problem.where}: {problem.message}" for problem in parse_overrides([setting])[1]]


def test_a_setting_that_does_not_exist_is_found() -> None:
    assert wrong_with("reward.1.weight=0.5") == wrong_with("trackers=[tensorboard]") == []
    for wrong in ("reward.1.weigth=0.5", "grpo.0.group_size=8", "grpo.size=8", "rewards.weight=1"):
        assert wrong_with(wrong), wrong


def test_commands_are_found(tmp_path: Path) -> None:
    document = tmp_path / "x.md"
    document.write_text(
        "```console\n$ make demo\noutput\n$ A=1 tandem run -c x.yaml \\\n  --set a.b=1\n```\n"
        "```bash\n# a comment\ncd x && .venv/bin/python -m tools.proto write; kubectl get pods\n```\n"
        "```yaml\nmake: no\n```\n"
    )
    kinds = [command.kind for command in commands_in(document)]
    assert kinds == ["make demo", "tandem run", "cd x", "python -m tools.proto", "kubectl"]
