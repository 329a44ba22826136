"""The set that creates the rollout pods.

kind               a replica is                              needs
StatefulSet        a pod                                     nothing
LeaderWorkerSet    a group: a leader pod, and its workers    https://lws.sigs.k8s.io, component lws-rollout
"""

from dataclasses import dataclass

from coordinator.fleet.kubernetes.api.permissions import PERMISSIONS, Permission, to_scale

_PLACES = {
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
}


@dataclass(frozen=True, kw_only=True)
class RolloutSet:
    """A set by kind and name; its size is the number of replicas."""

    kind: str
    name: str

    @property
    def group(self) -> str:
        """API group."""
        return _PLACES[self.kind][0]

    @property
    def version(self) -> str:
        """Version of the group."""
        return _PLACES[self.kind][1]

    @property
    def plural(self) -> str:
        """Plural name of the kind, for the API's paths."""
        return _PLACES[self.kind][2]

    @property
    def get_scale(self) -> Permission:
        """The permission to read its size."""
        return to_scale("get", self.group, self.plural)

    @property
    def patch_scale(self) -> Permission:
        """The permission to change its size."""
        return to_scale("patch", self.group, self.plural)

    @property
    def permissions(self) -> tuple[Permission, ...]:
        """All permissions that the coordinator may need with this rollout set."""
        return (*PERMISSIONS, self.get_scale, self.patch_scale)
