"""Default deny, and the documented flows: every port is in a policy, every policy's port is somebody's."""

import re
from ipaddress import ip_network

import pytest

from servicekit.addresses import any_host
from servicekit.environment import ServiceEnvironment
from tests.house.repository import REPO
from tests.manifests.kustomize import (
    OVERLAYS,
    VARIANTS,
    Manifest,
    component_of,
    environment,
    kinds,
    overlay,
    pod_templates,
)

# The node itself probes, and is let through; no policy can name it.
FROM_THE_NODE = {"health"}
# Of torch, gloo and NCCL: the system picks them from the range that the pods set.
PICKED = ("trainer", "rollout", "rollout-worker")
DNS, KUBERNETES_API, EXTERNAL_REDIS, OTLP = {53, 5353}, {443, 6443, 8443, 16443}, {6379, 6380}, {4317, 4318}

Flow = tuple[str, str, str]  # (from, to, port or range)


@pytest.fixture(params=["base", *OVERLAYS, *VARIANTS])
def manifests(request: pytest.FixtureRequest) -> tuple[Manifest, ...]:
    return overlay(request.param)


def components(selector: Manifest) -> set[str]:
    """The app.kubernetes.io/component values that a pod selector takes."""
    key = "app.kubernetes.io/component"
    found = {selector["matchLabels"][key]} if key in selector.get("matchLabels", {}) else set()
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        assert expression["key"] in (key, "k8s-app")
        found |= set(expression["values"] if expression["key"] == key else ())
    return found


def port_name(port: Manifest) -> str:
    return f"{port['port']}-{port['endPort']}" if "endPort" in port else str(port["port"])


def flows(manifests: tuple[Manifest, ...], direction: str) -> set[Flow]:
    """Flows between our own pods that the policies allow on this side ("ingress" or "egress")."""
    found = set()
    for policy in kinds(manifests, "NetworkPolicy"):
        own = components(policy["spec"]["podSelector"])
        for rule in policy["spec"].get(direction, []):
            peers = rule.get("from" if direction == "ingress" else "to", [])
            others = set().union(*(components(peer.get("podSelector", {})) for peer in peers))
            for port in rule["ports"]:
                pairs = [(other, mine) if direction == "ingress" else (mine, other) for other in others for mine in own]
                found |= {(*pair, port_name(port)) for pair in pairs}
    return found


def test_everything_is_denied_first(manifests: tuple[Manifest, ...]) -> None:
    denials = [
        each["spec"]
        for each in kinds(manifests, "NetworkPolicy")
        if not each["spec"].get("ingress") and not each["spec"].get("egress")
    ]
    (denial,) = denials
    assert denial["policyTypes"] == ["Ingress", "Egress"]
    wanted = denial["podSelector"]["matchLabels"]
    assert set(wanted) == {"app.kubernetes.io/name", "tandem.run/id"}
    for owner, template in pod_templates(manifests).items():
        assert wanted.items() <= template["metadata"]["labels"].items(), owner


def test_both_sides_of_a_flow_are_open(manifests: tuple[Manifest, ...]) -> None:
    ours = set(map(component_of, pod_templates(manifests).values()))
    ingress = {flow for flow in flows(manifests, "ingress") if flow[0] in ours}
    assert ingress == flows(manifests, "egress")


def test_every_port_is_in_a_policy(manifests: tuple[Manifest, ...]) -> None:
    open_ports: dict[str, set[str]] = {}
    for policy in kinds(manifests, "NetworkPolicy"):
        for rule in policy["spec"].get("ingress", []):
            for component in components(policy["spec"]["podSelector"]):
                open_ports.setdefault(component, set()).update(port_name(port) for port in rule["ports"])
    for template in pod_templates(manifests).values():
        component = component_of(template)
        (container,) = template["spec"]["containers"]
        declared = {str(p["containerPort"]) for p in container["ports"] if p["name"] not in FROM_THE_NODE}
        picked = {picked_range(template)} if component in PICKED else set()
        assert open_ports[component] == declared | picked, component


def picked_range(template: Manifest) -> str:
    (sysctl,) = template["spec"]["securityContext"]["sysctls"]
    assert sysctl["name"] == "net.ipv4.ip_local_port_range"
    return str(sysctl["value"]).replace(" ", "-")


def test_the_picked_range_is_clear_of_the_fixed_ports(manifests: tuple[Manifest, ...]) -> None:
    """Or gloo could take 50051 before the service binds it."""
    for template in pod_templates(manifests).values():
        if component_of(template) in PICKED:
            first, last = map(int, picked_range(template).split("-"))
            ports = [port["containerPort"] for port in template["spec"]["containers"][0]["ports"]]
            assert not [port for port in ports if first <= port <= last]


def test_beyond_the_namespace_there_is_dns_and_the_api(manifests: tuple[Manifest, ...]) -> None:
    outward: dict[str, set[int]] = {}
    for policy in kinds(manifests, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            inside = [peer for peer in rule.get("to", []) if set(peer) == {"podSelector"}]
            if not inside:
                outward.setdefault(policy["metadata"]["name"], set()).update(p["port"] for p in rule["ports"])
    redis = outward.pop("external-redis", EXTERNAL_REDIS)
    assert outward.pop("tracing", OTLP) == OTLP
    assert outward == {"dns": DNS, "coordinator": KUBERNETES_API}
    assert redis == EXTERNAL_REDIS


@pytest.mark.parametrize(
    ("pod_ips", "address"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("fd00::5,10.0.0.7", "10.0.0.7"),
        ("10.0.0.7,fd00::5", "10.0.0.7"),
        ("fd00::5", "[fd00::5]"),
    ],
)
def test_pods_of_every_family_of_addresses_are_reached(
    manifests: tuple[Manifest, ...], pod_ips: str, address: str
) -> None:
    """The kubelet's own probes come to the first of a pod's addresses, whichever of them the services name."""
    seen = set()
    for template in pod_templates(manifests).values():
        (container,) = template["spec"]["containers"]
        variables = environment(container)
        if "TANDEM_ADVERTISE_HOST" in variables:
            seen.add(component_of(template))
            assert variables["TANDEM_ADVERTISE_HOST"]["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIPs"}}
            given = {"REDIS_URL": "redis://redis:6379", "TANDEM_RUN_ID": "demo", "TANDEM_RUN_DIR": "/tmp"}
            given["TANDEM_BIND_HOST"] = str(variables["TANDEM_BIND_HOST"]["value"])
            read = ServiceEnvironment.from_env({**given, "TANDEM_ADVERTISE_HOST": pod_ips})
            assert read.advertised(50051) == f"{address}:50051"
            assert read.bind_host == any_host()
    assert seen >= {"coordinator", "trainer", "rollout"}


def test_services_and_policies_are_of_no_one_family(manifests: tuple[Manifest, ...]) -> None:
    """A Service gets the cluster's first family; a policy that names addresses beyond a node names those of both."""
    for service in kinds(manifests, "Service"):
        assert not {"ipFamilies", "ipFamilyPolicy"} & set(service["spec"]), service["metadata"]["name"]
    for policy in kinds(manifests, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            blocks = [ip_network(peer["ipBlock"]["cidr"]) for peer in rule.get("to", []) if "ipBlock" in peer]
            beyond = {block.version for block in blocks if not block.is_link_local}
            assert beyond in (set(), {4, 6}), policy["metadata"]["name"]


def test_the_document_lists_the_flows() -> None:
    text = (REPO / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\w+) \| (\w+) \| ([\d-]+) \|", text, flags=re.MULTILINE)
    assert set(rows) == flows(overlay("base"), "ingress")
