"""Fingerprints a model by its config.json and its tensors' names and shapes, to tell whether a checkpoint fits it.

The values of the weights do not count: the model that a run started from and the run's checkpoints have the same
fingerprint.
"""

import hashlib
import json
from pathlib import Path

from tandem_files.model.safetensors_header import DamagedFile, read_header


def model_fingerprint(folder: Path) -> str:
    """Compute the fingerprint of a Hugging Face model folder.

    Returns: sha256 in hex over config.json's content (independent of its formatting) and every tensor's name and shape.
    Raises:
        FileNotFoundError: no config.json or no *.safetensors in the folder.
        ValueError: a file is not valid JSON or not a complete safetensors file; the message names it.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(_read_config(folder / "config.json"), sort_keys=True).encode())
    for name, shape in sorted(tensor_shapes(folder).items()):
        digest.update(f"{name}:{shape}\n".encode())
    return digest.hexdigest()


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Read the shape of every tensor, by name, from the headers of the folder's *.safetensors files."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors file in {folder}")
    shapes = {}
    for file in files:
        try:
            shapes.update({name: list(tensor.shape) for name, tensor in read_header(file).items()})
        except DamagedFile as error:
            raise DamagedFile(f"{file} {error}") from None
    return shapes


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a JSON {type(config).__name__}, not an object")
    # transformers rewrites these on every save; they describe the writer of the file, not the model.
    return {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}
