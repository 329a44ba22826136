"""The sets that create the run's pods: those of the rollouts, and those of the trainer.

kind               of          is made smaller by          needs
StatefulSet        either      its scale                   nothing
LeaderWorkerSet    rollouts    its scale, in engines       https://lws.sigs.k8s.io, component lws-rollout
JobSet             a trainer   its deletion: it has none   https://jobset.sigs.k8s.io, component jobset-trainer

A JobSet could be suspended too, but Kueue resumes one whose workload it has admitted.
"""

from dataclasses import dataclass

from coordinator.fleet.kubernetes.api.permissions import Permission

_PLACES = {
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io", "v1", "leaderworkersets"),
    "JobSet": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
}


@dataclass(frozen=True, kw_only=True)
class PodSet:
    """A set by kind and name."""

    kind: str
    name: str

    def __str__(self) -> str:
        """Format as kubectl does, e.g. `statefulset/rollout`."""
        return f"{self.kind.lower()}/{self.name}"

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
    def has_scale(self) -> bool:
        """Whether its number of pods can be changed."""
        return self.kind != "JobSet"

    @property
    def get_scale(self) -> Permission:
        """The permission to read its size."""
        return self._permission("get", "/scale")

    @property
    def patch_scale(self) -> Permission:
        """The permission to change its size."""
        return self._permission("patch", "/scale")

    @property
    def get(self) -> Permission:
        """The permission to read it."""
        return self._permission("get")

    @property
    def delete(self) -> Permission:
        """The permission to delete it."""
        return self._permission("delete")

    @property
    def permissions(self) -> tuple[Permission, ...]:
        """The permissions on it that the coordinator may need; a Role may limit them to it by resourceNames."""
        return (self.get_scale, self.patch_scale) if self.has_scale else (self.get, self.delete)

    def _permission(self, verb: str, subresource: str = "") -> Permission:
        without = f"{self} keeps its size (fleet.scale, fleet.release_after_s)"
        return Permission(verb=verb, group=self.group, resource=f"{self.plural}{subresource}", without=without)
