"""Entries of the configuration's lists (`trackers`): their paths, and what is wrong with one."""

import difflib
from pathlib import Path
from typing import Any

from pydantic_core import ErrorDetails

from tandem_config import paths
from tandem_config.sections.trackers import TRACKER_KINDS

_NO_ENTRY = "must be the name of a tracker, or its keys"
_HOW = "write e.g. `trackers: [tensorboard, {kind: wandb, project: my-project}]`"


def with_absolute_paths(entries: Any, base: Path) -> Any:
    """Return the entries with each text under a key that takes a path turned into an absolute path below `base`."""
    if not isinstance(entries, list):
        return entries
    return [
        {name: paths.below(base, value) if _is_path(entry, name, value) else value for name, value in entry.items()}
        if isinstance(entry, dict)
        else entry
        for entry in entries
    ]


def _is_path(entry: dict[Any, Any], name: Any, value: Any) -> bool:
    model = TRACKER_KINDS.get(str(entry.get("kind")))
    field = None if model is None else model.model_fields.get(str(name))
    return field is not None and field.annotation == Path | None and isinstance(value, str) and value.strip() != ""


def key_of(detail: ErrorDetails) -> str:
    """Return the place of an error in an entry, e.g. `trackers[1].project`."""
    name, *rest = detail["loc"]
    # Behind the number stands the kind, by which pydantic chose the model.
    number, keys = (f"[{rest[0]}]", rest[2:]) if rest else ("", [])
    kind = ".kind" if detail["type"].startswith("union_tag") else ""
    return ".".join([f"{name}{number}{kind}", *map(str, keys)])


def explain(detail: ErrorDetails) -> tuple[str, str] | None:
    """Return what is wrong with an entry, and what to write; None: as for any other key."""
    kinds = ", ".join(TRACKER_KINDS)
    match detail["type"]:
        case "list_type" | "model_attributes_type" | "model_type":
            return _NO_ENTRY, _HOW
        case "union_tag_not_found":
            return "is missing: it says which tracker the entry is", f"add `kind:` with one of {kinds}"
        case "union_tag_invalid":
            close = difflib.get_close_matches(str(detail["ctx"]["tag"]), TRACKER_KINDS, 1, 0.5)
            return f"must be one of {kinds}", f"did you mean {close[0]}?" if close else _HOW
        case "extra_forbidden":
            known = list(TRACKER_KINDS[str(detail["loc"][2])].model_fields)
            close = difflib.get_close_matches(str(detail["loc"][-1]), known, 1, 0.5)
            return "unknown key", f"did you mean {close[0]}?" if close else f"known keys here: {', '.join(known)}"
    return None


def shown(detail: ErrorDetails) -> Any:
    """Return the value that is wrong; of an unknown kind the kind, of an entry without one nothing."""
    if detail["type"].startswith("union_tag"):
        return detail.get("ctx", {}).get("tag", "")
    return detail["input"]
