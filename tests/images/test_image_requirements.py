"""What the images install is a subset of the lock, holds what they import, and keeps torch out of the coordinator."""

import subprocess
import sys
from importlib import metadata

import pytest
from packaging.utils import canonicalize_name

from tools.check_venv import read_pins
from tools.image_requirements import FOLDER, IMAGES, REPO, main

# async-timeout: for Python 3.11.2 only. tzdata: python-dateutil 4 reads it, and the base has python-dateutil 2.
NOT_IN_THE_BASE = {"async-timeout", "tzdata"}
# Installed before, and what it brings.
TORCH = {"torch", "jinja2"}
START_S = 120
LOCK = read_pins(REPO / "requirements" / "lock.txt")


def test_the_files_are_what_the_code_imports() -> None:
    assert main(["check"]) == 0


def test_a_file_that_is_out_of_date_is_found(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMAGES, "trackers", IMAGES["trainer-gpu"])
    assert main(["check"]) == 1
    assert "requirements/images/trackers.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("image", "modules"),
    [
        (
            "coordinator",
            [
                "coordinator.app",
                "launcher.cli",
                "launcher.checkpoints",
                "reward_service.serve",
                "environment_service.serve",
            ],
        ),
        ("trainer", ["trainer_service.host", "trainer_service.app", "trainer_service.worker"]),
        ("rollout", ["rollout_service.app", "rollout_service.worker_app"]),
    ],
)
def test_what_it_runs_starts_without_what_it_leaves_out(image: str, modules: list[str]) -> None:
    """pyarrow was left out for those who have no Parquet data; then samples became Parquet."""
    brought = TORCH if image != "coordinator" else set()
    left_out = {canonicalize_name(name) for name in IMAGES[image].without} - brought
    blocked = [
        module
        for module, distributions in metadata.packages_distributions().items()
        if {canonicalize_name(name) for name in distributions} & left_out
    ]
    code = (
        f"import importlib, sys; sys.modules.update(dict.fromkeys({blocked})); "
        f"[importlib.import_module(module) for module in {modules}]"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("image", IMAGES)
def test_it_is_a_subset_of_the_lock(image: str) -> None:
    pins = read_pins(FOLDER / f"{image}.txt")
    assert pins
    assert pins.items() <= LOCK.items()


def test_there_is_no_file_but_those() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(IMAGES)


@pytest.mark.parametrize("name", ["torch", "transformers", "sglang", "megatron-core", "triton", "safetensors"])
def test_the_coordinator_has_no_engine(name: str) -> None:
    assert name not in read_pins(FOLDER / "coordinator.txt")


@pytest.mark.parametrize(("image", "engine"), [("trainer", "megatron-core"), ("rollout", "sglang")])
def test_the_others_have_theirs(image: str, engine: str) -> None:
    assert engine in read_pins(FOLDER / f"{image}.txt")


@pytest.mark.parametrize("image", ["trainer", "rollout"])
def test_on_gpus_the_base_brings_torch_and_what_it_needs(image: str) -> None:
    gpu, cpu = (read_pins(FOLDER / f"{name}.txt") for name in (f"{image}-gpu", image))
    assert gpu.items() < cpu.items()
    assert not {"torch", "triton", "sympy", "networkx"} & gpu.keys()


@pytest.mark.parametrize("image", ["trainer", "rollout"])
def test_on_gpus_what_the_image_does_not_bring_its_base_has(image: str) -> None:
    """The base is SGLang with all that it needs, which is in the lock for GPUs."""
    gpu, cpu = (read_pins(FOLDER / f"{name}.txt") for name in (f"{image}-gpu", image))
    base = read_pins(REPO / "requirements" / "cuda-3.12.txt").keys()
    assert {canonicalize_name(name) for name in cpu.keys() - gpu.keys()} - base - NOT_IN_THE_BASE == set()


@pytest.mark.parametrize("image", IMAGES)
def test_reasons_are_given(image: str) -> None:
    assert [name for name, reason in IMAGES[image].without.items() if len(reason) < 20] == []
