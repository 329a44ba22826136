"""A reference policy that cannot take the policy's place is named before anything is started."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from launcher.check.memory_budget import trainer_memory
from launcher.check.preflight import preflight
from tandem_config.loading import draft_config, load_config
from tandem_config.problems import ConfigProblem
from tests.kit.folders import CONFIG, tensors, write_config, write_model
from weightsync.model.spec import ModelSpec


def check(file: Path, *overrides: str) -> list[ConfigProblem]:
    found = preflight(draft_config(file, list(overrides)), redis_url=None)
    return [problem for problem in found if "cores" not in problem.message]


def with_nan(folder: Path) -> None:
    write_model(folder)
    (path,) = folder.glob("*.safetensors")
    values = tensors(CONFIG)
    values["model.norm.weight"][0] = np.nan
    save_file(values, path)


WRONG: list[tuple[str, Callable[[Path], object], str]] = [
    ("missing", lambda folder: None, "no such folder"),
    ("another size", lambda folder: write_model(folder, intermediate_size=24), "ffn_size: 24, not 12"),
    ("another rotation", lambda folder: write_model(folder, rope_theta=5e5), "rope_theta: 500000.0, not 10000.0"),
    ("not supported", lambda folder: write_model(folder, model_type="gpt2"), "'gpt2' is not supported"),
    ("NaN", with_nan, "holds NaN or infinity, in model.norm.weight"),
]


@pytest.mark.parametrize(("make", "message"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_reference_that_cannot_be_computed_is_named(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    file = write_config(tmp_path)
    make(tmp_path / "reference")
    (problem,) = check(file, "grpo.kl_coefficient=0.1", f"grpo.reference_path={tmp_path / 'reference'}")
    assert (problem.key, problem.value) == ("grpo.reference_path", str(tmp_path / "reference"))
    assert message in problem.message


def test_a_reference_of_the_same_sizes_is_good(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    # longer sequences with the same frequencies
    write_model(tmp_path / "reference", max_position_embeddings=4096)
    assert check(file, "grpo.kl_coefficient=0.1", f"grpo.reference_path={tmp_path / 'reference'}") == []
    assert check(file, "grpo.kl_coefficient=0.1") == []


def test_memory_counts_the_reference_s_weights_while_they_are_on_the_gpu(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    spec = ModelSpec.from_folder(tmp_path / "model")
    (without,), (with_kl,) = (
        trainer_memory(load_config(file, [f"grpo.kl_coefficient={beta}"]), spec) for beta in (0.0, 0.1)
    )
    assert without.reference == 0
    # of float32: parameters, gradients and two moments are resident
    assert with_kl.reference == with_kl.resident / 4
    assert with_kl.resident == without.resident
