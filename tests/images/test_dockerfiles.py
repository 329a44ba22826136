"""The Dockerfiles keep the rules of our images: pinned, not root, exec form, labelled, no more than is needed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.house.repository import REPO
from tests.images.dockerfiles import FOLDER, Dockerfile, copied, parse, read
from tools.check_venv import read_pins
from tools.image_requirements import IMAGES

TARGETS = {"coordinator": ["final"], "trainer": ["cpu", "gpu"], "rollout": ["cpu", "gpu"]}
ENTRYPOINTS = {"coordinator": "coordinator", "trainer": "trainer_service.host", "rollout": "rollout_service"}
BUILT = [(image, target) for image, targets in TARGETS.items() for target in targets]
LABELS = ("title", "description", "licenses", "version", "revision")
# Of the version that is locked: SGLang's makers name their images so.
# In the image as files, not as packages of ours.
EXAMPLES = {"examples/arithmetic", "examples/calculator/tools.py", "examples/reward_server"}
GPU_BASE = f"lmsysorg/sglang:v{read_pins(REPO / 'requirements' / 'cuda-3.12.txt')['sglang']}"
USER = re.compile(r"[1-9]\d*:[1-9]\d*")


def unpinned(file: Dockerfile) -> list[str]:
    """Bases that are no stage, not `scratch`, and have neither a version nor a digest."""
    known = {stage.name for stage in file.stages} | {"scratch"}
    found = []
    for stage in file.stages:
        name = re.sub(r"\$\{(\w+)\}", lambda match: file.arguments.get(match[1], ""), stage.parent)
        tag = name.rpartition("/")[2].partition(":")[2]
        if name not in known and "@sha256:" not in name and (not re.search(r"\d", tag) or "latest" in tag):
            found.append(stage.parent)
    return found


def is_exec_form(text: str) -> bool:
    """Whether it is a JSON list of words, which no shell comes in front of: the program itself gets SIGTERM."""
    try:
        words = json.loads(text)
    except ValueError:
        return False
    return isinstance(words, list) and all(isinstance(word, str) for word in words)


def is_sent(path: Path) -> bool:
    """Whether .dockerignore lets a file or folder of the checkout into a build: our file lists what it lets in."""
    allowed = [line[1:].rstrip("/") for line in ignore_lines() if line.startswith("!")]
    name = path.relative_to(REPO).as_posix()
    return any(name == each or name.startswith(f"{each}/") for each in allowed)


def ignore_lines() -> list[str]:
    """The lines of .dockerignore."""
    return [line for line in (REPO / ".dockerignore").read_text(encoding="utf-8").splitlines() if line]


def loose_installs(file: Dockerfile) -> list[str]:
    """Installations over the network whose versions nothing pins."""
    pinned = ("-r requirements/", "-c requirements/", "grep '^setuptools==' requirements/lock.txt")
    return [text for text in downloads(file) if not any(pin in text for pin in pinned)]


def downloads(file: Dockerfile) -> list[str]:
    """RUN instructions in which pip goes to an index."""
    runs = [text for text in file.all("RUN") if re.search(r"\bpip\b.* install ", text)]
    return [text for text in runs if "--no-index" not in text]


@pytest.mark.parametrize(("image", "target"), BUILT)
def test_a_service_does_not_run_as_root(image: str, target: str) -> None:
    assert USER.fullmatch(read(image).effective(target, "USER") or "")


@pytest.mark.parametrize(("image", "target"), BUILT)
def test_the_service_itself_gets_the_signals(image: str, target: str) -> None:
    entrypoint = read(image).effective(target, "ENTRYPOINT") or ""
    assert is_exec_form(entrypoint)
    module = json.loads(entrypoint)[-1]
    assert module == ENTRYPOINTS[image]
    path = REPO / module.replace(".", "/")
    assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


@pytest.mark.parametrize(("image", "target"), BUILT)
def test_an_image_says_what_it_is(image: str, target: str) -> None:
    labels = read(image).effective(target, "LABEL") or ""
    assert [label for label in LABELS if f"org.opencontainers.image.{label}=" not in labels] == []
    assert f"tandem-{image}" in labels


@pytest.mark.parametrize("image", TARGETS)
def test_everything_is_pinned(image: str) -> None:
    file = read(image)
    assert unpinned(file) == []
    assert loose_installs(file) == []
    assert [text for text in file.all("RUN") if "apt-get" in text or "curl" in text] == []


@pytest.mark.parametrize("image", TARGETS)
def test_the_last_stage_is_the_one_for_users(image: str) -> None:
    assert read(image).stages[-1].name == TARGETS[image][-1]


@pytest.mark.parametrize("image", TARGETS)
def test_no_secret_stays_in_an_image(image: str) -> None:
    file = read(image)
    assert [name for name in file.all("ARG") + file.all("ENV") if re.search("TOKEN|PASSWORD|SECRET_KEY", name)] == []
    assert downloads(file)
    for text in downloads(file):
        assert text.count("--mount=type=secret") == 2, "the index's credentials and certificates, while it runs"


@pytest.mark.parametrize("image", TARGETS)
def test_copies_come_from_what_a_build_may_see(image: str) -> None:
    for text in read(image).all("COPY"):
        sources, from_checkout = copied(text)
        for source in sources if from_checkout else []:
            assert (REPO / source).exists(), source
            assert is_sent(REPO / source), f".dockerignore keeps {source} out"


@pytest.mark.parametrize("image", TARGETS)
def test_an_image_holds_the_packages_that_its_requirements_are_for(image: str) -> None:
    sources = {source for text in read(image).all("COPY") for source in copied(text)[0] if copied(text)[1]}
    packages = {source for source in sources if (REPO / source / "__init__.py").is_file()} - EXAMPLES
    assert packages == set(IMAGES[image].packages)


@pytest.mark.parametrize("image", TARGETS)
def test_our_code_comes_after_the_packages(image: str) -> None:
    """A change of our code must not install the packages again."""
    stage = next(stage for stage in read(image).stages if "packages" in stage.name)
    copies = [copied(each.text)[0] for each in stage.instructions if each.word == "COPY"]
    assert copies
    assert [source for sources in copies for source in sources if (REPO / source / "__init__.py").is_file()] == []


def test_trainer_and_rollout_have_one_base_on_gpus() -> None:
    """One torch and one NCCL by construction; the compose file and build.sh name it alike."""
    script = (FOLDER / "build.sh").read_text(encoding="utf-8")
    assert re.findall(r"\$\{TANDEM_GPU_BASE:-([^}]*)\}", script) == [GPU_BASE]
    assert re.findall(r"TANDEM_\w+_BASE", script.partition("set -euo")[2]).count("TANDEM_GPU_BASE") == 1
    for image in ("trainer", "rollout"):
        [check] = [text for text in read(image).all("RUN") if "check_base.py" in text]
        assert check.startswith("python3 deploy/images/check_base.py requirements/cuda-3.11.txt")


def check_base(folder: Path, *, sglang: str, cuda: str | None, lock: str) -> subprocess.CompletedProcess[str]:
    """check_base.py in a base with that SGLang and a build of torch 2.14.1, against a lock of 0.5.23 and 2.14.1."""
    for name, version in (("sglang", sglang), ("torch", "2.14.1+cu130")):
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (folder / "torch.py").write_text(f"__version__ = 'x'\nclass version:\n    cuda = {cuda!r}\n")
    (folder / lock).write_text("# a lock\nsglang==0.5.23\ntorch==2.14.1\n")
    command = [sys.executable, str(FOLDER / "check_base.py"), str(folder / lock)]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


OF_THIS_PYTHON = f"cuda-{sys.version_info.major}.{sys.version_info.minor}.txt"


def test_the_locked_base_is_taken(tmp_path: Path) -> None:
    done = check_base(tmp_path, sglang="0.5.23", cuda="13.0", lock=OF_THIS_PYTHON)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("base: sglang==0.5.23 torch==2.14.1 nvidia-nccl-cu13==")


@pytest.mark.parametrize(
    ("sglang", "cuda", "lock", "reason"),
    [
        ("0.4.0", "13.0", OF_THIS_PYTHON, "the base has sglang 0.4.0, and the lock is for 0.5.23"),
        ("0.5.23", None, OF_THIS_PYTHON, "without CUDA"),
        ("0.5.23", "13.0", "cuda-2.7.txt", "cuda-2.7.txt"),
    ],
)
def test_another_base_is_refused(tmp_path: Path, sglang: str, cuda: str | None, lock: str, reason: str) -> None:
    """The build ends there, before it installs anything."""
    done = check_base(tmp_path, sglang=sglang, cuda=cuda, lock=lock)
    assert done.returncode == 1
    assert reason in done.stderr


def test_a_build_sees_only_what_is_listed() -> None:
    assert ignore_lines()[1] == "*"
    assert not is_sent(REPO / ".git")
    assert not is_sent(REPO / "runs")


@pytest.mark.parametrize(
    ("base", "pinned"),
    [
        ("python", False),
        ("python:latest", False),
        ("python:slim", False),
        ("python:3.11-slim", True),
        ("${BASE}", True),
    ],
)
def test_a_base_without_a_version_is_found(base: str, pinned: bool) -> None:
    assert unpinned(parse(f"ARG BASE=a:1\nFROM {base} AS only\n")) == ([] if pinned else [base])


def test_an_unpinned_installation_is_found() -> None:
    assert loose_installs(parse("FROM a:1 AS b\nRUN pip install \\\n    numpy\n")) == ["pip install numpy"]


@pytest.mark.parametrize("text", ["python -m x", '"python"', "[python]"])
def test_a_shell_form_is_found(text: str) -> None:
    assert not is_exec_form(text)
