"""Addresses as text: `host:port`, an IPv6 host in brackets ([fd00::5]:50051), as gRPC and URLs have them.

Of a machine with addresses of both families the IPv4 one is taken, so that all processes of a run take the same.
"""

import socket
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv6Address

# To listen on: every address of this machine, of the families that it has.
ANY = "*"
# What that becomes: valid to listen on, not to connect to. The first takes IPv4 as well.
WILDCARDS = ("::", "0.0.0.0")
LOOPBACK = "127.0.0.1"


def join_address(host: str, port: int | str) -> str:
    """Return the address as text.

    >>> join_address("fd00::5", 50051), join_address("10.0.0.7", 50051)
    ('[fd00::5]:50051', '10.0.0.7:50051')
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port.

    >>> split_address("[fd00::5]:50051"), split_address("rollout-0.rollout:50051")
    (('fd00::5', 50051), ('rollout-0.rollout', 50051))

    Raises: ValueError: it has no host, no port from 0 to 65535, or an IPv6 host without brackets.
    """
    host, _, port = address.rpartition(":")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{address!r} is no host:port; an IPv6 address is in brackets: [fd00::5]:50051")
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise ValueError(f"{address!r} has no port from 0 to 65535 at its end; write host:port")
    return check_host(host), int(port)


def check_host(host: str) -> str:
    """Return a host name or address without brackets, IPv6 in its shortest form.

    >>> check_host("[FD00:0::5]")
    'fd00::5'

    Raises: ValueError: it is empty, has a port or a path, or an IPv6 address that it holds is malformed or has a scope.
    """
    name = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if "%" in name:
        raise ValueError(f"{host!r} has a scope (%), which is of one machine only; give an address without one")
    if ":" in name or name != host:
        try:
            return str(IPv6Address(name))
        except AddressValueError as error:
            raise ValueError(f"{host!r} is not a host name or an address ({error}); the port is added") from None
    if not name or any(mark in name for mark in " /,[]"):
        raise ValueError(f"{host!r} is not a host name or an address")
    return name


def reached_at(hosts: Sequence[str]) -> str:
    """Choose one of a machine's addresses: the first of IPv4, else the first of IPv6.

    >>> reached_at(["fd00::5", "10.0.0.7"])
    '10.0.0.7'
    """
    return min(hosts, key=lambda host: ":" in host)


def resolve(host: str) -> str:
    """Return the address of a host name, as reached_at() chooses; that of an address is itself. Raises: OSError."""
    return reached_at([str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)])


def listen(host: str, port: int = 0) -> socket.socket:
    """Listen on a host name or address; on `::` for IPv4 as well, whatever net.ipv6.bindv6only says.

    Raises: OSError: the address is in use or not one of this machine.
    """
    address = resolve(host)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, port), family=family, dualstack_ipv6=address == "::")


def any_host() -> str:
    """Return what ANY is here: `::`, or 0.0.0.0 where the kernel has no IPv6 (booted with ipv6.disable=1)."""
    for host in WILDCARDS:
        try:
            listen(host).close()
        except OSError:
            continue
        return host
    return WILDCARDS[-1]
