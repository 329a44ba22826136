"""`tandem deploy diff`: what applying an overlay would change, and what of it cannot be changed in place.

Three things are compared per object, as `kubectl apply` does: what is rendered now, what was applied last (kubectl's
annotation), and what the API server has. Of what the server has only fields that either of the others names count: the
rest are its defaults and its controllers' business.
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from launcher.deploy.running.api import Object, OperatorApi, names
from launcher.deploy.running.kinds import CLAIM, MAKES_PODS, SHARED, Kind, component_of, kind_of
from launcher.deploy.running.run import COORDINATOR, POD, LiveRun

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_ON_DELETE = "OnDelete"
# Fields of a StatefulSet's spec that the API server lets change.
_SET_MAY_CHANGE = frozenset(
    {"replicas", "ordinals", "template", "updateStrategy", "revisionHistoryLimit", "minReadySeconds"}
    | {"persistentVolumeClaimRetentionPolicy"}
)
_JOB_MAY_CHANGE = frozenset(
    {"parallelism", "suspend", "activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"}
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """What applying would do to an object: `new`, `changed` or `same`; the difference, and warnings about it."""

    kind: str
    name: str
    what: str
    text: str = ""
    warnings: tuple[str, ...] = ()


def changes(api: OperatorApi, built: Sequence[Object]) -> Iterator[Change]:
    """Compare the objects of an overlay with the cluster's, in the order of the overlay."""
    for entry in built:
        kind = kind_of(entry)
        if kind is None:
            continue
        name = str(entry["metadata"]["name"])
        live = api.get(kind, name)
        if live is None:
            yield Change(kind=kind.name, name=name, what="new")
            continue
        before = _shaped(live, entry, _last_applied(live))
        after = _plain(entry)
        if before == after:
            yield Change(kind=kind.name, name=name, what="same")
            continue
        secret = kind.name == "Secret"
        text = f"Secret/{name} differs; its values are not shown" if secret else _text(kind.name, name, before, after)
        yield Change(
            kind=kind.name, name=name, what="changed", text=text, warnings=tuple(_warnings(kind, live, before, after))
        )


def left_over(run: LiveRun, built: Sequence[Object]) -> list[str]:
    """Name the objects of a run that an overlay no longer has: applying does not delete them."""
    rendered = {(kind, str(entry["metadata"]["name"])) for entry in built if (kind := kind_of(entry)) is not None}
    return [
        f"{kind.name}/{name}"
        for kind, objects in run.objects.items()
        if kind is not POD
        for name in names(entry for entry in objects if not entry["metadata"].get("ownerReferences"))
        if (kind, name) not in rendered
    ]


def not_compared(built: Sequence[Object]) -> list[str]:
    """Name the objects that are not a run's, or of kinds that are unknown here."""
    return [
        f"{entry['kind']}/{entry['metadata']['name']}"
        for entry in built
        if kind_of(entry) is None and entry["kind"] not in SHARED
    ]


def _warnings(kind: Kind, live: Object, before: Object, after: Object) -> Iterator[str]:
    """Say what of a change the API server refuses, or does not bring to the pods that run."""
    old, new = before.get("spec", {}), after.get("spec", {})
    changed = {key for key in old.keys() | new.keys() if old.get(key) != new.get(key)}
    if kind.name in ("Job", "JobSet"):
        refused = sorted(changed - _JOB_MAY_CHANGE)
        if refused:
            yield f"cannot be changed in place (spec.{', spec.'.join(refused)}): delete it first; applying fails here"
    elif kind.name == "StatefulSet":
        refused = sorted(changed - _SET_MAY_CHANGE)
        if refused:
            yield f"cannot be changed in place (spec.{', spec.'.join(refused)}): delete it first; applying fails here"
        if "template" in changed and (after["spec"].get("updateStrategy") or {}).get("type") == _ON_DELETE:
            yield "its pods stay as they are until they are deleted (OnDelete)"
        elif "template" in changed:
            yield "its pods are replaced one by one as soon as this is applied, beside those of the old configuration"
    elif kind.name == "LeaderWorkerSet" and "leaderWorkerTemplate" in changed:
        yield "its groups are replaced one by one as soon as this is applied"
    elif kind == CLAIM and changed - {"resources"}:
        yield "cannot be changed in place: a claim's class and modes are those that it was made with"
    if kind in MAKES_PODS and component_of(live) == COORDINATOR and changed:
        yield "the run that it conducts is another one after this: a configuration changes for all services together"


def _last_applied(live: Object) -> Object:
    try:
        found = json.loads(live["metadata"].get("annotations", {}).get(LAST_APPLIED, "{}"))
    except ValueError:
        return {}
    return _plain(found) if isinstance(found, dict) else {}


def _plain(manifest: Object) -> Object:
    """Return a manifest without what only says how it was applied."""
    metadata = {key: value for key, value in manifest.get("metadata", {}).items() if value}
    notes = {key: text for key, text in metadata.pop("annotations", {}).items() if key != LAST_APPLIED}
    return {**manifest, "metadata": metadata | ({"annotations": notes} if notes else {})}


def _shaped(live: Any, wanted: Any, applied: Any) -> Any:
    """Return what the server has of the fields that are wanted now or were applied before."""
    if isinstance(live, dict) and (isinstance(wanted, dict) or isinstance(applied, dict)):
        now, before = (entry if isinstance(entry, dict) else {} for entry in (wanted, applied))
        shaped = {
            key: _shaped(live[key], now.get(key), before.get(key))
            for key in live
            if (key in now or key in before) and key != LAST_APPLIED
        }
        return {key: value for key, value in shaped.items() if value not in ({}, None) or key in now}
    if isinstance(live, list) and isinstance(wanted, list):
        return [
            _shaped(entry, _partner(entry, wanted, index), _partner(entry, applied, index))
            for index, entry in enumerate(live)
        ]
    return live


def _partner(entry: Any, entries: Any, index: int) -> Any:
    """Find the entry of a list that another one is to be compared with: by its name, or by its place."""
    if not isinstance(entries, list):
        return None
    if isinstance(entry, dict):
        for key in ("name", "containerPort", "mountPath", "type"):
            if key in entry:
                found = next(
                    (other for other in entries if isinstance(other, dict) and other.get(key) == entry[key]), None
                )
                if found is not None:
                    return found
    return entries[index] if index < len(entries) else None


def _text(kind: str, name: str, before: Object, after: Object) -> str:
    old, new = (yaml.safe_dump(entry, sort_keys=True, width=200).splitlines() for entry in (before, after))
    lines = difflib.unified_diff(old, new, f"{kind}/{name} (cluster)", f"{kind}/{name} (overlay)", lineterm="", n=2)
    return "\n".join(lines)
