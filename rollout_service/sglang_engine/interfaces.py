"""Which network interface a host's address is on: gloo listens on an interface, not at an address."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import psutil

from servicekit.errors import ConfigError


class InterfaceAddress(Protocol):
    """What psutil tells of an address."""

    @property
    def family(self) -> socket.AddressFamily:
        """IPv4, IPv6, a link's own."""

    @property
    def address(self) -> str:
        """As text."""


def resolve(host: str) -> str:
    """The IPv4 address of a host name, or the address itself. Raises: ConfigError: the name is unknown here."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"TANDEM_ADVERTISE_HOST={host} has no IPv4 address here: {error}") from None


def interface_of(address: str, interfaces: Mapping[str, Sequence[InterfaceAddress]] | None = None) -> str:
    """Name of the interface that holds an IPv4 address; 127.0.0.2 is on the one of 127.0.0.1.

    Raises: ConfigError: no interface of this host has it.
    """
    loopback = ipaddress.ip_address(address).is_loopback
    held = psutil.net_if_addrs() if interfaces is None else interfaces
    for name, addresses in held.items():
        for each in addresses:
            if each.family == socket.AF_INET and each.address == ("127.0.0.1" if loopback else address):
                return name
    raise ConfigError(
        f"no network interface of this host has the address {address} (TANDEM_ADVERTISE_HOST), so SGLang's ranks could "
        f"not reach each other; set it to one of this host, or GLOO_SOCKET_IFNAME to the interface that leads to it"
    )
