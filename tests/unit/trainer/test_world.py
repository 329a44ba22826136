"""Where the trainer's ranks listen for each other, and where torchrun says that they meet."""

import socket

import psutil
import pytest

from servicekit.errors import ConfigError
from trainer_service.ranks.world import Place, choose_interface, overlap_collectives


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_gloo_listens_on_the_interface_of_the_advertised_address(host: str) -> None:
    environ: dict[str, str] = {}
    choose_interface(host, environ)
    loopback = [each.address for each in psutil.net_if_addrs()[environ["GLOO_SOCKET_IFNAME"]]]
    assert "127.0.0.1" in loopback


def test_an_interface_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"GLOO_SOCKET_IFNAME": "ib0"}
    choose_interface("203.0.113.5", environ)
    assert environ == {"GLOO_SOCKET_IFNAME": "ib0"}


@pytest.mark.parametrize("host", ["203.0.113.5", "2001:db8::5"])
def test_an_address_of_another_machine_is_refused_by_name(host: str) -> None:
    with pytest.raises(ConfigError, match=f"{host} \\(TANDEM_ADVERTISE_HOST\\)"):
        choose_interface(host, {})


@pytest.mark.parametrize("given", ["fd00::5", "[fd00::5]"])
def test_a_master_address_may_have_brackets(given: str) -> None:
    place = Place.from_env({"MASTER_ADDR": given, "MASTER_PORT": "29500"})
    assert place.master == ("fd00::5", 29500)
    assert socket.inet_pton(socket.AF_INET6, place.master[0])


@pytest.mark.parametrize(
    ("generation", "given", "found"),
    [(9, None, "1"), (8, None, "1"), (9, "8", "8"), (10, None, None), (12, None, None), (0, None, None)],
)
def test_kernels_start_in_order_on_hopper_and_older(generation: int, given: str | None, found: str | None) -> None:
    environ = {} if given is None else {"CUDA_DEVICE_MAX_CONNECTIONS": given}
    overlap_collectives(environ, generation)
    assert environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == found
