"""An engine over two hosts that share neither loopback nor network: namespaces keep leader and worker apart.

As a module, this is what happens inside of the leader's network. Arguments: folder, Redis, namespace of the worker.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.models import logprobs, make_model
from tests.kit.replicas import Replica, Trainer, at, lone_replica

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need the command ip (iproute2)"),
]

LEADER, WORKER = "10.77.0.1", "10.77.0.2"
WORKER_LINK = "worker-end"
PROMPT = [7, 8, 9, 10] * 4
OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


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
    story = [
        sys.executable,
        "-m",
        "tests.integration.rollout.test_two_networks",
        str(tmp_path),
        redis_server,
        namespaces[1],
    ]
    told = subprocess.run(
        ["ip", "netns", "exec", namespaces[0], *story], capture_output=True, text=True, timeout=500, check=False
    )
    assert told.returncode == 0, told.stderr[-5000:]


def main(folder: Path, redis_url: str, namespace: str) -> None:
    """Raises: AssertionError: what was not as it should be."""
    model = make_model(folder / "m")
    leader = lone_replica(folder, model, redis_url, at(LEADER), tensor_parallel=2, nodes=2)
    worker = leader.start_worker(1, WORKER, ["ip", "netns", "exec", namespace, *OWN_SHM])
    try:
        trainer = Trainer(leader.wait_up(), LEADER)
        sync(leader, trainer, model)
        trainer.close()
        subprocess.run(["ip", "-n", namespace, "link", "set", WORKER_LINK, "down"], check=True, timeout=20)
        both_end(leader, worker)
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


def both_end(leader: Replica, worker: Replica) -> None:
    """Nobody was killed: the link between them is cut."""
    assert (leader.process.wait(timeout=90), worker.process.wait(timeout=90)) == (1, 1)
    assert f"host 1 of rollout-0 (rollout-0-host-1 at {WORKER}:" in leader.log.read_text(encoding="utf-8")
    assert "the leader of rollout-0 is lost: no beat for 15 s" in worker.log.read_text(encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
