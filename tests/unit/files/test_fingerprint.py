import json
from pathlib import Path

import pytest

from tandem_files.model.fingerprint import model_fingerprint, tensor_shapes
from tests.kit.folders import write_safetensors, write_small_model, zeros


def test_values_and_formatting_do_not_matter(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    before = model_fingerprint(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({"transformers_version": "9", **config}, indent=4))
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    assert model_fingerprint(model) == before


def test_configuration_names_and_shapes_matter(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    prints = {model_fingerprint(model)}
    write_safetensors(model / "model.safetensors", zeros({"model.embed_tokens.weight": [8, 32]}))
    prints.add(model_fingerprint(model))
    write_safetensors(model / "model.safetensors", zeros({"model.other.weight": [8, 32]}))
    prints.add(model_fingerprint(model))
    (model / "config.json").write_text('{"hidden_size": 9}')
    prints.add(model_fingerprint(model))
    assert len(prints) == 4


def test_shards_are_read_together(tmp_path: Path) -> None:
    model = write_small_model(tmp_path / "model")
    write_safetensors(model / "model-2.safetensors", zeros({"lm_head.weight": [3]}))
    assert tensor_shapes(model) == {"model.embed_tokens.weight": [32, 8], "lm_head.weight": [3]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is not a safetensors file \(0 bytes"),
        (b"\xff" * 8, "no valid header length"),
        (b"\x50" + bytes(7) + b"{}", "is truncated: the header alone needs 88 bytes, the file has 10"),
        (b"\x02" + bytes(7) + b"{x", "its header is not JSON"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    model = write_small_model(tmp_path / "model")
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        model_fingerprint(model)
    assert "model.safetensors" in str(caught.value)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a JSON list"):
        model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors"):
        model_fingerprint(tmp_path)
