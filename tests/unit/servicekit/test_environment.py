"""Where a service listens, and where it says that others reach it."""

import re

import pytest

from servicekit.addresses import any_host, join_address
from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError
from tests.networks import needs_ipv6

GOOD = {"REDIS_URL": "redis://127.0.0.1:6379", "TANDEM_RUN_ID": "demo-1", "TANDEM_RUN_DIR": "/tmp"}


def read(**variables: str) -> ServiceEnvironment:
    return ServiceEnvironment.from_env({**GOOD, **variables})


@pytest.mark.parametrize(
    ("variables", "bind", "advertised"),
    [
        ({}, "127.0.0.1:0", "127.0.0.1:4711"),
        ({"TANDEM_BIND_HOST": "10.0.0.7"}, "10.0.0.7:0", "10.0.0.7:4711"),
        ({"TANDEM_BIND_HOST": "0.0.0.0", "TANDEM_ADVERTISE_HOST": "10.0.0.7"}, "0.0.0.0:0", "10.0.0.7:4711"),
        # status.podIPs of a cluster with two families, whichever comes first.
        ({"TANDEM_ADVERTISE_HOST": "fd00::5,10.0.0.7"}, "127.0.0.1:0", "10.0.0.7:4711"),
        ({"TANDEM_ADVERTISE_HOST": "10.0.0.7,fd00::5"}, "127.0.0.1:0", "10.0.0.7:4711"),
        # Of one with IPv6 alone.
        ({"TANDEM_ADVERTISE_HOST": "fd00::5"}, "127.0.0.1:0", "[fd00::5]:4711"),
        ({"TANDEM_ADVERTISE_HOST": "FD00:0::5, fd00::6"}, "127.0.0.1:0", "[fd00::5]:4711"),
        ({"TANDEM_BIND_HOST": "fd00::5"}, "[fd00::5]:0", "[fd00::5]:4711"),
        ({"TANDEM_BIND_HOST": "[::1]"}, "[::1]:0", "[::1]:4711"),
        ({"TANDEM_ADVERTISE_HOST": "rollout-0.rollout.ns.svc"}, "127.0.0.1:0", "rollout-0.rollout.ns.svc:4711"),
        # As a manifest writes a variable that has no value.
        ({"TANDEM_ADVERTISE_HOST": ""}, "127.0.0.1:0", "127.0.0.1:4711"),
    ],
)
def test_the_advertised_host_is_the_bind_host_unless_given(
    variables: dict[str, str], bind: str, advertised: str
) -> None:
    environment = read(**variables)
    assert environment.bind == bind
    for bound in ("0.0.0.0:4711", "[::]:4711", 4711):
        assert environment.advertised(bound) == advertised


def test_a_pod_listens_on_every_address_that_it_has() -> None:
    environment = read(TANDEM_BIND_HOST="*", TANDEM_ADVERTISE_HOST="10.0.0.7", TANDEM_HEALTH_PORT="8081")
    assert environment.bind_host == any_host()
    assert environment.bind == join_address(any_host(), 0)
    assert environment.health_bind == join_address(any_host(), 8081)


def test_ipv6_that_the_kernel_does_not_have_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servicekit.environment.any_host", lambda: "0.0.0.0")
    with pytest.raises(ConfigError, match=r"TANDEM_BIND_HOST='::' is wrong.*no IPv6; \* is every address"):
        read(TANDEM_BIND_HOST="::", TANDEM_ADVERTISE_HOST="10.0.0.7")
    assert read(TANDEM_BIND_HOST="*", TANDEM_ADVERTISE_HOST="10.0.0.7").bind_host == "0.0.0.0"


@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("::", marks=needs_ipv6)])
@pytest.mark.parametrize("name", ["TANDEM_BIND_HOST", "TANDEM_ADVERTISE_HOST"])
def test_an_address_that_nobody_can_connect_to_is_refused_by_name(name: str, host: str) -> None:
    with pytest.raises(ConfigError, match="TANDEM_ADVERTISE_HOST") as caught:
        read(**{name: host})
    assert f"{host} is an address to listen on" in str(caught.value)
    assert "status.podIP" in str(caught.value)


@pytest.mark.parametrize("name", ["TANDEM_BIND_HOST", "TANDEM_ADVERTISE_HOST"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("10.0.0.7:80", "the port is added"),
        ("[fd00::5]:80", "the port is added"),
        ("fd00::5::6", "not a host name or an address"),
        ("fe80::1%eth0", "has a scope"),
        ("http://coordinator", "not a host name or an address"),
    ],
)
def test_what_is_no_host_is_refused_by_name(name: str, given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={re.escape(repr(given))} is wrong.*{said}"):
        read(**{name: given})


@pytest.mark.parametrize("given", ["fe80::1", "fe80::1,fd00::5", "10.0.0.7,"])
def test_an_address_that_no_other_machine_can_use_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=f"TANDEM_ADVERTISE_HOST='{given}' is wrong"):
        read(TANDEM_ADVERTISE_HOST=given)


def test_the_rollout_set_may_be_named_outside_of_the_configuration() -> None:
    assert read().rollout_set == ""
    assert read(TANDEM_ROLLOUT_SET="my-run-rollout").rollout_set == "my-run-rollout"
    with pytest.raises(ConfigError, match="TANDEM_ROLLOUT_SET"):
        read(TANDEM_ROLLOUT_SET="My_Run")
