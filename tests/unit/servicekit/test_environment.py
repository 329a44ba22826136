"""Where a service listens, and where it says that others reach it."""

import pytest

from servicekit.environment import ServiceEnvironment
from servicekit.errors import ConfigError

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
    assert environment.advertised("0.0.0.0:4711") == environment.advertised(4711) == advertised


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("name", ["TANDEM_BIND_HOST", "TANDEM_ADVERTISE_HOST"])
def test_an_address_that_nobody_can_connect_to_is_refused_by_name(name: str, host: str) -> None:
    with pytest.raises(ConfigError, match="TANDEM_ADVERTISE_HOST") as caught:
        read(**{name: host})
    assert f"{host} is an address to listen on" in str(caught.value)
    assert "status.podIP" in str(caught.value)


def test_an_address_with_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"TANDEM_ADVERTISE_HOST='10\.0\.0\.7:80' is wrong.*the port is added"):
        read(TANDEM_ADVERTISE_HOST="10.0.0.7:80")


@pytest.mark.parametrize("given", ["fd00::5", "fd00::5,fd00::6"])
def test_a_pod_without_an_ipv4_address_is_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match=f"TANDEM_ADVERTISE_HOST='{given}' is wrong.*IPv4"):
        read(TANDEM_ADVERTISE_HOST=given)


def test_the_rollout_set_may_be_named_outside_of_the_configuration() -> None:
    assert read().rollout_set == ""
    assert read(TANDEM_ROLLOUT_SET="my-run-rollout").rollout_set == "my-run-rollout"
    with pytest.raises(ConfigError, match="TANDEM_ROLLOUT_SET"):
        read(TANDEM_ROLLOUT_SET="My_Run")
