"""What kubectl asks the fake cluster before it creates anything: groups, and the resources of each."""

from tests.fakes.cluster.kinds import BY_PATH, NAMESPACED
from tests.fakes.cluster.store import Object


def discover(path: str, installed: set[str]) -> Object | None:
    """The answer; None: it is no such question."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = sorted(each for each in installed if "/" in each)
        groups = [
            {"name": each.split("/")[0], "versions": [_version(each)], "preferredVersion": _version(each)}
            for each in versions
        ]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    wanted = path.removeprefix("/apis/").removeprefix("/api/")
    if wanted not in installed:
        return None
    verbs = ["create", "delete", "get", "list", "patch", "update", "watch"]
    resources = [
        {
            "name": each.plural,
            "singularName": "",
            "namespaced": each in NAMESPACED,
            "kind": each.name,
            "verbs": verbs,
        }
        for each in BY_PATH.values()
        if each.api_version == wanted
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": wanted, "resources": resources}


def _version(name: str) -> dict[str, str]:
    return {"groupVersion": name, "version": name.split("/")[1]}
