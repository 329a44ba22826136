"""Networks of a test's own: which families of addresses this machine has, and namespaces with one of them alone."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest

FAMILIES = ("ipv4", "ipv6")
WORKER_LINK = "worker-end"
# Of the two ends, by family.
ENDS = {"ipv4": ("10.77.0.1", "10.77.0.2"), "ipv6": ("fd77::1", "fd77::2")}
_PREFIX = {"ipv4": ["24"], "ipv6": ["64", "nodad"]}  # nodad: usable at once, not after a second


def has_ipv6() -> bool:
    """Whether ::1 can be listened on: containers often have no IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 address (::1)")
needs_namespaces = [
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need the command ip (iproute2)"),
]


@contextlib.contextmanager
def two_networks(family: str) -> Iterator[tuple[str, str]]:
    """Make two network namespaces with a link between them and none to this machine's own network.

    Each has loopback with both families, and an interface with addresses of `family` alone, ENDS.

    Returns: their names. Skips the test where they are not allowed.
    """
    names = (f"tandem-{os.getpid()}-a", f"tandem-{os.getpid()}-b")
    try:
        _ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode()}")
    try:
        _ip("netns", "add", names[1])
        links = ("leader-end", WORKER_LINK)
        _ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
        length, *options = _PREFIX[family]
        for name, link, address in zip(names, links, ENDS[family], strict=True):
            _ip("-n", name, "address", "add", f"{address}/{length}", "dev", link, *options)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


# A command that runs the command after it in a network of its own, whose kernel has IPv6 and no address of it: on many
# nodes net.ipv6.conf.all.disable_ipv6 is 1.
NO_IPV6_ADDRESS = (
    *("unshare", "--net", "sh", "-c"),
    'echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6 && ip link set lo up && exec "$@"',
    "sh",
)
