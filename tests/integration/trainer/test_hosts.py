"""A trainer on two hosts, as pods start it: every rank at MASTER_ADDR, probes on both, all or none."""

import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from servicekit.environment import ServiceEnvironment
from servicekit.redis.registry import Registry
from servicekit.rpc.probe import probe
from tests.integration.trainer.processes import RUN_ID, TrainerProcesses
from tests.kit.processes import END_S, START_S, free_port
from tests.kit.waiting import until
from trainer_service.ranks.world import Place, meet

pytestmark = pytest.mark.integration
STORE_S = 30.0


class Hosts(TrainerProcesses):
    """`python -m trainer_service.host` twice, with one rank each."""

    def __init__(self, redis_url: str, folder: Path, model: Path) -> None:
        super().__init__(redis_url, folder, model, tensor_parallel=2)
        self._master = str(free_port())
        self.health = [str(free_port()), str(free_port())]

    def start_host(self, host: int, *options: str) -> None:
        variables = {
            "TANDEM_HEALTH_PORT": self.health[host],
            "TANDEM_HOST_INDEX": str(host),
            "TANDEM_RANKS_PER_HOST": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": self._master,
        }
        self.start(f"host-{host}", ["trainer_service.host", "--resume", *options], self.config, variables)

    def says(self, host: int, what: str) -> bool:
        """Whether the host's probe succeeds. Raises: AssertionError: its process has ended."""
        name = f"host-{host}"
        assert self.processes[name].poll() is None, self.tail(name)
        return probe(what, {"TANDEM_HEALTH_PORT": self.health[host]}, timeout_s=1.0) == ""

    def kill_rank(self, host: int) -> None:
        """SIGKILL to the host's rank, not to what started it."""
        pid = self.processes[f"host-{host}"].pid
        (rank,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(rank), signal.SIGKILL)


@pytest.fixture
def hosts(redis_server: str, tiny_model: Path, tmp_path: Path) -> Iterator[Hosts]:
    both = Hosts(redis_server, tmp_path, tiny_model)
    yield both
    both.close(patience_s=END_S)


@pytest.mark.slow
def test_two_hosts_start_together_and_start_again_together(hosts: Hosts) -> None:
    # The follower is first, and alive while it waits: a pod whose peers are late must not be ended for it.
    hosts.start_host(1)
    until(lambda: hosts.says(1, "liveness"), START_S)
    assert not hosts.says(1, "readiness")
    hosts.start_host(0)
    for host in (0, 1):
        until(partial(hosts.says, host, "readiness"), START_S)

    # One rank dies: its host says so at once, and no rank goes on without it.
    hosts.kill_rank(1)
    assert hosts.exit_codes(["host-1"]) == [128 + signal.SIGKILL]
    # As the kubelet does: the host that has ended is started again, while rank 0 of the old start may still serve.
    hosts.start_host(1)
    assert hosts.exit_codes(["host-0"]) == [1]
    hosts.start_host(0, "--interrupted-exit", "143")
    for host in (0, 1):
        until(partial(hosts.says, host, "readiness"), START_S)

    assert hosts.stop(["host-0", "host-1"]) == [143, 0]


def test_the_store_of_an_earlier_start_is_left(redis_server: str, tmp_path: Path) -> None:
    """Rank 1 is started again before rank 0 has noticed that its predecessor is gone."""
    environment = ServiceEnvironment.from_env(
        {"REDIS_URL": redis_server, "TANDEM_RUN_ID": RUN_ID, "TANDEM_RUN_DIR": str(tmp_path)}
    )
    port = free_port()
    place = Place(rank=1, world_size=2, local_rank=0, master=("localhost", port))
    registry = Registry(redis_server, RUN_ID)
    old = [dist.TCPStore("localhost", port, 2, True, timedelta(seconds=STORE_S), wait_for_workers=False)]
    assert old[0].add("joined/1", 1) == 1
    found: list[dist.TCPStore] = []
    looking = threading.Thread(target=lambda: found.append(meet(place, registry, environment, STORE_S)), daemon=True)
    looking.start()
    # It has been there, and has seen that its rank is taken.
    until(lambda: old[0].add("joined/1", 0) >= 2, STORE_S)
    assert found == []
    old.clear()  # and its port is free
    new = dist.TCPStore("localhost", port, 2, True, timedelta(seconds=STORE_S), wait_for_workers=False)
    new.set("which", "new")
    looking.join(STORE_S)
    registry.close()
    assert found[0].get("which") == b"new"
