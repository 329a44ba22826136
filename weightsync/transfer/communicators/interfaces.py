"""Finds the network interface of a host's address, because gloo listens on an interface, not at an address."""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from servicekit.addresses import resolve
from servicekit.errors import ConfigError

# Where gloo's default groups listen: those of torch.distributed, Megatron and SGLang.
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACKS = ("127.0.0.1", "::1")


def address_of(host: str) -> str:
    """Return the address of a host name or address, as servicekit.addresses.resolve.

    Raises: ConfigError: the name cannot be resolved.
    """
    try:
        return resolve(host)
    except OSError as error:
        raise ConfigError(f"TANDEM_ADVERTISE_HOST={host} has no address: {error}") from None


def interface_of(address: str, interfaces: Mapping[str, Sequence[Any]] | None = None) -> str:
    """Return the name of the interface with an address; 127.0.0.2 is on that of 127.0.0.1.

    gloo takes the first address of an interface: one of IPv4 if it has any, else a global one of IPv6 before that of
    the link.

    Raises: ConfigError: no interface of this host has it.
    """
    wanted = _LOOPBACKS if ipaddress.ip_address(address).is_loopback else (address,)
    held = psutil.net_if_addrs() if interfaces is None else interfaces
    for name, addresses in held.items():
        if any(entry.address in wanted for entry in addresses):
            return name
    raise ConfigError(
        f"no network interface of this host has the address {address} (TANDEM_ADVERTISE_HOST), so other hosts could "
        f"not reach its ranks; set it to one of this host, or {GLOO_INTERFACE} to the interface that leads to it"
    )
