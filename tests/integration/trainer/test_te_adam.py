"""TransformerEngine's own FusedAdam, its Python from its wheel, through a resume; and what stands for it elsewhere.

Only its CUDA kernel is replaced, by the same arithmetic. The wheel comes from the package index, which is why the test
is slow: it cannot be installed beside megatron-core, which would then believe that the whole of it works.
"""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fakes.fake_te_adam import multi_tensor_adam
from tests.unit.trainer.adam_runs import SETTINGS, Make, Training, assert_same, te_adam

pytestmark = [pytest.mark.integration, pytest.mark.slow]
VERSION = "2.20.2"
PACKAGE = "transformer_engine.pytorch"
KERNELS = ("", "_param_remainder", "_fp8", "_capturable", "_capturable_master")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TransformerEngine's Python files."""
    folder = tmp_path_factory.mktemp("te")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run([*pip, f"transformer-engine=={VERSION}"], capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"the package index does not give transformer-engine {VERSION}: {done.stderr.strip()[-200:]}")
    (archive,) = folder.glob("*.whl")
    zipfile.ZipFile(archive).extractall(folder)
    return folder


@pytest.fixture
def real_te_adam(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes the real FusedAdam; what it imports and cannot have on this machine is empty."""

    def stand_in(name: str, **content: Any) -> None:
        module = ModuleType(name)
        module.__path__ = []
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)

    nothing = type("Nothing", (), {})
    stand_in("transformer_engine_torch", **{f"multi_tensor_adam{kind}": multi_tensor_adam for kind in KERNELS})
    for name in ("transformer_engine", PACKAGE, f"{PACKAGE}.tensor", f"{PACKAGE}.optimizers"):
        stand_in(name)
    stand_in(f"{PACKAGE}.tensor.float8_tensor", Float8Tensor=nothing, Float8Quantizer=nothing)
    stand_in(f"{PACKAGE}.quantized_tensor", QuantizedTensor=nothing)
    stand_in(f"{PACKAGE}.constants", DType=type("DType", (), {"kFloat32": 0, "kFloat8E4M3": 1}))
    for name in ("multi_tensor_apply", "fused_adam"):
        file = wheel / "transformer_engine" / "pytorch" / "optimizers" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(f"{PACKAGE}.optimizers.{name}", file)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        exec(compile(file.read_text().replace('device="cuda"', 'device="cpu"'), str(file), "exec"), module.__dict__)
    fused = sys.modules[f"{PACKAGE}.optimizers.fused_adam"].FusedAdam
    return lambda groups: fused(groups, adam_w_mode=True, **SETTINGS)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_a_resume_and_an_undone_step_leave_no_trace(real_te_adam: Make, bf16: bool) -> None:
    straight = Training(make=real_te_adam, bf16=bf16)
    straight.steps(0, 1000)
    resumed = straight.resumed(real_te_adam)
    resumed.adam.remember()
    resumed.steps(2000, 2002)
    resumed.adam.restore()
    straight.steps(1000, 1100)
    resumed.steps(1000, 1100)
    assert_same(straight, resumed)


def test_the_fake_is_faithful(real_te_adam: Make) -> None:
    real, fake = Training(make=real_te_adam), Training(make=te_adam)
    real.steps(0, 20)
    fake.steps(0, 20)
    assert_same(real, fake)
    resumed = fake.resumed(real_te_adam)
    real.steps(20, 30)
    resumed.steps(20, 30)
    assert_same(real, resumed)
    assert [set(group) - {"params"} >= {"step"} for group in fake.optimizer.param_groups] == [True, True, True]
