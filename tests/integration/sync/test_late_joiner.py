"""A replica that starts when the trainer is gone serves what was published on disk: real SGLang, another layout."""

from pathlib import Path

import grpc
import pytest

from servicekit.errors import NotReady, from_rpc_error
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.models import logprobs, make_model
from tests.kit.processes import Services
from tests.kit.replicas import Replicas
from tests.kit.round import CALL_S
from weightsync.layouts.layout import Parallel

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]

TRAINER = Parallel(tensor=2, pipeline=2)
PROMPT = [7, 8, 9, 10]


def test_a_joiner_loads_what_sglang_would_load_from_the_same_policy(services: Services, tmp_path: Path) -> None:
    model, folder = make_model(tmp_path / "model"), services.folder / "run" / "weights"
    first = Replicas(services, model, {"rollout-0": Parallel()})
    first.wait_up()
    first.sync(model, TRAINER, 3, transport=pb.SYNC_TRANSPORT_DISK, disk_folder=str(folder), round_id="r3")
    joiner = Replicas(services, model, {"rollout-1": Parallel(tensor=2)})
    joiner.wait_up()
    truth = joiner.truth(model)
    joiner.poison()
    with pytest.raises(grpc.RpcError) as refused:
        load(joiner, folder, "r2")
    assert isinstance(from_rpc_error(refused.value), NotReady)
    assert load(joiner, folder, "r3") == pb.REPLICA_STATE_SERVING
    assert joiner.checksums() == truth
    (completion,) = joiner["rollout-1"].greedy([PROMPT], 3, 12)
    expected = logprobs(model, PROMPT, list(completion.token_ids), 1.0)
    assert expected.argmax(-1).tolist() == list(completion.token_ids)
    assert [span.policy_version for span in completion.version_spans] == [3]


def load(replicas: Replicas, folder: Path, round_id: str) -> int:
    """Asks rollout-1 to load version 3. Returns: its state then."""
    request = rollout_pb2.LoadPublishedWeightsRequest(folder=str(folder), policy_version=3, round_id=round_id)
    return int(replicas["rollout-1"].stub.LoadPublishedWeights(request, timeout=CALL_S).state)
