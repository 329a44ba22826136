"""What kubectl asks the fake cluster before it creates anything: groups, the resources of each, and parameters.

Of the OpenAPI documents there is as much as kubectl needs to leave the validation of fields to the server.
"""

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
    if path == "/openapi/v3":
        return {"paths": {_root(each): {"serverRelativeURL": f"/openapi/v3/{_root(each)}"} for each in installed}}
    if path.startswith("/openapi/v3/"):
        return _parameters(path.removeprefix("/openapi/v3/"))
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


def _root(version: str) -> str:
    return f"apis/{version}" if "/" in version else f"api/{version}"


def _parameters(root: str) -> Object:
    """Which parameters a PATCH may have, per kind."""
    names = ("dryRun", "fieldManager", "fieldValidation", "force")
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
    paths = {}
    for each in BY_PATH.values():
        if _root(each.api_version) == root:
            group, _, version = each.api_version.rpartition("/")
            kind = {"group": group, "version": version, "kind": each.name}
            patch = {"parameters": parameters, "responses": {}, "x-kubernetes-group-version-kind": kind}
            paths[f"/{root}/{each.plural}/{{name}}"] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "1"}, "paths": paths}
