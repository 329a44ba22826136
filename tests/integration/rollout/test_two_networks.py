"""An engine over two hosts that share neither loopback nor network: namespaces keep leader and worker apart.

Once with IPv4, once with IPv6 alone, as pods of a cluster without IPv4 have it: 127.0.0.1 is on loopback only.
As a module, this is what happens inside of the leader's network. Arguments: folder, Redis, namespace of the worker,
family.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from servicekit.addresses import join_address
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.models import logprobs, make_model
from tests.kit.replicas import Replica, Trainer, in_a_pod_at, lone_replica
from tests.networks import ENDS, WORKER_LINK, needs_ipv6, needs_namespaces, two_networks

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900), *needs_namespaces]

PROMPT = [7, 8, 9, 10] * 4
OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


@pytest.fixture(params=["ipv4", pytest.param("ipv6", marks=needs_ipv6)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def namespaces(family: str) -> Iterator[tuple[str, str]]:
    with two_networks(family) as names:
        yield names


def test_ranks_on_another_network_are_synced_by_messages_and_a_cut_ends_both(
    tmp_path: Path, namespaces: tuple[str, str], family: str, redis_server: str
) -> None:
    story = [
        sys.executable,
        "-m",
        "tests.integration.rollout.test_two_networks",
        str(tmp_path),
        redis_server,
        namespaces[1],
        family,
    ]
    told = subprocess.run(
        ["ip", "netns", "exec", namespaces[0], *story], capture_output=True, text=True, timeout=800, check=False
    )
    assert told.returncode == 0, told.stderr[-5000:]


def main(folder: Path, redis_url: str, namespace: str, family: str) -> None:
    """Raises: AssertionError: what was not as it should be."""
    here, there = ENDS[family]
    model = make_model(folder / "m")
    leader = lone_replica(folder, model, redis_url, in_a_pod_at(here), tensor_parallel=2, nodes=2)
    worker = leader.start_worker(1, in_a_pod_at(there), ["ip", "netns", "exec", namespace, *OWN_SHM])
    try:
        trainer = Trainer(leader.wait_up(), here)
        sync(leader, trainer, model)
        trainer.close()
        subprocess.run(["ip", "-n", namespace, "link", "set", WORKER_LINK, "down"], check=True, timeout=20)
        both_end(leader, worker, there)
    finally:
        leader.close()


def sync(leader: Replica, trainer: Trainer, model: Path) -> None:
    """Rank 0 is on the trainer's host, rank 1 is not: all take the transport that serves both."""
    trainer.load(model)
    reports = trainer.publish(1, transport=pb.SYNC_TRANSPORT_AUTO)[pb.ROUND_PHASE_TRANSFER].reports
    assert [report.transport for report in reports] == ["collective", "collective"], reports
    with pytest.raises(grpc.RpcError, match="not on the host of trainer/0: rollout-0/1"):
        trainer.publish(2, transport=pb.SYNC_TRANSPORT_COLOCATED)
    trainer.publish(3, install_mode=pb.INSTALL_MODE_STAGED)
    (group,) = leader.generate([PROMPT], temperature=0.0, max_new_tokens=8, version=3)
    ids = list(group.completions[0].token_ids)
    assert ids == logprobs(model, PROMPT, ids, 1.0).argmax(-1).tolist(), ids


def both_end(leader: Replica, worker: Replica, there: str) -> None:
    """Nobody was killed: the link between them is cut."""
    assert (leader.process.wait(timeout=90), worker.process.wait(timeout=90)) == (1, 1)
    lost = f"host 1 of rollout-0 (rollout-0-host-1 at {join_address(there, '')}"
    assert lost in leader.log.read_text(encoding="utf-8")
    assert "the leader of rollout-0 is lost: no beat for 15 s" in worker.log.read_text(encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4])
