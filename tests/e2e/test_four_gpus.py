"""The README's commands on a machine with four GPUs, in the environment that `make venv` makes there.

PyPI's torch for Linux is a build for CUDA, and the lock has none of SGLang's kernels for GPUs: all runs on the CPU.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import SMALL, Tandem, rows_of, summary_of
from tests.fakes.cuda_machine import cuda_machine
from tests.house.repository import REPO

pytestmark = [pytest.mark.integration, pytest.mark.alone, pytest.mark.timeout(900)]
# Two trainer ranks and two replicas, as in the demo: all four GPUs.
WHOLE = {**SMALL, "trainer.tensor_parallel": 2, "rollout.replicas": 2}


def test_the_demo_runs_on_the_cpu_and_says_why(tandem: Callable[..., Tandem], tmp_path: Path) -> None:
    settings = [part for key, value in WHOLE.items() for part in ("--set", f"{key}={value}")]
    run = tandem("demo", *settings, environ=cuda_machine(tmp_path / "machine"))
    assert run.wait_end(500) == 0, run.output()
    folder = tmp_path / "runs" / "arithmetic"
    assert (summary_of(folder)["iterations"], len(rows_of(folder))) == (2, 2)
    assert summary_of(folder)["logprob_abs_diff_max"] <= 1e-4
    [said] = [line for line in run.lines if "so it will run on the CPU" in line]
    assert "sgl_kernel" in said
    assert any("requirements/gpu.md" in line for line in run.lines)


def test_gpus_that_are_asked_for_are_an_error_before_anything_starts(
    tandem: Callable[..., Tandem], tmp_path: Path
) -> None:
    run = tandem("demo", environ={**cuda_machine(tmp_path / "machine"), "TANDEM_DEVICE": "cuda"})
    assert run.wait_end(120) == 2, run.output()
    assert "sgl_kernel" in run.output()
    assert "TANDEM_DEVICE=cuda asks for them" in run.output()
    assert not (tmp_path / "runs").exists()


def test_tests_compute_on_the_cpu_too(tmp_path: Path) -> None:
    """What `make test` starts after its checks; the test asks torch in this process, and in one that it starts."""
    machine = cuda_machine(tmp_path / "machine")
    ask = "import torch; assert not torch.cuda.is_available()"
    (tmp_path / "test_asks.py").write_text(
        f"import subprocess, sys\n\ndef test_asks():\n    {ask}\n"
        f"    subprocess.run([sys.executable, '-c', {ask!r}], check=True)\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.conftest",
        "--rootdir",
        str(REPO),
    ]
    done = subprocess.run(
        [*command, str(tmp_path / "test_asks.py")], cwd=REPO, env=machine, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
