"""The calls that carry a coordinator's fence, as the protos have them: none can be forgotten where they are refused."""

from google.protobuf.descriptor import Descriptor

from tandem_api.common.v1.common_pb2 import CoordinatorFence
from tandem_api.rollout.v1 import rollout_pb2, worker_pb2
from tandem_api.trainer.v1 import trainer_pb2
from tandem_api.weights.v1 import weights_pb2

_FENCE = CoordinatorFence.DESCRIPTOR.full_name
_FILES = (rollout_pb2, worker_pb2, trainer_pb2, weights_pb2)


def fenced_calls() -> dict[str, set[str]]:
    """The names of methods whose request has a fence, at any depth, by full name of their service."""
    services = [service for file in _FILES for service in file.DESCRIPTOR.services_by_name.values()]
    return {
        service.full_name: {method.name for method in service.methods if _has_fence(method.input_type)}
        for service in services
    }


def _has_fence(message: Descriptor, above: tuple[str, ...] = ()) -> bool:
    parts = [field.message_type for field in message.fields if field.message_type is not None]
    return any(
        part.full_name == _FENCE or (part.full_name not in above and _has_fence(part, (*above, message.full_name)))
        for part in parts
    )
