"""A round says what `sync` says."""

from typing import Any, get_args

import pytest

from coordinator.sync.participants import PresentServices
from coordinator.sync.weight_sync import WeightSync
from servicekit.rpc.request_bounds import check_request
from tandem_api.trainer.v1 import trainer_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_config.schema import SyncSection
from tests.fakes.fake_sync import FakeGroup
from tests.fakes.sole_lead import SoleLead

PAUSES = get_args(SyncSection.model_fields["pause"].annotation)


@pytest.mark.parametrize(
    ("setting", "field", "expected"),
    [
        ({}, "allow_staged_nccl", False),
        ({"allow_staged_nccl": True}, "allow_staged_nccl", True),
        ({"formation_timeout_s": 7.0}, "formation_timeout_s", 7.0),
        ({"transfer_timeout_s": 8.0}, "transfer_timeout_s", 8.0),
        ({"bucket_mib": 2.0}, "bucket_bytes", 2**21),
        ({"dtype": "bfloat16"}, "wire_dtype", "bfloat16"),
        *(({"pause": name}, "pause_mode", pb.PauseMode.Value(f"PAUSE_MODE_{name.upper()}")) for name in PAUSES),
    ],
)
def test_a_setting_reaches_the_ranks(setting: dict[str, object], field: str, expected: object) -> None:
    nobody: Any = None
    settings = SyncSection.model_validate(setting)
    sync = WeightSync(trainer=nobody, fleet=nobody, group=FakeGroup(), settings=settings, lead=SoleLead())
    present = PresentServices(epoch=1, trainer=trainer_pb2.GetStatusResponse(), replicas={})
    described = sync._rounds._describe(1, present)
    assert getattr(described, field) == expected
    check_request(pb.RunPhaseRequest(phase=pb.ROUND_PHASE_PREPARE, round=described))  # services take it


def test_each_mode_of_the_wire_is_a_setting() -> None:
    assert len(PAUSES) == len(pb.PauseMode.values()) - 1
