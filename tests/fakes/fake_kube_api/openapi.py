"""The least of the OpenAPI documents: which parameters a PATCH takes; kubectl looks them up before it sends any."""

from tests.fakes.fake_kube_api.kinds import KINDS

PREFIX = "/openapi/v3"
_PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": "string"}}
    for name in ("dryRun", "fieldManager", "fieldValidation", "force")
]


def index() -> dict[str, object]:
    """Where the document of each group and version is."""
    return {"paths": {each: {"serverRelativeURL": f"{PREFIX}/{each}?hash=fake"} for each in _documents()}}


def document(path: str) -> dict[str, object] | None:
    """Of `apis/apps/v1`; None: there is no such group or version."""
    kinds = [kind for kind in KINDS if _prefix(kind.api_version) == path]
    if not kinds:
        return None
    paths = {
        f"/{path}{'/namespaces/{namespace}' if kind.namespaced else ''}/{kind.plural}/{{name}}": {
            "patch": {
                "parameters": _PARAMETERS,
                "responses": {"200": {"description": "OK"}},
                "x-kubernetes-group-version-kind": {"group": kind.group, "version": kind.version, "kind": kind.name},
            }
        }
        for kind in kinds
    }
    return {"openapi": "3.0.0", "info": {"title": "fake", "version": "v1.32.0-fake"}, "paths": paths}


def _documents() -> list[str]:
    return list(dict.fromkeys(_prefix(kind.api_version) for kind in KINDS))


def _prefix(api_version: str) -> str:
    return f"apis/{api_version}" if "/" in api_version else f"api/{api_version}"
