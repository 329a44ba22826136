"""The permissions that the coordinator needs, as data; a test compares them with the Roles in deploy/."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Permission:
    """A verb on a resource of the run's namespace.

    Attributes:
        group: API group; "" is the core group.
        resource: plural, with its subresource: "pods/eviction".
        without: consequence if it is refused.
    """

    verb: str
    group: str = ""
    resource: str
    without: str

    def __str__(self) -> str:
        """Format as in RBAC, e.g. `create pods/eviction`."""
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


LIST_PODS = Permission(verb="list", resource="pods", without="replicas are known from Redis alone")
WATCH_PODS = Permission(verb="watch", resource="pods", without="replicas are known from Redis alone")
EVICT_PODS = Permission(verb="create", resource="pods/eviction", without="stuck replicas are only reported")
CREATE_EVENTS = Permission(verb="create", resource="events", without="`kubectl describe` does not show what was done")
PATCH_EVENTS = Permission(verb="patch", resource="events", without="repeated events are not counted")
# Needed always; those for the run's sets are in pod_sets.py.
PERMISSIONS = (LIST_PODS, WATCH_PODS, EVICT_PODS, CREATE_EVENTS, PATCH_EVENTS)
