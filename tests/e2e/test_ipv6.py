"""A whole run with IPv6 alone: Redis, two ranks of the real trainer, a real engine, the coordinator and its pages.

On ::1; and, where namespaces are allowed, as the pods of a cluster without IPv4: on a network with nothing but IPv6,
where services listen on every address that there is. As a module, this is a run. Arguments: folder, its address.
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from servicekit.addresses import join_address, split_address
from servicekit.redis.records import PAGE_URL
from tandem_config.loading import load_config
from tests.e2e.conftest import EXAMPLE, SMALL, rows_of
from tests.kit.processes import Services, free_port
from tests.kit.redis import RedisProcess
from tests.kit.replicas import at, in_a_pod_at
from tests.networks import ENDS, needs_ipv6, needs_namespaces, two_networks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900), needs_ipv6]
RUN_ID, RUN_S = "ipv6", 240.0
SETTINGS = {
    **SMALL,
    "run.name": RUN_ID,
    "trainer.tensor_parallel": 2,  # so that its ranks have something to say to each other
}


@pytest.mark.slow
def test_a_run_on_ipv6_loopback_goes_to_its_end(tmp_path: Path) -> None:
    run_at("::1", at("::1"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("_", [pytest.param(0, marks=needs_namespaces, id="pods")])
def test_a_run_of_pods_without_ipv4_goes_to_its_end(tmp_path: Path, _: int) -> None:
    story = [sys.executable, "-m", "tests.e2e.test_ipv6", str(tmp_path), ENDS["ipv6"][0]]
    with two_networks("ipv6") as names:
        told = subprocess.run(
            ["ip", "netns", "exec", names[0], *story], capture_output=True, text=True, timeout=550, check=False
        )
    assert told.returncode == 0, told.stderr[-5000:]


def run_at(address: str, where: dict[str, str], folder: Path) -> None:
    """Run the smallest job. Raises: AssertionError: what was not as it should be."""
    config = load_config(EXAMPLE, [f"{key}={value}" for key, value in SETTINGS.items()])
    endpoint = (address, free_port())
    with RedisProcess("secret", tcp=endpoint):
        services = Services(f"redis://:secret@{join_address(*endpoint)}/0", folder, RUN_ID, where)
        try:
            services.start("coordinator", ["coordinator"], config, {"TANDEM_WEB_PORT": "0"})
            coordinator = services.record_of("coordinator", "coordinator")
            check_pages(services, coordinator.metrics_address)
            services.start_trainer(config)
            services.start_rollout("rollout-0", config)
            found = [services.address_of("rollout", "rollout-0"), services.address_of("trainer", "trainer")]
            assert {split_address(each)[0] for each in (*found, coordinator.address)} == {address}
            assert services.processes["coordinator"].wait(RUN_S) == 0, services.tail("coordinator")
            rows = rows_of(services.run_dir)
            assert [row["iteration"] for row in rows if row["iteration"]] == [1, 2]
            # The engine had the trainer's weights: they came over this network.
            assert all(row["logprob_abs_diff_max"] <= 1e-4 for row in rows if row["iteration"])
        finally:
            services.close(patience_s=20.0)


def check_pages(services: Services, metrics: str) -> None:
    """The page and the metrics are where the coordinator says."""
    registry = services.registry
    page = registry.wait_value(PAGE_URL, 60.0)
    registry.close()
    assert page.startswith("http://[")
    assert "run.json" in read(page) or "<html" in read(page)
    assert json.loads(read(f"{page}run.json"))["run"] == RUN_ID
    assert "tandem_" in read(f"http://{metrics}/metrics")


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as reply:
        text: str = reply.read().decode()
    return text


if __name__ == "__main__":
    run_at(sys.argv[2], in_a_pod_at(sys.argv[2]), Path(sys.argv[1]))
