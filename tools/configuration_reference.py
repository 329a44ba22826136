"""Writes the tables of docs/configuration.md from the schema, or checks that they are current.

python -m tools.configuration_reference write | check
"""

import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from servicekit.environment import ServiceEnvironment
from tandem_config.keys import about_field, sections
from tandem_config.sections.base import Section
from tandem_config.sections.data import DataSource
from tandem_config.sections.trackers import TRACKER_KINDS

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "configuration.md"
_PART = re.compile(r"(?P<begin><!-- (?P<name>\w+): generated -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_EMPTY: tuple[Any, ...] = (None, "")


def rendered(page: str) -> str:
    """Return the page with the parts between its markers generated. Raises: KeyError: an unknown part."""
    made = parts()
    return _PART.sub(lambda found: f"{found['begin']}{made[found['name']]}\n{found['end']}", page)


def parts() -> dict[str, str]:
    """Generate the Markdown of each part, by the name in its markers."""
    tables = [f"### {name}\n\n{_section(model)}" for name, model in sections().items()]
    entries = [f"#### trackers: {kind}\n\n{_section(model)}" for kind, model in TRACKER_KINDS.items()]
    return {"settings": "\n\n".join(tables), "trackers": "\n\n".join(entries), "environment": _environment()}


def _section(model: type[Section]) -> str:
    rows = [
        f"| `{key}` | {type_text(field)} | {about_field(field, 'unit') or '-'} | {default_text(field)} "
        f"| {_cell(field.description)} | {_cell(about_field(field, 'why'))} |"
        for key, field in model.model_fields.items()
    ]
    return (
        (model.__doc__ or "").strip()
        + "\n\n"
        + "\n".join(
            ["| key | type | unit | default | what it is | why this default |", "|---|---|---|---|---|---|", *rows]
        )
    )


def _environment() -> str:
    rows = [
        f"| `{field.alias}` | {type_text(field)} | {default_text(field)} | {_cell(field.description)} |"
        for field in ServiceEnvironment.model_fields.values()
    ]
    return "\n".join(["| variable | type | default | what it is |", "|---|---|---|---|", *rows])


def type_text(field: FieldInfo) -> str:
    """Describe the type of a setting, in the terms of YAML, with its range.

    >>> from tandem_config.schema import GrpoSection
    >>> type_text(GrpoSection.model_fields["group_size"])
    'integer >= 2'
    """
    return _type(field.annotation, field.metadata)


def _type(annotation: Any, metadata: typing.Sequence[Any]) -> str:
    if typing.get_origin(annotation) is typing.Annotated:
        inner, *more = typing.get_args(annotation)
        return _type(inner, [*more, *metadata])
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        first, *_ = [member for member in typing.get_args(annotation) if member is not type(None)]
        return f"{_type(first, metadata)}, or null"
    if typing.get_origin(annotation) is list:
        return f"list of {_type(typing.get_args(annotation)[0], [])}s"
    if typing.get_origin(annotation) is tuple and typing.get_args(annotation)[0] is DataSource:
        return "path, glob, or list"
    if typing.get_origin(annotation) is dict:
        return "mapping"
    names = {int: "integer", float: "number", bool: "boolean", str: "string", Path: "path"}
    return " ".join([names[annotation], *_bounds(metadata)])


def _bounds(metadata: typing.Sequence[Any]) -> list[str]:
    found = []
    for entry in metadata:
        inner = entry.metadata if isinstance(entry, FieldInfo) else [entry]
        for item in inner:
            found += [f"{sign} {getattr(item, name):g}" for name, sign in _BOUNDS.items() if hasattr(item, name)]
    return found


def default_text(field: FieldInfo) -> str:
    """Describe the default, or that there is none."""
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value in _EMPTY:
        return "null" if value is None else "unset"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str]) -> int:
    """Write or check the page. Returns: 0, or 1 if the page is out of date. Raises: SystemExit: wrong usage."""
    if arguments not in (["write"], ["check"]):
        raise SystemExit(__doc__)
    page = PAGE.read_text(encoding="utf-8")
    if arguments == ["write"]:
        PAGE.write_text(rendered(page), encoding="utf-8")
        return 0
    if rendered(page) == page:
        return 0
    print(f"{PAGE.relative_to(REPO)} is not what the settings say: python -m tools.configuration_reference write")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
