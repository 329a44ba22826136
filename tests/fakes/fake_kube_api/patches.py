"""Patches of objects: JSON, merge, strategic merge and server-side apply. Pure.

Lists of objects with a `name` are merged by it, other lists are replaced: the merge keys of all kinds used here (other
ones are "containerPort", "ip" ...) are not known to the fake.
"""

import copy
from collections.abc import Mapping
from typing import Any

from tests.fakes.fake_kube_api.answers import apply_conflict

Object = dict[str, Any]
Path = tuple[str, ...]
# Which field manager has set each leaf.
Owners = dict[Path, str]
_UNOWNED = {
    ("apiVersion",),
    ("kind",),
    ("metadata", "name"),
    ("metadata", "namespace"),
    ("metadata", "resourceVersion"),
}


def json_patch(target: Object, operations: list[dict[str, Any]]) -> Object:
    """RFC 6902: add, replace and remove."""
    result = copy.deepcopy(target)
    for operation in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
        node: Any = result
        for part in parents:
            node = node[int(part)] if isinstance(node, list) else node[part]
        if operation["op"] == "remove":
            del node[int(last) if isinstance(node, list) else last]
        elif isinstance(node, list):
            node.insert(len(node) if last == "-" else int(last), operation["value"])
        else:
            node[last] = operation["value"]
    return result


def merge(target: Any, patch: Any, *, by_name: bool) -> Any:
    """RFC 7386 merge; with by_name, lists of named objects are merged too (strategic merge, apply)."""
    if isinstance(patch, Mapping):
        result = dict(target) if isinstance(target, Mapping) else {}
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merge(result.get(key), value, by_name=by_name)
        return result
    if by_name and _is_named(patch) and _is_named(target):
        known = {item["name"]: item for item in target}
        return list(
            (known | {item["name"]: merge(known.get(item["name"]), item, by_name=True) for item in patch}).values()
        )
    return copy.deepcopy(patch)


def apply(target: Object | None, config: Object, owners: Owners, manager: str, *, force: bool) -> tuple[Object, Owners]:
    """Server-side apply. Returns: the object and who has set its fields.

    Raises: Refusal: 409, another manager has set a field to another value.
    """
    wanted = leaves(config)
    current = leaves(target or {})
    others = {
        path: owners[path]
        for path, value in wanted.items()
        if owners.get(path, manager) != manager and current.get(path) != value
    }
    if others and not force:
        raise apply_conflict({"." + ".".join(path): owner for path, owner in others.items()})
    result = copy.deepcopy(target) if target is not None else {}
    for path in [path for path, owner in owners.items() if owner == manager and path not in wanted]:
        _remove(result, path)
    kept = {path: owner for path, owner in owners.items() if owner != manager}
    return merge(result, config, by_name=True), kept | dict.fromkeys(wanted, manager)


def leaves(value: Any, path: Path = ()) -> dict[Path, Any]:
    """Leaf values by path; items of named lists are addressed by name, other lists are leaves."""
    if path in _UNOWNED:
        return {}
    if isinstance(value, Mapping) and value:
        return {k: v for key, each in value.items() for k, v in leaves(each, (*path, str(key))).items()}
    if _is_named(value):
        return {k: v for each in value for k, v in leaves(each, (*path, f"[{each['name']}]")).items()}
    return {path: value}


def _remove(node: Any, path: Path) -> None:
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if part.startswith("[") and isinstance(node, list):
            found = [item for item in node if item.get("name") == part[1:-1]]
            node = found[0] if found else None
        elif isinstance(node, dict):
            if last:
                node.pop(part, None)
            node = node.get(part)
        if node is None:
            return


def _is_named(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "name" in item for item in value)
