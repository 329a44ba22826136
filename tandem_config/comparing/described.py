"""A configuration as short texts, by dotted key, that other processes and later releases can compare.

Paths count by their last part, because each machine has its own mounts. Mappings and long values are digests, so that
what is stored and shown stays short and has no secrets.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from tandem_config import keys
from tandem_config.paths import is_jinja_file
from tandem_config.schema import LISTED, RunConfig, Section
from tandem_config.sections.reward import CodeReference, split_reference

# By dotted key, of an entry of a list by `section[0].field`.
Texts = Mapping[str, str]

_SHOWN_CHARS, _DIGEST_CHARS = 80, 12
# A checkpoint's last part does not name it.
_WHOLE_PATHS = frozenset({"trainer.initial_checkpoint"})


def described(config: RunConfig) -> dict[str, str]:
    """Return all settings as texts.

    >>> from tandem_config.loading import load_config
    >>> texts = described(load_config(None, ["model.path=/models/qwen", "data.train=/data/sums.jsonl"]))
    >>> texts["model.path"], texts["run.seed"], texts["reward[0].kind"]
    ('"qwen"', '0', '"exact_match"')
    """
    return {key: _text(key, value) for key, value in _values(config.model_dump(mode="json"))}


def base_key(key: str) -> str:
    """Return the key of the schema.

    >>> base_key("reward[1].weight"), base_key("run.seed")
    ('reward.weight', 'run.seed')
    """
    return ".".join(keys.split(key))


def is_default(config: RunConfig, key: str) -> bool:
    """Whether a setting has its default value, as a release has that does not know it."""
    section, name = keys.split(key)
    content = getattr(config, section)
    entry: Section = content[int(key.partition("[")[2].partition("]")[0])] if section in LISTED else content
    field = type(entry).model_fields[name]
    return not field.is_required() and getattr(entry, name) == field.get_default(call_default_factory=True)


def shown(key: str, texts: Texts) -> str:
    """Return a key as a user writes it: the entry of a list that has one only goes without its place."""
    section = key.partition("[")[0]
    return base_key(key) if f"{section}[1].kind" not in texts else key


def _values(dumped: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key with its value as JSON."""
    for section, content in dumped.items():
        entries = enumerate(content) if section in LISTED else [("", content or {})]
        for place, entry in entries:
            for name, value in entry.items():
                yield (f"{section}[{place}].{name}" if section in LISTED else f"{section}.{name}"), value


def _text(key: str, value: Any) -> str:
    plain = _portable(base_key(key), value)
    text = json.dumps(plain, sort_keys=True, ensure_ascii=False)
    has_login = isinstance(plain, str) and "://" in plain and "@" in plain
    if (isinstance(plain, dict) and plain) or len(text) > _SHOWN_CHARS or has_login:
        return f"(digest {hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]})"
    return text


def _portable(key: str, value: Any) -> Any:
    """Return a value with its paths by their last part."""
    if key in _WHOLE_PATHS or value is None:
        return value
    if key in ("data.train", "data.heldout"):
        return _sources(value)
    if key == "evaluation.sets":
        return [entry | {"data": _sources(entry["data"])} for entry in value]
    if key == "data.chat_template":
        return Path(value).name if is_jinja_file(value) else value
    if key == "environment.tools":
        return [_portable("reward.function", reference) for reference in value]
    if keys.takes(key, CodeReference):
        place, function = split_reference(value)
        return f"{PurePath(place).name}:{function}" if place.endswith(".py") else value
    return PurePath(value).name if keys.takes(key, Path) and isinstance(value, str) else value


def _sources(sources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [source | {"path": PurePath(source["path"]).name} for source in sources]
