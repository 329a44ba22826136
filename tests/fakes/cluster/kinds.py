"""The kinds of objects that the fake cluster has, and where its API has them."""

from launcher.deploy.running.kinds import KINDS, Kind
from tests.fakes.cluster.store import Object

NAMESPACED = (
    *KINDS,
    Kind(name="Event", api_version="v1", plural="events"),
    Kind(name="ResourceQuota", api_version="v1", plural="resourcequotas"),
)
OF_THE_CLUSTER = (
    Kind(name="Namespace", api_version="v1", plural="namespaces"),
    Kind(name="Node", api_version="v1", plural="nodes"),
    Kind(name="StorageClass", api_version="storage.k8s.io/v1", plural="storageclasses"),
)
# Custom resources are unknown until a test installs them.
BUILT_IN = frozenset(
    {"v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1", "autoscaling/v2"}
    | {"storage.k8s.io/v1"}
)
# The controllers that the coordinator knows.
CONTROLLERS = ("leaderworkerset.x-k8s.io/v1", "jobset.x-k8s.io/v1alpha2")
BY_PATH = {(each.api_version, each.plural): each for each in (*NAMESPACED, *OF_THE_CLUSTER)}
_BY_NAME = {(each.api_version, each.name): each for each in BY_PATH.values()}


def kind_of(obj: Object) -> Kind | None:
    """The kind of an object; None: the cluster has none such."""
    return _BY_NAME.get((obj["apiVersion"], obj["kind"]))


def group_of(plural: str) -> str | None:
    """API group of a resource, "" for the core group; None: it is unknown."""
    return next((each.api_version.rpartition("/")[0] for each in BY_PATH.values() if each.plural == plural), None)
