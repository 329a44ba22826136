"""Validation as the API server does it, by the published schemas of one Kubernetes version."""

import kubernetes_validate

from tests.fakes.fake_kube_api import answers
from tests.fakes.fake_kube_api.kinds import Kind
from tests.fakes.fake_kube_api.patches import Object

SCHEMAS = "1.32"


def validate(kind: Kind, obj: Object, *, strict: bool) -> None:
    """Raises: Refusal: 422 for a wrong value, 400 for an unknown field when strict. Custom kinds have no schema."""
    try:
        kubernetes_validate.validate(obj, SCHEMAS, strict=strict)
    except kubernetes_validate.SchemaNotFoundError:
        return
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path) or "object"
        if "Additional properties" in error.message:
            raise answers.unknown_field(kind.name, f"{where}: {error.message}") from None
        raise answers.invalid(kind.name, obj.get("metadata", {}).get("name", ""), where, error.message) from None
