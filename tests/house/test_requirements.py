"""pyproject.toml and requirements/ agree, and what the packages import is declared."""

import ast
import sys
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.repository import PACKAGES, REPO, parse, python_files
from tools.check_venv import read_pins

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINS = {
    canonicalize_name(name): version
    for file in ("torch.txt", "lock.txt")
    for name, version in read_pins(REPO / "requirements" / file).items()
}
EXTRAS_OF = {
    "trainer_service": ["trainer"],
    "rollout_service": ["rollout"],
    "weightsync": ["trainer", "rollout"],
    "coordinator": ["trackers"],
    "launcher": ["trackers", "trainer"],
}
# Modules of a distribution that is split in two, under the name that is declared.
PART_OF = {"pydantic_core": "pydantic"}


def requirements(*extras: str) -> list[Requirement]:
    """Returns the requirements of the base and of the `extras`."""
    lines = list(PROJECT["dependencies"])
    for extra in extras:
        lines += PROJECT["optional-dependencies"][extra]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("requirement", requirements("trainer", "rollout", "trackers", "dev"), ids=str)
def test_the_lock_holds_every_requirement(requirement: Requirement) -> None:
    assert PINS[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_compiler_for_gpus_is_of_the_cuda_that_torch_is_built_for(python: str) -> None:
    """CUB's headers refuse another minor version: so did the kernels of Qwen3-MoE's router and of top-p."""
    pins = read_pins(REPO / "requirements" / f"cuda-{python}.txt")
    parts = ("cuda-toolkit", "nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime")
    assert {tuple(pins[name].split(".")[:2]) for name in parts} == {("13", "0")}


def third_party(package: str) -> set[str]:
    """Returns the top-level modules that a package of ours imports from elsewhere."""
    found: set[str] = set()
    for path in python_files(package):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {*PACKAGES, "tandem_api"}


@pytest.mark.parametrize("package", PACKAGES)
def test_what_a_package_imports_is_declared(package: str) -> None:
    providers = metadata.packages_distributions()
    declared = {canonicalize_name(requirement.name) for requirement in requirements(*EXTRAS_OF.get(package, []))}
    for module in third_party(package):
        distributions = {canonicalize_name(name) for name in providers.get(PART_OF.get(module, module), [])}
        assert distributions & declared, f"{package} imports {module}, which pyproject.toml does not declare"
