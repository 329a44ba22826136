"""The images for GPUs, built on a stand-in of their base; and where compiled kernels lie, on a real Docker engine.

The stand-in has the names and versions of SGLang's image and none of its contents: what is shown is that both targets
build on one base, with what they add, and that another base is refused.
"""

import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.repository import REPO
from tests.images.compose import service
from tests.images.conftest import BASE, BUILD_S
from tests.images.engine import Engine, Unavailable, checked, provide_base
from tests.images.pip_settings import pip_settings
from tools.check_venv import read_pins

STAND_IN = "tandem-test/gpu-base:{}"
LOCK = read_pins(REPO / "requirements" / "cuda-3.11.txt")
RUN_S = 120.0
# Of this name no image is in use.
VERSION = "0.0.0-stand-in"
LOAD = """
import ctypes, glob, shutil
shared = glob.glob("/usr/l*/**/lib-dynload/_bz2*.so", recursive=True)[0]
ctypes.CDLL(shutil.copy(shared, "/tmp/kernel.so"))
"""
# SGLang's modules, each with any function: it "compiles" a kernel where its cache is.
SGLANG = """
import os, sys, types
from importlib.machinery import ModuleSpec
from pathlib import Path
__path__ = []
class Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.build
    def build(self, *given):
        import torch
        major, minor = torch.cuda.get_device_capability()
        (Path(os.environ["SGLANG_JIT_CACHE_DIR"]) / f"sm{major}{minor}a" / "k" / "build-1" / "deps-1").mkdir(
            parents=True, exist_ok=True)
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return ModuleSpec(name, cls, is_package=True) if name.startswith("sglang.") else None
    create_module = staticmethod(lambda spec: Module(spec.name))
    exec_module = staticmethod(lambda module: None)
sys.meta_path.insert(0, Finder)
"""
TORCH = """
from torch import version
bfloat16 = int64 = None
class cuda:
    pass
"""
KERNELS = """
from pathlib import Path
from servicekit.cuda import compiled_environment
print(compiled_environment(Path("/tmp/jit")), *sorted(path.name for path in Path("/tmp/jit").iterdir()))
"""
ASK = """
from importlib.metadata import version
print(*(version(name) for name in ("torch", "nvidia-nccl-cu13", "sglang", "grpcio")))
"""

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(2 * BUILD_S)]


def dockerfile(sglang: str) -> str:
    """A base with packages of those names: torch as a CUDA build, SGLang of a version."""
    lines = [f"FROM {BASE}"]
    for name, version in (("sglang", sglang), ("torch", LOCK["torch"]), ("nvidia-nccl-cu13", LOCK["nvidia-nccl-cu13"])):
        info = f"$where/{name.replace('-', '_')}-{version}.dist-info"
        lines.append(
            "RUN where=$(python3 -c 'import site; print(site.getsitepackages()[0])') && "
            f"mkdir -p {info} && printf 'Name: {name}\\nVersion: {version}\\n' > {info}/METADATA"
        )
    texts = {"torch/__init__.py": TORCH, "torch/version.py": "cuda = '13.0'\n", "sglang/__init__.py": SGLANG}
    for name, text in texts.items():
        lines.append(
            f"RUN where=$(python3 -c 'import site; print(site.getsitepackages()[0])')/{name} && "
            f"mkdir -p $(dirname $where) && echo {b64encode(text.encode()).decode()} | base64 -d > $where"
        )
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def debian(docker: Engine) -> Engine:
    """An engine that has the Debian-like base with Python."""
    try:
        provide_base(docker, BASE)
    except Unavailable as why:
        pytest.skip(f"NO BASE IMAGE: images are not tested: {why}")
    return docker


def build(engine: Engine, folder: Path, sglang: str) -> None:
    """Both images on a stand-in with that SGLang. Raises: AssertionError: a build fails; with what it said."""
    stand_in = STAND_IN.format(sglang)
    (folder / "Dockerfile").write_text(dockerfile(sglang), encoding="utf-8")
    engine.run("build", "--tag", stand_in, str(folder), timeout_s=BUILD_S)
    with pip_settings(folder) as settings:
        environ = {**engine.environ, **settings, "BUILD_NETWORK": "host"}
        script = ["deploy/images/build.sh", "trainer", "rollout"]
        checked(script, {**environ, "VARIANT": "gpu", "TANDEM_VERSION": VERSION, "TANDEM_GPU_BASE": stand_in}, BUILD_S)


@pytest.fixture(scope="module")
def images(debian: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Names of the images for GPUs by kind; they go away again."""
    build(debian, tmp_path_factory.mktemp("base"), LOCK["sglang"])
    names = {kind: f"registry.invalid/tandem/{kind}:{VERSION}" for kind in ("trainer", "rollout")}
    yield names
    debian.run("image", "rm", "--force", *names.values())


def test_both_have_the_torch_and_nccl_of_the_base(debian: Engine, images: dict[str, str]) -> None:
    said = {debian.run("run", "--rm", "--entrypoint", "python", image, "-c", ASK) for image in images.values()}
    assert said == {f"{LOCK['torch']} {LOCK['nvidia-nccl-cu13']} {LOCK['sglang']} {LOCK['grpcio']}\n"}


def test_an_engine_finds_the_kernels_of_both_generations(debian: Engine, images: dict[str, str]) -> None:
    limits = ["--read-only", "--tmpfs", "/tmp", "--entrypoint", "python"]
    said = debian.run("run", "--rm", *limits, images["rollout"], "-c", KERNELS)
    assert said == "{'SGLANG_JIT_CACHE_DIR': '/tmp/jit'} sm100a sm90a\n"


def test_another_sglang_is_refused(debian: Engine, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"the base has sglang 0.4.0, and the lock is for {LOCK['sglang']}"):
        build(debian, tmp_path, "0.4.0")


@pytest.mark.parametrize(("name", "loads"), [("", False), ("rollout-0", True), ("rollout-0-gpu", True)])
def test_a_shared_object_in_tmp_loads_where_kernels_are_compiled(debian: Engine, name: str, loads: bool) -> None:
    """As compose mounts it. The first case shows that Docker's own default refuses, and so that this can fail."""
    [tmpfs] = service(name)["tmpfs"] if name else ["/tmp"]
    done = subprocess.run(
        [debian.docker, "run", "--rm", "--read-only", "--tmpfs", tmpfs, "--user", "10001", BASE, "python3", "-c", LOAD],
        env=debian.environ,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert (done.returncode == 0) is loads, done.stderr
    assert loads or "failed to map segment" in done.stderr
