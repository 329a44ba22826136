"""An engine over two hosts that share neither loopback nor network: namespaces keep leader and worker apart."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.rollout.two_networks import LEADER, WORKER, WORKER_LINK

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need the command ip (iproute2)"),
]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a link between them and none to this machine's own network."""
    names = (f"tandem-{os.getpid()}-a", f"tandem-{os.getpid()}-b")
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not allowed here: {error.stderr.decode()}")
    try:
        ip("netns", "add", names[1])
        ends = ("leader-end", WORKER_LINK)
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, (LEADER, WORKER), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=20)


def test_ranks_on_another_network_are_synced_by_messages_and_a_cut_ends_both(
    tmp_path: Path, namespaces: tuple[str, str], redis_server: str
) -> None:
    story = [sys.executable, "-m", "tests.integration.rollout.two_networks", str(tmp_path), redis_server, namespaces[1]]
    told = subprocess.run(
        ["ip", "netns", "exec", namespaces[0], *story], capture_output=True, text=True, timeout=500, check=False
    )
    assert told.returncode == 0, told.stderr[-5000:]
