"""Finds the network interface of a host's address, since gloo listens on an interface, not at an address."""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

import psutil

from servicekit.errors import ConfigError


class InterfaceAddress(Protocol):
    """An address of an interface, as psutil lists it."""

    @property
    def family(self) -> socket.AddressFamily:
        """Family: IPv4, IPv6 or that of the link."""

    @property
    def address(self) -> str:
        """The address as text."""


def resolve(host: str) -> str:
    """Return the IPv4 address of a host name or address. Raises: ConfigError: the name cannot be resolved."""
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise ConfigError(f"TANDEM_ADVERTISE_HOST={host} has no IPv4 address: {error}") from None


def interface_of(address: str, interfaces: Mapping[str, Sequence[InterfaceAddress]] | None = None) -> str:
    """Return the name of the interface with an IPv4 address; 127.0.0.2 is on that of 127.0.0.1.

    Raises: ConfigError: no interface of this host has it.
    """
    loopback = ipaddress.ip_address(address).is_loopback
    held = psutil.net_if_addrs() if interfaces is None else interfaces
    for name, addresses in held.items():
        for entry in addresses:
            if entry.family == socket.AF_INET and entry.address == ("127.0.0.1" if loopback else address):
                return name
    raise ConfigError(
        f"no network interface of this host has the address {address} (TANDEM_ADVERTISE_HOST), so SGLang's ranks could "
        f"not reach each other; set it to one of this host, or GLOO_SOCKET_IFNAME to the interface that leads to it"
    )
