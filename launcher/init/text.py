"""Writes the chosen configuration as YAML, each key below its reason."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from launcher.init.choices import Choices, flow
from tandem_config.schema import LISTED, RunConfig

_WIDTH = 110
_HEADER = """\
# Written by `tandem init`. Change what you like: every other key has its default, and docs/configuration.md describes
# all of them. Relative paths are relative to this file.
"""


def render(choices: Choices, folder: Path) -> str:
    """Return the text of the file, which will lie in `folder`."""
    written = choices.written(folder)
    sections = [name for name in RunConfig.model_fields if name in written]
    parts = ["\n".join(_section(choices, name, written[name])) for name in sections]
    return _HEADER + "".join(f"\n{part}\n" for part in parts)


def _section(choices: Choices, name: str, content: object) -> Iterator[str]:
    if isinstance(content, dict) and name not in LISTED:
        yield f"{name}:"
        for key, value in content.items():
            yield from _comment(choices.reasons[f"{name}.{key}"], "  ")
            yield f"  {key}: {flow(value)}"
        return
    yield from _comment(choices.reasons[name], "")
    yield f"{name}: {flow(content)}"


def _comment(text: str, indent: str) -> Iterator[str]:
    yield from (f"{indent}# {line}" for line in textwrap.wrap(text, _WIDTH))
