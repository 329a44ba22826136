"""Which model a checkpoint belongs to: a digest of its config.json and of its tensors' names and shapes. Pure.

Values of weights do not enter: a checkpoint of a run and the model that the run started from have the same fingerprint.
"""

import hashlib
import json
import struct
from pathlib import Path

# Safetensors files begin with the header's length (little-endian, 8 bytes); the format bounds the header to 100 MB.
_MAX_HEADER_BYTES = 100_000_000


def model_fingerprint(folder: Path) -> str:
    """Digest of a Hugging Face model folder.

    Returns: sha256 in hex over config.json's content (independent of its formatting) and every tensor's name and shape.
    Raises:
        FileNotFoundError: no config.json or no *.safetensors in the folder.
        ValueError: a file is not valid JSON or not a safetensors file; the message names it.
    """
    digest = hashlib.sha256()
    digest.update(json.dumps(_read_config(folder / "config.json"), sort_keys=True).encode())
    for name, shape in sorted(tensor_shapes(folder).items()):
        digest.update(f"{name}:{shape}\n".encode())
    return digest.hexdigest()


def tensor_shapes(folder: Path) -> dict[str, list[int]]:
    """Name to shape of every tensor in the folder's *.safetensors files, from their headers alone."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors file in {folder}")
    return {
        name: entry["shape"] for file in files for name, entry in _read_header(file).items() if name != "__metadata__"
    }


def _read_config(path: Path) -> dict[str, object]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds a JSON {type(config).__name__}, not an object")
    # transformers rewrites these on every save; they say who wrote the file, not what the model is.
    return {key: value for key, value in config.items() if key not in ("transformers_version", "_name_or_path")}


def _read_header(path: Path) -> dict[str, dict[str, list[int]]]:
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header claims {length} bytes")
        raw = file.read(length)
    if len(raw) < length:
        raise ValueError(f"{path} is truncated: its header has {len(raw)} of {length} bytes")
    try:
        header: dict[str, dict[str, list[int]]] = json.loads(raw)
    except ValueError as error:
        raise ValueError(f"{path} is not a safetensors file: its header is not JSON ({error})") from error
    return header
