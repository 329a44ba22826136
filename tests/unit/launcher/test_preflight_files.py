"""What is in a model's files is looked at before a run: pointers of Git LFS, the Hub's cache, values, variables."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launcher.check.model import weights as weights_check
from launcher.check.preflight import preflight
from tandem_config.loading import draft_config
from tandem_config.problems import ConfigProblem
from tests.kit.folders import write_config

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
WEIGHTS = "model.safetensors"


def only(file: Path, *overrides: str) -> ConfigProblem:
    found = preflight(draft_config(file, list(overrides)), redis_url=None)
    (problem,) = [problem for problem in found if "cores" not in problem.message]
    return problem


def test_pointers_of_git_lfs_are_recognised(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    (tmp_path / "model" / WEIGHTS).write_text(POINTER)
    problem = only(file)
    assert (problem.key, problem.message) == (
        "model.path",
        f"{WEIGHTS}: a pointer of Git LFS each, not the file itself",
    )
    assert f"git -C {tmp_path / 'model'} lfs pull" in problem.suggestion


def test_an_entry_of_the_hubs_cache_names_its_snapshot(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    (tmp_path / "model").rename(snapshot)
    problem = only(file, f"model.path={snapshot.parent.parent}")
    assert "Hugging Face cache" in problem.message
    assert problem.suggestion == f"give {snapshot}"


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_found(tmp_path: Path, dtype: type, value: float) -> None:
    file, weights = write_config(tmp_path), tmp_path / "model" / WEIGHTS
    tensors: dict[str, np.ndarray] = {name: tensor.astype(dtype) for name, tensor in load_file(weights).items()}
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name].flat[-1] = value
    save_file(tensors, weights)
    assert only(file).message == f"holds NaN or infinity, in {name}"


def test_a_large_tensor_is_looked_at_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_check, "_BLOCK_BYTES", 16)
    file, weights = write_config(tmp_path), tmp_path / "model" / WEIGHTS
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"].flat[1:4] = np.nan
    save_file(tensors, weights)
    assert "model.embed_tokens.weight" in only(file).message


def test_variables_in_paths_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", str(tmp_path))
    options = ["model.path=$WHERE/model", "data.train=$WHERE/t.jsonl", "model.tokenizer_path=${NOSUCH}/x"]
    config = draft_config(write_config(tmp_path), options).config
    assert config is not None
    assert config.model.path == tmp_path / "model"
    assert [source.path for source in config.data.train] == [tmp_path / "t.jsonl"]
    assert str(config.model.tokenizer_path).endswith("/${NOSUCH}/x")
