"""Reads YAML with the line of every key; duplicate keys are errors and `1e-4` is a number."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tandem_config.problems import ConfigErrors, ConfigProblem, problem

# PyYAML implements YAML 1.1, which reads 1e-4 and 2E5 as text because they have no dot.
_FLOAT = re.compile(
    r"^[-+]?(?:(?:\d[\d_]*)?\.\d[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*\.(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(?:inf|Inf|INF))$|^\.(?:nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 floats."""


_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:float"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


@dataclass(frozen=True, kw_only=True)
class YamlSource:
    """A parsed mapping, the line of every dotted key (from 1), and problems that parsing alone would hide."""

    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    problems: list[ConfigProblem] = field(default_factory=list)
    root: yaml.Node | None = None


def read_yaml(path: Path) -> YamlSource:
    """Parse a configuration file.

    Duplicate keys and keys that are not text are returned as problems, so that the rest can still be checked.

    Raises: ConfigErrors: the file is missing, not UTF-8, not YAML, empty, or not a mapping of sections.
    """
    text = _read_text(path)
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            problems, lines = _walk(root, path)
            values = None if root is None else loader.construct_document(root)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise _syntax_error(path, error) from error
    if not isinstance(values, dict):
        found = "is empty" if values is None else f"holds a {type(values).__name__}"
        raise _unreadable(path, f"{found}, not sections with keys", "start with `model:` and `data:`")
    return YamlSource(values=values, lines=lines, problems=problems, root=root)


def text_at(root: yaml.Node | None, path: Iterable[int | str]) -> str:
    """Return the text of a scalar without quotes, as it is written; "": there is none.

    Args:
        path: keys and places in lists; what leads nowhere is passed over, such as the kind of an entry.
    """
    for part in path:
        if isinstance(root, yaml.MappingNode):
            root = next((value for key, value in root.value if key.value == str(part)), root)
        elif isinstance(root, yaml.SequenceNode) and isinstance(part, int) and part < len(root.value):
            root = root.value[part]
    return str(root.value) if isinstance(root, yaml.ScalarNode) and not root.style else ""


def node_of(text: str) -> yaml.Node | None:
    """Return the node of the value of `--set key=text`. Raises: yaml.YAMLError."""
    return yaml.compose(text, _Loader)


def parse_scalar(text: str) -> Any:
    """Parse the value of `--set key=text` as YAML. Raises: yaml.YAMLError."""
    return yaml.load(text, _Loader)  # a SafeLoader


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise _unreadable(path, "no such configuration file", _neighbours(path)) from error
    except IsADirectoryError as error:
        raise _unreadable(path, "is a folder, not a configuration file", _neighbours(path / "x")) from error
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise _unreadable(path, f"line {line} is not UTF-8", "save the file as UTF-8") from error


def _neighbours(path: Path) -> str:
    found = sorted(entry.name for entry in path.parent.glob("*.y*ml"))[:5] if path.parent.is_dir() else []
    return f"files in that folder: {', '.join(found)}" if found else ""


def _unreadable(path: Path, why: str, suggestion: str = "", line: int | None = None) -> ConfigErrors:
    return ConfigErrors([problem("--config", path, why, suggestion, where="" if line is None else f"{path}:{line}")])


def _syntax_error(path: Path, error: yaml.YAMLError) -> ConfigErrors:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    context = getattr(error, "context", None)
    message = f"not valid YAML: {what}" + (f" ({context})" if context else "")
    if mark is None:
        return _unreadable(path, message)
    advice = "check indentation (spaces, no tabs), colons and quotes on that line and the one above"
    return _unreadable(path, f"line {mark.line + 1}, column {mark.column + 1}: {message}", advice, mark.line + 1)


def _walk(root: yaml.Node | None, path: Path) -> tuple[list[ConfigProblem], dict[str, int]]:
    """Find the lines of keys down to section.key or section[0].key, and duplicate keys, which construction hides."""
    problems: list[ConfigProblem] = []
    lines: dict[str, int] = {}

    def visit(node: yaml.Node, prefix: str, depth: int) -> None:
        if isinstance(node, yaml.SequenceNode) and depth == 2:
            for place, entry in enumerate(node.value):
                item = f"{prefix[:-1]}[{place}]"
                lines[item] = entry.start_mark.line + 1
                visit(entry, item + ".", depth)
        if not isinstance(node, yaml.MappingNode) or depth > 2:
            return
        for key_node, value_node in node.value:
            key = prefix + str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in lines:
                problems.append(_duplicate(key, value_node, path, line, lines[key]))
            lines[key] = line
            visit(value_node, key + ".", depth + 1)

    if root is not None:
        visit(root, "", 1)
    return problems, lines


def _duplicate(key: str, value: yaml.Node, path: Path, line: int, first: int) -> ConfigProblem:
    shown = value.value if isinstance(value, yaml.ScalarNode) else ""
    message = f"given twice: on line {first} and again on line {line}"
    return problem(key, shown, message, "keep one of the two", where=f"{path}:{line}")
