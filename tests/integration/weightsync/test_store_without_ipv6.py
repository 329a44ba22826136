"""A store on every address, where `::` can be listened on and no address of IPv6 exists. As a module: makes it."""

import subprocess
import sys
from datetime import timedelta

import pytest

from servicekit.addresses import any_host
from tests.networks import NO_IPV6_ADDRESS, has_ipv6, needs_namespaces
from weightsync.transfer.communicators.tcp_store import bound_store

pytestmark = [pytest.mark.integration, *needs_namespaces]


def test_the_store_of_a_pod_is_reached_by_its_own_process() -> None:
    story = [*NO_IPV6_ADDRESS, sys.executable, "-m", "tests.integration.weightsync.test_store_without_ipv6"]
    told = subprocess.run(story, capture_output=True, text=True, timeout=120, check=False)
    if told.returncode != 0 and "unshare" in told.stderr:
        pytest.skip(f"network namespaces are not allowed here: {told.stderr}")
    assert told.returncode == 0, told.stderr[-3000:]
    assert told.stdout.split() == ["False", "::", "value"]


if __name__ == "__main__":
    store, _ = bound_store(any_host(), 10.0)
    store.set_timeout(timedelta(seconds=10))
    store.set("key", "value")
    print(has_ipv6(), any_host(), store.get("key").decode())
