"""Section `profile` of a configuration at two real ranks (TP 2): traces and tables of both in the run's folder."""

import gzip
import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_files.profiles.folder import FOLDER, read_profiles, trace_path
from tests.integration.trainer.processes import TrainerProcesses, chunk, step_requests

pytestmark = [pytest.mark.integration, pytest.mark.slow]
TIMEOUT_S = 120.0  # torch.profiler's events are slow to read


@pytest.mark.timeout(300)
def test_every_rank_profiles_the_step_of_the_configuration(redis_server: str, tiny_model: Path, tmp_path: Path) -> None:
    profile = {"steps": 1, "first": 2, "ranks": []}
    with TrainerProcesses(redis_server, tmp_path, tiny_model, profile, tensor_parallel=2) as trainer:
        address = trainer.begin().ready().address
        with grpc.insecure_channel(address) as channel:
            stub = trainer_pb2_grpc.TrainerServiceStub(channel)

            def train() -> Any:
                version = stub.GetStatus(pb.GetStatusRequest(), timeout=10).policy_version
                return stub.TrainStep(iter(step_requests(f"s{version}", version, [chunk(0)])), timeout=TIMEOUT_S)

            train()
            assert not (tmp_path / FOLDER).exists()
            seconds = train().seconds
    # the trainer has ended right after the step
    tables = read_profiles(tmp_path)
    assert [(table.step, table.rank, table.world_size) for table in tables] == [(2, 0, 2), (2, 1, 2)]
    assert tables[0].parts.items() <= seconds.items()  # the reply is rank 0's, with `receive` and `total`
    for table in tables:
        assert table.communication_s > 0
        assert "aten::mm" in {operator.name for operator in table.operators}
        events = json.loads(gzip.decompress(trace_path(tmp_path, 2, table.rank).read_bytes()))["traceEvents"]
        assert {"forward_backward", "optimizer", "aten::mm"} <= {one.get("name") for one in events}
