"""Folders that hold a policy as an ordinary Hugging Face model: where they are, and what is in them besides weights.

<run_dir>/hf/                          the final policy
          exports/iteration-000020/    one per run.export_every iterations, the newest run.keep_exports

An export takes from the model's folder, and from the tokenizer's, what its readers need, and nothing else: a source may
also hold old weights in other formats (*.gguf, *.bin, original/), which are not this policy's.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from servicekit.errors import ConfigError
from tandem_files.atomic import LEFT, NotRemoved, no_check, remove_each, sync_file, write_bytes_atomic
from tandem_files.run_paths import FolderKind

FINAL = "hf"
FOLDER = "exports"
# Says that a folder is ours, and may be replaced by the next export.
MARK = "tandem_export.json"
# Template of a tokenizer; and in the run's folder the one that the run is trained with in its place.
CHAT_TEMPLATE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"
EXPORT = FolderKind(name="an exported model", mark=MARK, entry=re.compile(r"[\w.-]+"), folders=frozenset({_TEMPLATES}))
_ITERATION = re.compile(r"iteration-(\d{6,})")
# What a trainer that was killed while it wrote an export leaves, and what could not be removed.
_UNFINISHED = re.compile(rf"\.iteration-\d{{6,}}(\.(partial|old))?({LEFT})?")

_CONFIG, _GENERATION, _TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
_MODEL_FILES = (_CONFIG, _GENERATION, "LICENSE*", "NOTICE*")
_TOKENIZER_FILES = (
    "tokenizer.json",
    _TOKENIZER,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "*.tiktoken",
    "tokenization_*.py",
)
_TEMPLATE_FILES = (CHAT_TEMPLATE, "chat_template.json", f"{_TEMPLATES}/*.jinja")


def export_folder(run_dir: Path, iteration: int) -> Path:
    """Return the folder of the export after `iteration`; it is not created.

    >>> str(export_folder(Path("runs/a"), 20))
    'runs/a/exports/iteration-000020'
    """
    return run_dir / FOLDER / f"iteration-{iteration:06d}"


def prune_exports(run_dir: Path, newest: int, keep: int, before_write: Callable[[], None] = no_check) -> list[Path]:
    """Remove all but the `keep` newest exports, and what an unfinished one has left; call it while none is written.

    Exports after iteration `newest` are of iterations that a resumed run repeats: they neither count nor are removed.

    Returns: the exports that were removed. Takes: as remove_each.
    Raises: NotRemoved: some could not be; the others are gone. One of which a part is left is no export any more, and
        goes first the next time.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    unfinished = (path for path in (run_dir / FOLDER).iterdir() if _UNFINISHED.fullmatch(path.name))
    left = remove_each(unfinished, before_write)
    old = [path for number, path in list_exports(run_dir) if number <= newest][:-keep]
    for path in old:
        aside = path.with_name(f".{path.name}.old")
        with contextlib.suppress(OSError):  # else it is removed where it is
            inode = path.stat().st_ino
            before_write()
            if path.stat().st_ino == inode:  # else whoever has taken over has made it anew
                path.rename(aside)
        left += remove_each([path, *([aside] if aside.exists() else [])], before_write)
    if left:
        raise NotRemoved(left)
    return old


def list_exports(run_dir: Path) -> list[tuple[int, Path]]:
    """List the exports of a run as (iteration, folder), oldest first; folders with other content are not among them."""
    root = run_dir / FOLDER
    found = [(_ITERATION.fullmatch(path.name), path) for path in root.iterdir()] if root.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match is not None and EXPORT.is_in(path))


def note_template(run_dir: Path, template: str | None, before_write: Callable[[], None] = no_check) -> None:
    """Record the chat template that a run is trained with in place of the tokenizer's.

    Args:
        template: None: the run has none of its own.
        before_write: as in write_bytes_atomic.
    """
    path = run_dir / CHAT_TEMPLATE
    if template is None:
        remove_each([path], before_write)
    else:
        write_bytes_atomic(path, template.encode(), before_write)


def noted_template(run_dir: Path | None) -> str | None:
    """Return what `note_template` has recorded. Raises: OSError."""
    path = None if run_dir is None else run_dir / CHAT_TEMPLATE
    return path.read_bytes().decode() if path is not None and path.is_file() else None


def copy_companions(
    model: Path, tokenizer: Path | None, out: Path, dtype: str, about: Mapping[str, Any], template: str | None = None
) -> None:
    """Copy into `out` what belongs to a model besides its weights, and mark `out` as an export.

    Args:
        model: folder with config.json.
        tokenizer: folder of the tokenizer and its chat template; None: the model's.
        dtype: of the weights, for config.json.
        about: JSON values for the mark, which is published with the folder: no paths.
        template: the chat template, in place of all of the tokenizer's; None: the tokenizer's.
    Raises: OSError; ConfigError: `tokenizer` has no tokenizer.json, config.json is not JSON.
    """
    if tokenizer is not None and not (tokenizer / "tokenizer.json").is_file():
        raise ConfigError(f"model.tokenizer_path {tokenizer} has no tokenizer.json")
    wanted = _TOKENIZER_FILES if template is not None else (*_TOKENIZER_FILES, *_TEMPLATE_FILES)
    sources = [*_matching(model, _MODEL_FILES), *_matching(tokenizer or model, wanted)]
    if tokenizer is not None and _ends_as(model, tokenizer):
        sources.append((tokenizer, tokenizer / _GENERATION))
    for folder, path in sources:
        target = out / path.relative_to(folder)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
    if template is not None:
        _replace_template(out, template)
    config = _read_json(model / _CONFIG)
    # Readers of before transformers 5, vLLM among them, know the second name only, and take float32 without it.
    config["dtype"] = config["torch_dtype"] = dtype
    (out / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / MARK).write_text(json.dumps({"template": model.absolute().name, **about}) + "\n", encoding="utf-8")


def _replace_template(out: Path, template: str) -> None:
    """Write the only chat template: transformers prefers its file, other readers the entry in the configuration."""
    (out / CHAT_TEMPLATE).write_bytes(template.encode())
    path = out / _TOKENIZER
    if path.is_file():
        settings = _read_json(path)
        if settings.pop("chat_template", None) is not None:
            path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
            sync_file(path)
