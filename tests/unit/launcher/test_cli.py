"""The command as users meet it: help, errors, exit codes; nothing heavy is imported for them."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from tests.kit.folders import write_config

COMMANDS = ("demo", "init", "run", "check", "status", "top", "logs", "compare", "version")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Help and errors in one line each, without colours, whatever terminal the tests run in."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("REDIS_URL", raising=False)


def invoke(*arguments: str) -> tuple[int, str]:
    """Exit code, and stdout with stderr."""
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def test_help_names_every_command_and_exit_code() -> None:
    code, output = invoke("--help")
    assert code == 0
    assert all(command in output for command in COMMANDS)
    assert "tandem run -c my.yaml" in output
    assert "130 Ctrl-C" in output


@pytest.mark.parametrize("command", ["demo", "init", "run", "check", "status", "logs", "compare"])
def test_each_command_s_help_has_an_example(command: str) -> None:
    code, output = invoke(command, "--help")
    assert code == 0
    assert f"    tandem {command}" in output.partition("Example")[2]


def test_check_says_that_all_is_well(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    assert invoke("check", "-c", str(file)) == (0, f"{file}: no problems\n")


def test_the_file_may_be_given_without_its_option(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    assert invoke("check", str(file)) == (0, f"{file}: no problems\n")
    code, output = invoke("run", str(file), "-c", "other.yaml")
    assert code == 2
    assert f"two configuration files: {file} and --config other.yaml" in output
    assert invoke("check")[0] == 2


def test_check_shows_key_value_problem_suggestion_and_place(tmp_path: Path) -> None:
    file = write_config(tmp_path, grpo={"grop_size": 3})
    code, output = invoke("check", "-c", str(file), "--set", "trainer.tensor_parallel=8")
    assert code == 2
    assert "error: grpo.grop_size = 3\n    unknown key\n    -> did you mean grpo.group_size?\n" in output
    assert "error: trainer.tensor_parallel = 8\n    does not divide the model's attention heads (4)\n" in output
    assert "    at --set trainer.tensor_parallel=8\n" in output
    assert output.endswith(f"{file}: 3 errors\n") or "1 warning" in output.splitlines()[-1]


def test_run_refuses_a_bad_configuration_and_makes_no_folder(tmp_path: Path) -> None:
    file = write_config(tmp_path, grpo={"group_size": 1})
    code, output = invoke("run", "-c", str(file))
    assert code == 2
    assert "every advantage would be 0" in output
    assert output.endswith("not started: 1 error\n")
    assert not (tmp_path / "runs").exists()


def test_run_without_a_configuration_says_what_to_give() -> None:
    code, output = invoke("run")
    assert code == 2
    assert "tandem run -c my.yaml" in output


def test_resume_of_something_else_is_refused(tmp_path: Path) -> None:
    code, output = invoke("run", "--resume", str(tmp_path / "nothing"))
    assert code == 2
    assert "no such folder" in output


def test_status_of_nothing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = invoke("status")
    assert code == 2
    assert "no runs in runs" in output


@pytest.mark.runs("tandem logs")
def test_logs_shows_the_warnings_of_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    line = '{"time": "2026-05-01T12:00:00+00:00", "level": "%s", "message": "%s", "service": "coordinator"}\n'
    log = line % ("info", "serving") + line % ("warning", "replica left out")
    (tmp_path / "logs" / "coordinator.log").write_text(log, encoding="utf-8")
    code, output = invoke("logs", str(tmp_path), "--level", "warning", "--newest", "50")
    assert (code, "replica left out" in output, "serving" in output) == (0, True, False)


def test_version_names_the_engines() -> None:
    code, output = invoke("version")
    assert code == 0
    assert "tandem " in output
    assert f"python {platform.python_version()}" in output


def test_help_and_check_import_no_torch(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    program = f"""
import sys
from typer.testing import CliRunner
from launcher.cli import app
assert CliRunner().invoke(app, ["--help"]).exit_code == 0
assert not {{"pydantic", "grpc", "numpy", "matplotlib"}} & set(sys.modules), "too much for --help"
assert CliRunner().invoke(app, ["check", "-c", {str(file)!r}]).exit_code == 0
assert not {{"torch", "transformers", "sglang", "megatron"}} & set(sys.modules), "an engine was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_text_beyond_the_locale_is_no_traceback(tmp_path: Path) -> None:
    file = write_config(tmp_path, run={"name": "übung"})
    environ = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "launcher", "check", "-c", str(file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert r"run.name = \xfcbung" in done.stdout


def test_a_run_goes_on_without_the_reader_of_its_output() -> None:
    program = """
import sys
from launcher.report import make_console
from launcher.view.run_view import RunView
view = RunView(make_console(), 10)
view.print_line("first")
sys.stdin.readline()  # the reader has gone
for number in range(3):
    view.print_line(f"line {number} " + "x" * 100_000)
print("the end", file=sys.stderr)
"""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate("go on\n", timeout=60)
    assert process.returncode == 0
    assert said == "output closed by its reader; the run continues (see: tandem status)\nthe end\n"


def test_a_command_that_goes_on_without_its_reader_does_not_speak_of_a_run() -> None:
    program = """
import sys
from launcher.report import make_console
console = make_console()
console.print("first")
sys.stdin.readline()  # the reader has gone
for number in range(3):
    console.print("x" * 100_000)
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.stdout.close()
        process.stdout = None
        _, said = process.communicate("go on\n", timeout=60)
    assert (process.returncode, said) == (0, "output closed by its reader; the command continues\n")
