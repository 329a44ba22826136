"""What the fake API server says when it does not do what it is asked: Status objects, as the real one words them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Refusal(Exception):
    """An answer that is not a success."""

    code: int
    reason: str
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The Status object."""
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
        return {**status, "code": self.code, "reason": self.reason, "message": self.message, "details": self.details}


def not_found(plural: str, name: str) -> Refusal:
    return Refusal(404, "NotFound", f'{plural} "{name}" not found', {"name": name, "kind": plural})


def already_exists(plural: str, name: str) -> Refusal:
    return Refusal(409, "AlreadyExists", f'{plural} "{name}" already exists', {"name": name, "kind": plural})


def changed(plural: str, name: str) -> Refusal:
    text = (
        f'Operation cannot be fulfilled on {plural} "{name}": the object has been modified; please apply your changes'
    )
    return Refusal(409, "Conflict", f"{text} to the latest version and try again", {"name": name, "kind": plural})


def forbidden(verb: str, resource: str, group: str, name: str, namespace: str) -> Refusal:
    who = "system:serviceaccount:tandem:coordinator"
    what = f'cannot {verb} resource "{resource}" in API group "{group}" in the namespace "{namespace}"'
    plural = resource.partition("/")[0]
    return Refusal(403, "Forbidden", f'{plural} "{name}" is forbidden: User "{who}" {what}', {"kind": plural})


def throttled(retry_after_s: int) -> Refusal:
    text = "the server has received too many requests and has asked us to try again later"
    return Refusal(
        429,
        "TooManyRequests",
        text,
        {"retryAfterSeconds": retry_after_s},
        {"Retry-After": str(retry_after_s)},
    )


def disruption_budget(name: str) -> Refusal:
    text = "Cannot evict pod as it would violate the pod's disruption budget."
    cause = {"reason": "DisruptionBudget", "message": f"The disruption budget {name} needs more healthy pods"}
    return Refusal(429, "TooManyRequests", text, {"causes": [cause]})


def expired(version: int, oldest: int) -> Refusal:
    return Refusal(410, "Expired", f"too old resource version: {version} ({oldest})")


def invalid(kind: str, name: str, field_path: str, message: str) -> Refusal:
    cause = {"reason": "FieldValueInvalid", "message": message, "field": field_path}
    details = {"name": name, "kind": kind, "causes": [cause]}
    return Refusal(422, "Invalid", f'{kind} "{name}" is invalid: {field_path}: {message}', details)


def unknown_field(kind: str, message: str) -> Refusal:
    return Refusal(400, "BadRequest", f"{kind} in version is invalid: strict decoding error: {message}")


def unsupported_media_type(content_type: str) -> Refusal:
    text = f"the body of the request was in an unknown format - accepted media types do not include {content_type}"
    return Refusal(415, "UnsupportedMediaType", text)


def apply_conflict(fields: dict[str, str]) -> Refusal:
    """fields: path -> the manager that has it."""
    causes = [
        {"reason": "FieldManagerConflict", "message": f'conflict with "{manager}"', "field": path}
        for path, manager in fields.items()
    ]
    listed = "\n".join(f'conflict with "{manager}": {path}' for path, manager in fields.items())
    text = f"Apply failed with {len(fields)} conflict{'s' if len(fields) > 1 else ''}: {listed}"
    return Refusal(409, "Conflict", text, {"causes": causes})
