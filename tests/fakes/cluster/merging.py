"""How the fake cluster merges patches: a strategic merge, a JSON merge (RFC 7386), and server-side apply.

Merge keys, and what is replaced as a whole, are those of the published schemas; the lists of custom resources are
replaced. Of the strategic merge's directives it knows those that kubectl sends. Of server-side apply it knows what a
manager applied before, not what others own: it is for those who force conflicts.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes_validate.utils import schema_contents

from tests.fakes.cluster.admission import SCHEMAS
from tests.fakes.cluster.store import Object, refusal

Schema = Mapping[str, Any]
_STRATEGY, _KEY = "x-kubernetes-patch-strategy", "x-kubernetes-patch-merge-key"
_LIST, _MAP_KEYS, _MAP = "x-kubernetes-list-type", "x-kubernetes-list-map-keys", "x-kubernetes-map-type"
_ORDER, _DELETE, _RETAIN, _PATCH = "$setElementOrder/", "$deleteFromPrimitiveList/", "$retainKeys", "$patch"


@functools.cache
def _definitions() -> dict[str, Any]:
    found = schema_contents(f"kubernetes-json-schema/v{SCHEMAS}.0-local-strict/_definitions.json", SCHEMAS)
    return dict(found["$defs"])


@functools.cache
def schema_of(api_version: str, kind: str) -> Schema:
    """The schema of a kind; an empty one, by which lists are replaced, of custom resources."""
    group, _, version = api_version.rpartition("/")
    wanted = {"group": group, "kind": kind, "version": version}
    return next(
        (each for each in _definitions().values() if wanted in each.get("x-kubernetes-group-version-kind", [])), {}
    )


def _field(schema: Schema, name: str) -> Schema:
    return _resolved(schema.get("properties", {}).get(name, {}))


def _resolved(schema: Schema) -> Schema:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return {**_definitions()[name], **schema} if name else schema


# ---- the strategic merge ----


def strategic(live: Object, patch: Object, schema: Schema) -> Object:
    """Returns: a copy of an object with a patch. Raises: Refusal: 415: a directive is unknown here."""
    known = (_ORDER, _DELETE, _RETAIN)
    if unknown := [each for each in patch if each.startswith("$") and not each.startswith(known)]:
        raise refusal(415, "UnsupportedMediaType", f"the fake cluster knows no {unknown} here")
    kept = patch.get(_RETAIN)
    merged = {name: value for name, value in live.items() if kept is None or name in kept}
    for name, value in patch.items():
        field = _field(schema, name)
        if name.startswith(_DELETE):
            of = name.removeprefix(_DELETE)
            merged[of] = [each for each in merged.get(of, []) if each not in value]
        elif name.startswith("$"):
            continue
        elif value is None:
            merged.pop(name, None)
        elif isinstance(value, list) and "merge" in field.get(_STRATEGY, "").split(","):
            merged[name] = _strategic_list(merged.get(name) or [], value, field, patch.get(_ORDER + name))
        elif isinstance(value, dict) and field.get(_STRATEGY) != "replace":
            merged[name] = strategic(merged.get(name) or {}, value, field)
        else:
            merged[name] = value
    for name in [each for each in patch if each.startswith(_ORDER) and each.removeprefix(_ORDER) not in patch]:
        of = name.removeprefix(_ORDER)
        merged[of] = _strategic_list(merged.get(of) or [], [], _field(schema, of), patch[name])
    return merged


def _strategic_list(
    live: Sequence[Any], patch: Sequence[Any], schema: Schema, order: Sequence[Any] | None
) -> list[Any]:
    key, item = schema.get(_KEY), _resolved(schema.get("items", {}))
    found: dict[Any, Any] = {each[key] if key else each: each for each in live}
    for each in patch:
        if not key:
            found[each] = each
        elif each.get(_PATCH) == "delete":
            found.pop(each[key], None)
        else:
            found[each[key]] = strategic(found.get(each[key]) or {}, each, item)
    if order is None:
        return list(found.values())
    places = {each[key] if key else each: index for index, each in enumerate(order)}
    return [found[name] for name in sorted(found, key=lambda name: places.get(name, len(places)))]


# ---- the JSON merge ----


def json_merge(live: Any, patch: Any) -> Any:
    """Returns: a copy with the patch."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(live) if isinstance(live, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = json_merge(merged.get(name), value)
    return merged


# ---- server-side apply ----


def server_side(live: Any, new: Any, before: Any, schema: Schema) -> Any:
    """Returns: what is there with what a manager applies now, without what it applied before and does no longer.

    None of `new`: it applies nothing here; None as the result: nothing is left.
    """
    items = schema.get(_MAP_KEYS) if schema.get(_LIST) == "map" else None
    some = next((each for each in (new, before) if each is not None), None)
    if isinstance(some, dict) and isinstance(live, dict) and schema.get(_MAP) != "atomic":
        return _server_side_map(live, new, before or {}, schema)
    if items and isinstance(some, list) and isinstance(live, list):
        item = _resolved(schema.get("items", {}))
        was, wanted, applied = ({_name(each, items, item): each for each in part or []} for part in (live, new, before))
        names = [*wanted, *(name for name in was if name not in wanted)]
        merged = [server_side(was.get(name), wanted.get(name), applied.get(name), item) for name in names]
        return [each for each in merged if each is not None] or (None if new is None else [])
    if new is None and before is None:
        return live
    return new


def _server_side_map(live: Object, new: Object | None, before: Object, schema: Schema) -> Object | None:
    wanted = new or {}
    merged = {}
    for name in [*live, *(each for each in wanted if each not in live)]:
        value = server_side(live.get(name), wanted.get(name), before.get(name), _field(schema, name))
        if value is not None:
            merged[name] = value
    return merged if merged or new is not None else None


def _name(item: Object, keys: Sequence[str], schema: Schema) -> tuple[Any, ...]:
    """What tells an item of a list from others."""
    return tuple(item.get(key, _field(schema, key).get("default")) for key in keys)
