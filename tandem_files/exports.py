"""Folders that hold a policy as an ordinary Hugging Face model: where they are, and what is in them beside weights.

<run_dir>/hf/                          the final policy
          exports/iteration-000020/    one per run.export_every iterations, the newest run.keep_exports

An export takes from the model's folder, and from the tokenizer's, what its readers need, and nothing else: a source may
also hold old weights in other formats (*.gguf, *.bin, original/), which are not this policy's.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from tandem_files.run_paths import FolderKind

FINAL = "hf"
FOLDER = "exports"
# Says that a folder is ours, and may be replaced by the next export.
MARK = "tandem_export.json"
_TEMPLATES = "additional_chat_templates"
EXPORT = FolderKind(name="an exported model", mark=MARK, entry=re.compile(r"[\w.-]+"), folders=frozenset({_TEMPLATES}))
_ITERATION = re.compile(r"iteration-(\d{6,})")
# What a trainer that was killed while it wrote an export leaves.
_UNFINISHED = re.compile(r"\.iteration-\d{6,}\.(partial|old)")

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_MODEL_FILES = (_CONFIG, _GENERATION, "LICENSE*", "NOTICE*")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "*.tiktoken",
    "tokenization_*.py",
    "chat_template.jinja",
    "chat_template.json",
    f"{_TEMPLATES}/*.jinja",
)


def export_folder(run_dir: Path, iteration: int) -> Path:
    """Return the folder of the export after `iteration`; it is not created.

    >>> str(export_folder(Path("runs/a"), 20))
    'runs/a/exports/iteration-000020'
    """
    return run_dir / FOLDER / f"iteration-{iteration:06d}"


def prune_exports(run_dir: Path, newest: int, keep: int) -> list[Path]:
    """Remove all but the `keep` newest exports, and what an unfinished one has left; call it while none is written.

    Exports after iteration `newest` are of iterations that a resumed run repeats: they neither count nor are removed.

    Returns: the exports that were removed.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    for path in (run_dir / FOLDER).iterdir():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path)
    removed = [path for number, path in list_exports(run_dir) if number <= newest][:-keep]
    for path in removed:
        shutil.rmtree(path)
    return removed


def list_exports(run_dir: Path) -> list[tuple[int, Path]]:
    """List the exports of a run as (iteration, folder), oldest first; folders with other content are not among them."""
    root = run_dir / FOLDER
    found = [(_ITERATION.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match is not None and EXPORT.is_in(path))


def copy_companions(model: Path, tokenizer: Path | None, out: Path, dtype: str, about: Mapping[str, Any]) -> None:
    """Copy into `out` what belongs to a model beside its weights, and mark `out` as an export.

    Args:
        model: folder with config.json.
        tokenizer: folder of the tokenizer and its chat template; None: the model's.
        dtype: of the weights, for config.json.
        about: JSON values for the mark.
    Raises: OSError; ConfigError: `tokenizer` has no tokenizer.json, config.json is not JSON.
    """
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError(f"model.tokenizer_path {tokenizer} has no tokenizer.json")
    sources = [*_matching(model, _MODEL_FILES), *_matching(tokenizer or model, _TOKENIZER_FILES)]
    if tokenizer is not None and _ends_as(model, tokenizer):
        sources.append((tokenizer, tokenizer / _GENERATION))
    for folder, path in sources:
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    config = _read_json(model / _CONFIG)
    config.pop("torch_dtype", None)  # of older transformers
    config["dtype"] = dtype
    (out / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / MARK).write_text(json.dumps({"template": str(model), **about}) + "\n", encoding="utf-8")


def _matching(folder: Path, patterns: tuple[str, ...]) -> Iterator[tuple[Path, Path]]:
    """Yield (folder, file) for the files of a folder that match; links to files, as in Hugging Face's cache, count."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if path.is_file() and EXPORT.entry.fullmatch(path.name):
                yield folder, path


def _ends_as(model: Path, tokenizer: Path) -> bool:
    """Whether the model has no generation_config.json, and the tokenizer's ends completions wherever the run does."""
    if (model / _GENERATION).exists() or not (tokenizer / _GENERATION).is_file():
        return False
    return _stop_ids(model / _CONFIG) <= _stop_ids(tokenizer / _GENERATION)


def _stop_ids(path: Path) -> set[int]:
    ids = _read_json(path).get("eos_token_id")
    return {ids} if isinstance(ids, int) else set(ids or ())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a JSON {type(content).__name__}, not an object")
    return content


def settle(folder: Path) -> None:
    """Give all files the mode of the mark, which follows the umask, and force them to disk."""
    mode = (folder / MARK).stat().st_mode & 0o777  # safetensors makes its files readable for their owner only
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
            with path.open("rb") as file:
                os.fsync(file.fileno())
