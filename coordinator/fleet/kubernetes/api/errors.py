"""Turns errors of the Kubernetes API into TandemErrors, each with the verb and the resource that it is about.

HTTP status       raised               what the caller does, or why
401, 403          PermissionDenied     continues without it, reports it once
404               NotReady             it does not exist (any more)
409               Aborted              reads again, tries again
410               Expired              lists again: the watch has missed too much
429, 5xx, none    Unavailable          tries again, no sooner than Retry-After
429 of a budget   NotReady             a PodDisruptionBudget forbids it now
other             InvalidRequest       a bug of Tandem, or an API server that is too old
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import urllib3
from kubernetes.client.exceptions import ApiException

from coordinator.fleet.kubernetes.api.permissions import Permission
from servicekit.errors import Aborted, InvalidRequest, NotReady, PermissionDenied, TandemError, Unavailable

# Upper bound of Retry-After, because a run waits for it.
LONGEST_RETRY_AFTER_S = 30.0
_BY_STATUS: Mapping[int, type[TandemError]] = {404: NotReady, 409: Aborted}


class Expired(Aborted):
    """The resource version that a watch starts from is too old."""


class Throttled(Unavailable):
    """The API server is overloaded and asks to wait `retry_after_s` seconds."""

    retry_after_s: float = 0.0


@contextlib.contextmanager
def kube_errors(permission: Permission, name: str, namespace: str) -> Iterator[None]:
    """Turn errors of the client inside a `with` block into TandemErrors. name: of the object; "": all of a kind."""
    what = f"{permission}{f' {name}' if name else ''} in namespace {namespace}"
    try:
        yield
    except ApiException as error:
        raise translate(error, what) from error
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise Unavailable(f"Kubernetes API, {what}: no answer: {_short(error)}") from error


def translate(error: ApiException, what: str) -> TandemError:
    """Translate an error of the client.

    Args:
        what: the request, for the message.

    >>> str(translate(ApiException(status=403, reason="Forbidden"), "list pods in namespace tandem"))
    'Kubernetes API, list pods in namespace tandem: refused: Forbidden (403)'
    """
    status = int(error.status or 0)
    detail = f"{_status_object(error).get('message') or error.reason or 'no reason given'} ({status})"
    if status == 410:
        return Expired(f"Kubernetes API, {what}: the watch has expired: {detail}")
    if status == 429 and _is_disruption_budget(error):
        return NotReady(f"Kubernetes API, {what}: a PodDisruptionBudget forbids it now: {detail}")
    if status == 429:
        throttled = Throttled(f"Kubernetes API, {what}: throttled: {detail}")
        throttled.retry_after_s = _retry_after_s(error)
        return throttled
    if status in (401, 403):
        return PermissionDenied(f"Kubernetes API, {what}: refused: {detail}")
    kind = _BY_STATUS.get(status, Unavailable if status == 0 or status >= 500 else InvalidRequest)
    return kind(f"Kubernetes API, {what}: {detail}")


def _retry_after_s(error: ApiException) -> float:
    text = (error.headers or {}).get("Retry-After", "")
    return min(float(text), LONGEST_RETRY_AFTER_S) if text.isdigit() else 0.0


def _is_disruption_budget(error: ApiException) -> bool:
    causes = _status_object(error).get("details", {}).get("causes", [])
    return any(cause.get("reason") == "DisruptionBudget" for cause in causes)


def _status_object(error: ApiException) -> dict[str, Any]:
    """Parse the API's Status object; {} if the body is not one, as from a proxy."""
    try:
        found = json.loads(error.body or "")
    except (ValueError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


def _short(error: Exception) -> str:
    reason = getattr(error, "reason", None)
    return str(reason if reason is not None else error) or type(error).__name__
