"""The distributed optimizer in a real engine of one rank, whose parts are whole but flat: numbers and checkpoints."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from servicekit.errors import NotFinite
from tests.integration.trainer.reference import NUM_UPDATES, make_samples
from trainer_service.checkpoints.parts import FlatPart, values_of
from trainer_service.megatron_engine.engine import MegatronEngine

SAMPLES = make_samples(16)
# The norm of gradients is summed in another order, of flat parts; with bfloat16 a last bit of a weight may follow.
NEAR = {"float32": 1e-6, "bfloat16": 0.01}
ZERO = {"distributed_optimizer": True}
OVERLAP = ZERO | {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 4000}
Make = Callable[..., MegatronEngine]
# The first engine imports transformers and writes models: a minute on a busy machine.
_DTYPES = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
pytestmark = [pytest.mark.timeout(240), pytest.mark.parametrize("dtype", _DTYPES)]


def state_of(engine: MegatronEngine) -> dict[str, torch.Tensor]:
    """Copies of weights, masters, moments and step counts, flat."""
    return {name: values_of(held).flatten().clone() for name, held in engine._adam.tensors().items()}


def different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]


def trained(engine: MegatronEngine, steps: int = 2) -> list[dict[str, float]]:
    return [dict(engine.train_step(SAMPLES, NUM_UPDATES).metrics) for _ in range(steps)]


def assert_near(got: list[dict[str, float]], expected: list[dict[str, float]], dtype: str) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=NEAR[dtype], abs=NEAR[dtype])


@pytest.mark.parametrize("options", [ZERO, OVERLAP], ids=["zero", "overlap"])
def test_one_rank_trains_as_without_it(make_engine: Make, dtype: str, options: dict[str, Any]) -> None:
    plain = make_engine(dtype)
    metrics = trained(plain)
    expected = state_of(plain)
    divided = make_engine(dtype, trainer=options)
    assert_near(trained(divided), metrics, dtype)
    for name, values in state_of(divided).items():
        torch.testing.assert_close(
            values, expected[name], rtol=0, atol=NEAR[dtype], msg=lambda text, at=name: f"{at} {text}"
        )
    kinds = {name.partition("/")[0] for name, held in divided._adam.tensors().items() if isinstance(held, FlatPart)}
    assert kinds == {"exp_avg", "exp_avg_sq"} | ({"main"} if dtype == "bfloat16" else set())


@pytest.mark.parametrize(("writer", "reader"), [({}, ZERO), (ZERO, {}), (OVERLAP, OVERLAP)])
def test_checkpoints_pass_between_both(
    make_engine: Make, tmp_path: Path, dtype: str, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    written = make_engine(dtype, trainer=writer)
    trained(written, 1)
    written.save(tmp_path / "checkpoint")
    written.begin_save(tmp_path / "beside")
    assert written.saving is not None
    assert written.saving.done.result(60) > 0
    now, beside = (load_file(tmp_path / name / "shard-tp00-pp00.safetensors") for name in ("checkpoint", "beside"))
    assert different(now, beside) == []
    state, expected = state_of(written), trained(written)
    read = make_engine(dtype, trainer=reader)
    trained(read, 1)
    read.check_checkpoint(tmp_path / "checkpoint")
    read.load_checkpoint(tmp_path / "checkpoint")
    assert different(state_of(read), state) == []
    assert_near(trained(read), expected, dtype)


def test_a_step_that_is_undone_leaves_no_trace(make_engine: Make, dtype: str) -> None:
    engine = make_engine(dtype, trainer=OVERLAP)
    trained(engine, 1)
    before = state_of(engine)
    advantages = SAMPLES.advantages.copy()
    advantages[-2] = 3e38
    with pytest.raises(NotFinite, match="update 1 is not finite"):
        engine.train_step(replace(SAMPLES, advantages=advantages), NUM_UPDATES)
    assert different(state_of(engine), before) == []


def test_a_checkpoint_of_weights_alone_starts_adamw_anew(make_engine: Make, tmp_path: Path, dtype: str) -> None:
    engine = make_engine(dtype, optimizer=False, trainer=ZERO)
    trained(engine, 1)
    weights = {name: tensor.clone() for name, tensor in engine.tensors().items()}
    engine.save(tmp_path / "checkpoint")
    trained(engine, 1)
    engine.load_checkpoint(tmp_path / "checkpoint")
    assert different(dict(engine.tensors()), weights) == []
    state = state_of(engine)
    assert not any(tensor.any() for name, tensor in state.items() if name.startswith(("exp_avg", "step")))
    for name in weights if dtype == "bfloat16" else ():
        assert torch.equal(state[f"main/{name}"], weights[name].float().flatten())
