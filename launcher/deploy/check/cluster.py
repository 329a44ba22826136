"""What is wrong with an overlay for the cluster that it is for: namespace, claims, Secret, admission, nodes.

Nothing is changed there. What this account may not read is reported, and not checked.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from coordinator.fleet.kubernetes.api.pods import RUN_LABEL
from launcher.deploy.answers import Answers
from launcher.deploy.check.nodes import NodeRoom, node_problems
from launcher.deploy.check.overlay import ClaimUse, claims_of
from launcher.deploy.check.quotas import quota_problems
from launcher.deploy.overlay.kustomize import Manifest
from launcher.deploy.overlay.overlay import ONCE
from launcher.deploy.running.api import Object, OperatorApi, names, of_run
from launcher.deploy.running.kinds import BY_NAME, CLAIM, MAKES_PODS, component_of, has_ended, templates
from servicekit.errors import InvalidRequest, PermissionDenied
from tandem_config.problems import ConfigProblem, problem

_POD, _SECRET = BY_NAME["", "Pod"], BY_NAME["", "Secret"]
_MANY = ("ReadWriteMany",)
_ONE_NODE = ("ReadWriteMany", "ReadWriteOnce")
_to_do = partial(problem, severity="warning")


def cluster_problems(
    api: OperatorApi, answers: Answers, built: Sequence[Manifest], folder: Path, *, is_new: bool
) -> list[ConfigProblem]:
    """List what keeps the cluster from running an overlay.

    Args:
        folder: of the overlay, for what it suggests.
        is_new: the run's id must be free.
    Raises: Unavailable: the API is unreachable.
    """
    makes_namespace = any(entry["kind"] == "Namespace" for entry in built)
    namespace = api.read(f"/api/v1/namespaces/{api.namespace}", f"get namespace {api.namespace}")
    found = list(_may(lambda: _rooms(api, answers, built), "list nodes and pods", "whether nodes have the GPUs"))
    found += _may(
        lambda: _dns(api, built, folder), "get services", "whether pods may ask the cluster's DNS at its address"
    )
    if namespace is None:
        if not makes_namespace:
            found.append(_to_do("namespace", api.namespace, "does not exist yet", f"kubectl apply -k {folder / ONCE}"))
        return found
    if is_new:
        found += _may(lambda: _taken(api, answers.run), "list what makes pods", "whether the run's id is taken")
    found += _may(lambda: _claims(api, answers, built, folder), "get claims", "the claims")
    found += _may(lambda: _secrets(api, built), "get secrets", "the Secret of Redis")
    found += _may(lambda: _quotas(api, answers, built), "list resourcequotas", "whether quotas suffice for all pods")
    found += _may(lambda: _admission(api, built), "create pods", "whether the namespace admits the pods")
    return found


def _may(check: Callable[[], Iterator[ConfigProblem]], what: str, about: str) -> Iterator[ConfigProblem]:
    """Make a check, or report that this account may not."""
    try:
        yield from check()
    except PermissionDenied as error:
        yield _to_do(what, "", f"this account may not, so that {about} was not checked: {error}", "")


def dns_addresses(api: OperatorApi) -> list[str]:
    """Read the addresses of Service `kube-dns`; none: the cluster's DNS has another name. Raises: PermissionDenied."""
    service = api.read("/api/v1/namespaces/kube-system/services/kube-dns", "get service kube-system/kube-dns") or {}
    spec = service.get("spec", {})
    return [
        address for address in spec.get("clusterIPs") or [spec.get("clusterIP")] if address not in (None, "", "None")
    ]


def _dns(api: OperatorApi, built: Sequence[Manifest], folder: Path) -> Iterator[ConfigProblem]:
    """Compare the policies with where DNS is asked if NodeLocal DNSCache answers at the Service's address."""
    rules = [rule for item in built if item["kind"] == "NetworkPolicy" for rule in item["spec"].get("egress") or []]
    peers = [peer for rule in rules if _opens_dns(rule) for peer in rule.get("to") or []]
    blocks = [ip_network(peer["ipBlock"]["cidr"], strict=False) for peer in peers if "ipBlock" in peer]
    closed = [address for address in dns_addresses(api) if not any(ip_address(address) in block for block in blocks)]
    if rules and closed:
        text = f"is closed to {', '.join(closed)}, the cluster's DNS: with NodeLocal DNSCache no name would resolve"
        yield _to_do("NetworkPolicy", "dns", text, f"write {folder} again, online: tandem deploy new --force")


def _opens_dns(rule: Manifest) -> bool:
    ports = rule.get("ports") or []
    return not ports or any(port.get("port") in (None, 53) for port in ports)


def _rooms(api: OperatorApi, answers: Answers, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    """Compare the run's pods with the nodes, and with what the pods of others leave of them."""
    nodes = [NodeRoom.read(entry) for entry in api.read_all("/api/v1/nodes", "list nodes")]
    try:
        pods = api.read_all("/api/v1/pods", "list pods of all namespaces")
    except PermissionDenied as error:
        text = f"this account may not, so that nodes are taken to be empty: {error}"
        yield _to_do("list pods of all namespaces", "", text, "")
        pods = []
    own, about = (answers.run, api.namespace), [(pod, pod["metadata"]) for pod in pods]
    others = [pod for pod, data in about if ((data.get("labels") or {}).get(RUN_LABEL), data.get("namespace")) != own]
    yield from node_problems(built, nodes, others)


def _taken(api: OperatorApi, run: str) -> Iterator[ConfigProblem]:
    taken, refused = [], None
    for kind in MAKES_PODS:
        try:
            objects = api.find(kind, of_run(run))
        except PermissionDenied as error:
            refused = refused or error
            continue
        taken += [(kind, objects)] if objects else []
    if taken:
        what = "; ".join(f"{kind.name} {', '.join(names(objects))}" for kind, objects in taken)
        since = min(str(entry["metadata"].get("creationTimestamp", "?")) for _, objects in taken for entry in objects)
        text = f"is taken in namespace {api.namespace}: {what} since {since}"
        yield problem("RUN", run, text, f"another id; or tandem deploy delete {run}")
    elif refused is not None:
        raise refused


def _claims(api: OperatorApi, answers: Answers, built: Sequence[Manifest], folder: Path) -> Iterator[ConfigProblem]:
    modes = _MANY if answers.overlay == "cluster" else _ONE_NODE
    for name, use in claims_of(built).items():
        claim = api.get(CLAIM, name)
        if claim is not None:
            yield from _claim(name, claim, use, modes)
        elif answers.makes_claims:
            yield _to_do("claim", name, "does not exist yet", f"kubectl apply -k {folder / ONCE}")
        else:
            text = f"does not exist in namespace {api.namespace}"
            yield problem("claim", name, text, "--run-claim and --models-claim name claims that exist")
    if answers.storage_class:
        path = f"/apis/storage.k8s.io/v1/storageclasses/{answers.storage_class}"
        if api.read(path, f"get storageclass {answers.storage_class}") is None:
            yield problem("--storage-class", answers.storage_class, "does not exist", "kubectl get storageclasses")


def _claim(name: str, claim: Object, use: ClaimUse, modes: Sequence[str]) -> Iterator[ConfigProblem]:
    """Compare a claim with what pods do with it."""
    given = list(claim["spec"].get("accessModes") or [])
    wanted = [*modes, "ReadOnlyMany"] if use.writers == 0 else list(modes)
    if use.pods > 1 and not set(given) & set(wanted):
        text = f"has the mode {', '.join(given)}, but {use.pods} pods mount it and {use.writers} write"
        more = "" if modes == _ONE_NODE else "; the overlay single-node-gpu needs ReadWriteOnce only"
        yield problem("claim", name, text, f"a claim with {' or '.join(wanted)}{more}")
    if claim.get("status", {}).get("phase") == "Lost":
        yield problem("claim", name, "has lost its volume (phase Lost)", "bind it to a volume, or name another claim")


def _secrets(api: OperatorApi, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    made = {entry["metadata"]["name"] for entry in built if entry["kind"] == "Secret"}
    for name, keys in sorted(_secret_keys(built).items()):
        if name in made:
            continue
        secret = api.get(_SECRET, name)
        if secret is None:
            text = f"does not exist in namespace {api.namespace}: pods wait for it"
            yield _to_do("Secret", name, text, "docs/kubernetes.md says how it is made")
        elif missing := sorted(keys - set(secret.get("data") or {})):
            yield problem("Secret", name, f"has no key {', '.join(missing)}", "docs/kubernetes.md says how it is made")


def _secret_keys(built: Sequence[Manifest]) -> dict[str, set[str]]:
    """Find the Secrets that pods take variables or files from, and the keys; certificates are made by their issuer."""
    found: dict[str, set[str]] = {}
    for _, template, _ in templates(built):
        for container in template["spec"]["containers"]:
            for entry in container.get("env", []):
                source = entry.get("valueFrom", {}).get("secretKeyRef")
                if source is not None and not source.get("optional"):
                    found.setdefault(str(source["name"]), set()).add(str(source["key"]))
        for volume in template["spec"].get("volumes", []):
            secret = volume.get("secret", {})
            for item in secret.get("items") or []:
                found.setdefault(str(secret["secretName"]), set()).add(str(item["key"]))
    return found


def _quotas(api: OperatorApi, answers: Answers, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    own = [pod for pod in api.find(_POD, of_run(answers.run)) if not has_ended(pod)]
    quotas = api.read_all(f"/api/v1/namespaces/{api.namespace}/resourcequotas", "list resourcequotas")
    return quota_problems(built, quotas, own)


def _admission(api: OperatorApi, built: Sequence[Manifest]) -> Iterator[ConfigProblem]:
    """Let the API server say whether it would create the pods: PodSecurity, quotas, priority classes."""
    for name, template, _ in templates(built):
        try:
            api.create(_POD, _trial_pod(template), dry_run=True)
        except PermissionDenied as error:
            if "cannot create resource" in str(error):  # this account may not, which says nothing about the pods
                raise
            yield _refused(api.namespace, name, error)
        except InvalidRequest as error:
            yield problem(name, "", f"the API server refuses its pods: {_said(error)}", "correct its pod template")


def _refused(namespace: str, name: str, error: Exception) -> ConfigProblem:
    advice = f"kubectl describe namespace {namespace}: its pod-security labels and quotas"
    if "security context constraint" in str(error):
        advice = "--component openshift, whose page says what else there is"
    return problem(name, "", f"the namespace {namespace} does not admit its pods: {_said(error)}", advice)


def _said(error: Exception) -> str:
    """Return what the API server said, without what it was asked."""
    return str(error).partition(": ")[2] or str(error)


def _trial_pod(template: Manifest) -> Manifest:
    """Make a pod of a template; its service account may not exist yet, and its name is of no controller."""
    spec: dict[str, Any] = {key: value for key, value in template["spec"].items() if key != "serviceAccountName"}
    metadata = {"name": f"tandem-trial-{component_of(template)}", "labels": template["metadata"].get("labels", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
