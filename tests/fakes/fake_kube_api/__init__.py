"""A FAKE Kubernetes API server for tests: HTTP on loopback, objects in memory, no cluster behind it.

It speaks as much of the protocol as real kubectl and the real Python client use here: discovery, get, list, create,
delete, JSON, merge/strategic/apply patches, dry-run, watch with replay and expiry, the scale, status and eviction
subresources, SelfSubjectAccessReviews, validation by the published schemas. It has no controllers, no scheduler, no
kubelet and no admission: what a pod does, a test does. Nothing that runs against it has run on Kubernetes.

`python -m tests.fakes.fake_kube_api KUBECONFIG [NAMESPACE ...]` serves until SIGTERM.
"""

from tests.fakes.fake_kube_api.server import FakeKubeApi

__all__ = ["FakeKubeApi"]
