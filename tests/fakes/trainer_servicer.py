"""The trainer's servicer beside a coordinator: the metrics of two services do not fit into one process."""

import prometheus_client

_registry = prometheus_client.REGISTRY
_theirs = dict(_registry._collector_to_names), dict(_registry._names_to_collectors)
_registry._collector_to_names.clear()
_registry._names_to_collectors.clear()
try:
    from trainer_service.servicer import TrainerServicer
finally:
    # The trainer's own metrics work on, and nobody scrapes them.
    _registry._collector_to_names.clear()
    _registry._names_to_collectors.clear()
    _registry._collector_to_names.update(_theirs[0])
    _registry._names_to_collectors.update(_theirs[1])

__all__ = ["TrainerServicer"]
