"""An installed `tandem` has the manifests: they are in the wheel, all that overlays are made of."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from launcher.deploy.overlay import manifests
from launcher.deploy.overlay.manifests import copy_manifests, find_manifests, names_of
from servicekit.errors import ConfigError
from tests.house.repository import REPO
from tests.manifests.kustomize import build

pytestmark = pytest.mark.integration
BUILD_S = 120.0
PARTS = ("pyproject.toml", "README.md", "LICENSE", "setup.py", "launcher", "deploy")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a wheel's data goes to, with what the wheel has for it."""
    folder = tmp_path_factory.mktemp("wheel")
    tree, prefix = folder / "tree", folder / "prefix"
    tree.mkdir()
    for name in PARTS:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, tree / name)
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder)
    (data,) = folder.glob("*.data")
    (data / "data").rename(prefix)
    return prefix


def test_a_wheels_manifests_are_found_and_build_as_those_of_the_checkout(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "__file__", str(tmp_path / "lib" / "launcher" / "deploy" / "new" / "manifests.py"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ConfigError, match="--manifests"):
        find_manifests()
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(installed) if name == "data" else "")
    found = find_manifests()
    assert found == installed / "share" / "tandem" / "deploy"
    for kind in ("overlays", "components"):
        names = names_of(REPO / "deploy", kind)
        assert names_of(found, kind) == names
        copy_manifests(found, [f"{kind}/{name}" for name in names], tmp_path)
        assert len(names) > 2
    for name in names_of(found, "overlays"):
        assert build(tmp_path / "overlays" / name) == build(REPO / "deploy" / "overlays" / name)
