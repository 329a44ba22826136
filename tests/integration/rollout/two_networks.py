"""The story of test_two_networks.py, told from inside of the leader's network.

`python -m tests.integration.rollout.two_networks FOLDER REDIS_URL NAMESPACE_OF_THE_WORKER`
"""

import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.models import logprobs, make_model
from tests.kit.replicas import Replica, Trainer, at, lone_replica

LEADER, WORKER = "10.77.0.1", "10.77.0.2"
WORKER_LINK = "worker-end"
PROMPT = [7, 8, 9, 10] * 4
OWN_SHM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")


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
    assert "the leader of rollout-0 is gone: no word of it for 15 s" in worker.log.read_text(encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
