"""A configuration that grows by suggestions: each has its reason, and what the user gave stays as it is."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from tandem_config import paths
from tandem_config.schema import LISTED, RunConfig

# Written even with their default: what a user changes first.
_CHANGED_FIRST = frozenset(
    {
        "model.dtype",
        "data.prompt_key",
        "data.answer_key",
        "data.max_prompt_tokens",
        "run.iterations",
        "grpo.prompts_per_iteration",
        "grpo.group_size",
        "grpo.max_new_tokens",
        "trainer.tensor_parallel",
        "trainer.learning_rate",
        "rollout.replicas",
        "schedule.kind",
        "sync.install",  # whose default is another one with async
    }
)


class Choices:
    """The configuration so far, and why each of its keys has its value.

    Args:
        config: what the user gave, with defaults.
        given: dotted keys of it, and lists (`reward`) of which any key was given.

    Attributes:
        config: with all suggestions so far.
        reasons: why a key has its value, by dotted key or list; "" for what the user gave.
        hints: lines of comments about a section that the run could have.
    """

    def __init__(self, config: RunConfig, given: Collection[str]) -> None:
        self.config = config
        self.given = frozenset(given)
        self.reasons: dict[str, str] = dict.fromkeys(given, "")
        self.hints: list[str] = []

    def suggest(self, key: str, value: Any, why: str) -> None:
        """Set a key, or a whole list, unless the user gave it."""
        if key in self.given:
            return
        self.reasons[key] = why
        section, _, field = key.partition(".")
        content = getattr(self.config, section).model_copy(update={field: value}) if field else value
        self.config = self.config.model_copy(update={section: content})

    def remark(self, key: str, text: str) -> None:
        """Put a text before the reason of a key."""
        self.reasons[key] = "; ".join(part for part in (text, self.reasons.get(key)) if part)

    def written(self, folder: Path) -> dict[str, Any]:
        """Return the keys to write by section, as plain data; paths in `folder` or below are relative to it."""
        found: dict[str, Any] = {}
        for section in RunConfig.model_fields:
            content = getattr(self.config, section)
            if section in LISTED and section in self.reasons:
                entries = [_plain(entry.model_dump(exclude_unset=True), folder) for entry in content]
                found[section] = entries[0] if len(entries) == 1 else entries
            elif section not in LISTED and content is not None:
                values = content.model_dump()
                keys = {name: f"{section}.{name}" for name in values if self._is_written(f"{section}.{name}")}
                if keys:
                    found[section] = {
                        name: _plain(paths.written(key, values[name]), folder) for name, key in keys.items()
                    }
        return found

    def _is_written(self, key: str) -> bool:
        section, _, field = key.partition(".")
        content = getattr(self.config, section)
        is_default = getattr(content, field) == type(content).model_fields[field].default
        return key in self.reasons and (key in self.given or key in _CHANGED_FIRST or not is_default)


def flow(value: Any) -> str:
    """Write a value as YAML in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, sort_keys=False, width=2**20)
    return text.removesuffix("...\n").strip()


def _plain(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner, folder) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, folder) for inner in value]
    below = f"{folder}/"
    return str(value).removeprefix(below) if isinstance(value, Path | str) else value
