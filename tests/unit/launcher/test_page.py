"""`tandem page` serves a run's folder until Ctrl-C; samples need the key of its address."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launcher.cli import app
from tandem_files.samples.folder import SampleFolder
from tests.kit.folders import stored, write_samples


@pytest.mark.runs("tandem page")
@pytest.mark.timeout(60)  # a process, with its imports
def test_the_page_of_a_run_is_served_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.yaml").write_text("run: {iterations: 3}")
    write_samples(SampleFolder(tmp_path), 1, "train", [stored()])
    command = [sys.executable, "-m", "launcher", "page", str(tmp_path)]
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(rf"the page of {tmp_path}: (http://127\.0\.0\.1:\d+/)#key=([0-9a-f]{{32}})\n", line)
        assert found is not None, line
        url, key = found.groups()
        with urllib.request.urlopen(f"{url}run.json", timeout=20) as answer:
            assert json.load(answer)["total_iterations"] == 3
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}samples.json", timeout=20)
        request = urllib.request.Request(f"{url}samples.json", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=20) as answer:
            assert json.load(answer)["groups"][0]["row"] == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_what_cannot_be_served_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["page", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not a run's folder" in result.output
