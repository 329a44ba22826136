"""The operator's calls to the Kubernetes API: as kubectl makes them, with the same kubeconfig."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3
from kubernetes import client
from kubernetes import config as kube_config
from kubernetes.client.exceptions import ApiException

from coordinator.fleet.kubernetes.api.errors import translate
from coordinator.fleet.kubernetes.api.pods import RUN_LABEL
from launcher.deploy.running.kinds import Kind
from servicekit.errors import ConfigError, NotReady, PermissionDenied, Unavailable

Object = dict[str, Any]
REQUEST_S = 20.0
_PAGE = 250
_BEARER = "BearerToken"


class OperatorApi:
    """The API in a namespace, as a context of a kubeconfig reaches it.

    Args:
        namespace: "": that of the context.
    Raises: ConfigError: no usable kubeconfig.
    """

    def __init__(self, namespace: str = "", *, kubeconfig: Path | None = None, context: str = "") -> None:
        configuration = client.Configuration()
        # Read now: the client has taken the variable when it was imported.
        file = str(kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config")
        try:
            kube_config.load_kube_config(file, context=context or None, client_configuration=configuration)
            contexts, current = kube_config.list_kube_config_contexts(file)
        except (kube_config.ConfigException, OSError) as error:
            where = f"{file}{f', context {context}' if context else ''}"
            raise ConfigError(f"the kubeconfig ({where}) cannot be used: {error}") from error
        chosen = next((entry for entry in contexts if entry["name"] == context), current)
        self.context = str(chosen["name"])
        self.namespace = namespace or str(chosen["context"].get("namespace") or "default")
        configuration.retries = False
        self.configuration = configuration
        self._client = client.ApiClient(configuration)

    def request(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Make a request. what: verb and object, for errors.

        Raises: NotReady: 404; PermissionDenied, Aborted (409), InvalidRequest (422), Unavailable.
        """
        url = f"{path}?{urlencode(query)}" if query else path
        text = self._answer(method, url, what, "application/json", body, content_type)
        found = json.loads(text or "{}")
        return found if isinstance(found, dict) else {}

    def text(self, path: str, what: str) -> str:
        """Read what is not an object, as a log. Raises: as `request`."""
        return self._answer("GET", path, what, "*/*")

    def _answer(
        self, method: str, path: str, what: str, accept: str, body: Object | None = None, content_type: str = ""
    ) -> str:
        where = f"{what} in namespace {self.namespace}"
        headers = {"Accept": accept} | ({"Content-Type": content_type} if content_type else {})
        asked = self._client.param_serialize(method, path, header_params=headers, body=body, auth_settings=[_BEARER])
        try:
            answer = self._client.call_api(*asked, _request_timeout=REQUEST_S)
            text = (answer.read() or b"").decode(errors="replace")
            if not 200 <= answer.status <= 299:
                failure = ApiException(status=answer.status, reason=answer.reason)
                failure.body, failure.headers = text, answer.getheaders()
                raise failure
            return text
        except ApiException as error:
            raise translate(error, where) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unavailable(
                f"Kubernetes API at {self.configuration.host} (context {self.context}), {where}: {error}"
            ) from error

    def get(self, kind: Kind, name: str) -> Object | None:
        """Read an object; None: it does not exist."""
        return self.read(kind.path(self.namespace, name), f"get {kind.plural} {name}")

    def read(self, path: str, what: str) -> Object | None:
        """Read what a path has; None: nothing."""
        try:
            return self.request("GET", path, what)
        except NotReady:
            return None

    def find(self, kind: Kind, selector: str) -> list[Object]:
        """List objects by label; none if the cluster does not know the kind. Raises: PermissionDenied."""
        try:
            return self.read_all(kind.path(self.namespace), f"list {kind.plural}", selector)
        except PermissionDenied:
            # So is a kind refused that the cluster does not know; which ones it does everyone may ask.
            if "/" in kind.api_version and self.read(f"/apis/{kind.api_version}", "read the API's kinds") is None:
                return []
            raise

    def read_all(self, path: str, what: str, selector: str = "") -> list[Object]:
        """List what a path has, in pages; nothing if the path is unknown."""
        found: list[Object] = []
        query = {"limit": str(_PAGE)} | ({"labelSelector": selector} if selector else {})
        while True:
            try:
                page = self.request("GET", path, what, query=query)
            except NotReady:
                return found
            found += page.get("items", [])
            if not (following := page.get("metadata", {}).get("continue")):
                return found
            query["continue"] = following

    def delete(self, kind: Kind, name: str) -> bool:
        """Delete an object, and the pods that it has made, before it. Returns: whether it was present."""
        body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        what = f"delete {kind.plural} {name}"
        try:
            self.request("DELETE", kind.path(self.namespace, name), what, body=body)
        except NotReady:
            return False
        return True

    def create(self, kind: Kind, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object; with dry_run only let the API server, and its admission, say whether it could be."""
        query = {"dryRun": "All"} if dry_run else None
        name = body["metadata"]["name"]
        return self.request("POST", kind.path(self.namespace), f"create {kind.plural} {name}", query=query, body=body)

    def headers(self) -> dict[str, str]:
        """Return the headers that authenticate."""
        found: dict[str, str] = {}
        self._client.update_params_for_auth(found, [], [_BEARER], "", "GET", None)
        return {name.lower(): text for name, text in found.items()}


def of_run(run: str) -> str:
    """Return the selector of all objects of a run."""
    return f"{RUN_LABEL}={run}"


def names(objects: Iterable[Object]) -> list[str]:
    """Return the names of objects, sorted."""
    return sorted(str(entry["metadata"]["name"]) for entry in objects)
