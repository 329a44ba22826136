"""A fresh machine, whose pip knows nothing but the package index, can install what requirements/ pins."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.repository import REPO, files, name_of
from tools.cuda import lock

INSTALL_S = 3600.0
TORCH_FIRST = re.compile(r"install\b.*?--only-binary :all:.*?((?:-c requirements/\S+ )+-r requirements/torch\.txt)")
INSTALLERS = ["tools/make_venv.sh", "deploy/images/trainer.Dockerfile", "deploy/images/rollout.Dockerfile"]
PYTHON = ["--python-version", "3.11", "--python-platform", lock.PLATFORM, "--only-binary", ":all:"]


def torch_arguments(installer: str) -> str:
    """What a script gives pip to install torch with: constraints and the file with its pin."""
    text = re.sub(r"\\\n\s*", "", (REPO / installer).read_text(encoding="utf-8"))
    [arguments] = TORCH_FIRST.findall(text)
    return str(arguments)


def resolve(*arguments: str) -> str:
    """What uv would install, from the bare index. Skips where the index does not answer."""
    try:
        return lock.uv("pip", "compile", *PYTHON, "--no-header", "--no-annotate", *arguments)
    except lock.Unreachable as why:
        pytest.skip(f"NO PACKAGE INDEX: resolution is not tested: {why}")


@pytest.mark.parametrize("installer", INSTALLERS)
def test_torch_resolves_as_it_is_installed(installer: str) -> None:
    """The index's only build of torch is the CUDA one, which asks for exact versions of what the lock pins too."""
    found = resolve(*torch_arguments(installer).replace("-r ", "").split())
    assert "\ntorch==" in found
    assert "\nnvidia-nccl-cu13==" in found
    constrained = {line for line in (REPO / "requirements/torch-cuda.txt").read_text().splitlines() if "==" in line}
    assert constrained <= set(found.splitlines()), "pins that torch does not ask for"


def test_every_pin_is_there_as_a_wheel() -> None:
    assert resolve("--no-deps", "requirements/lock.txt").count("==") > 100


def test_pins_that_do_not_fit_are_told(tmp_path: Path) -> None:
    """What plain PyPI answered before: the lock had a triton that torch's build does not take."""
    text = (REPO / "requirements/lock.txt").read_text(encoding="utf-8")
    other = re.sub(r"^triton==.*$", "triton==3.6.0", text, flags=re.MULTILINE)
    (tmp_path / "lock.txt").write_text(other, encoding="utf-8")
    with pytest.raises(lock.Unresolvable, match="triton"):
        resolve("-c", str(tmp_path / "lock.txt"), "requirements/torch.txt")


@pytest.mark.slow
@pytest.mark.parametrize("name", lock.locks())
def test_the_locks_for_gpus_answer_what_is_asked_for(name: str) -> None:
    try:
        assert lock.differences(name, lock.locks()[name]) == []
    except lock.Unreachable as why:
        pytest.skip(f"NO PACKAGE INDEX: resolution is not tested: {why}")


def test_a_bare_environment_knows_no_other_index() -> None:
    environ = {"PATH": "p", "PIP_CERT": "c", "PIP_FIND_LINKS": "/here", "UV_INDEX_URL": "u", "PIP_CONFIG_FILE": "f"}
    assert lock.bare_environment(environ) == {
        "PATH": "p",
        "PIP_CERT": "c",
        "PIP_CONFIG_FILE": os.devnull,
        "UV_NO_CONFIG": "1",
    }


@pytest.fixture(scope="module")
def fresh() -> Iterator[Path]:
    """A copy of this checkout, without any environment."""
    with tempfile.TemporaryDirectory(prefix="tandem-fresh-") as folder:
        if shutil.disk_usage(folder).free < 16e9:
            pytest.skip(f"NO SPACE: a fresh installation takes 16 GB in {folder}")
        for path in files():
            target = Path(folder) / name_of(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
        yield Path(folder)


def make_venv(folder: Path) -> str:
    """`make venv` there with nothing but the index, and downloads of its own. Returns: what it printed."""
    environ = {**lock.bare_environment(os.environ), "PIP_CACHE_DIR": str(folder / "downloads")}
    for name in ("PYTHON", "TORCH_INDEX_URL", "MAKEFLAGS", "MAKELEVEL", "VIRTUAL_ENV"):
        environ.pop(name, None)
    done = subprocess.run(
        ["make", "venv"], cwd=folder, env=environ, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2 * INSTALL_S)
def test_two_commands_on_a_fresh_machine(fresh: Path) -> None:
    """Installs with plain settings, shows that it moves, imports both engines, and repairs itself the second time."""
    said = make_venv(fresh)
    assert "fetching torch-" in said
    assert "packages as pinned" in said
    python = fresh / ".venv/bin/python"
    trial = "import torch, triton, sglang, trainer_service.megatron_engine.build"
    done = subprocess.run([python, "-W", "ignore", "-c", trial], cwd=fresh, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]

    assert "venv:" not in make_venv(fresh), "a second run has nothing to do"

    packages = next((fresh / ".venv/lib").glob("python3.11")) / "site-packages"
    next(packages.glob("einops-*.dist-info/RECORD")).unlink()
    (packages / "networkx/convert.py").write_text("", encoding="utf-8")
    pins = fresh / "requirements/lock.txt"
    pins.write_text(re.sub("^iniconfig==.*$", "iniconfig==2.1.0", pins.read_text(), flags=re.MULTILINE))
    said = make_venv(fresh)
    assert (packages / "iniconfig-2.1.0.dist-info").is_dir(), "a changed lock over an environment that is there"
    assert "einops is not whole" in said
    assert "networkx is not whole" in said
    assert "packages as pinned" in said
