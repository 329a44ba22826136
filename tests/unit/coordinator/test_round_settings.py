"""A round says what `sync` says."""

from typing import Any

import pytest

from coordinator.sync.participants import PresentServices
from coordinator.sync.weight_sync import WeightSync
from tandem_api.trainer.v1 import trainer_pb2
from tandem_config.schema import SyncSection
from tests.fakes.fake_sync import FakeGroup
from tests.fakes.sole_lead import SoleLead


@pytest.mark.parametrize(
    ("setting", "field", "expected"),
    [
        ({}, "allow_staged_nccl", False),
        ({"allow_staged_nccl": True}, "allow_staged_nccl", True),
        ({"formation_timeout_s": 7.0}, "formation_timeout_s", 7.0),
        ({"transfer_timeout_s": 8.0}, "transfer_timeout_s", 8.0),
        ({"bucket_mib": 2.0}, "bucket_bytes", 2**21),
        ({"dtype": "bfloat16"}, "wire_dtype", "bfloat16"),
    ],
)
def test_a_setting_reaches_the_ranks(setting: dict[str, object], field: str, expected: object) -> None:
    nobody: Any = None
    settings = SyncSection.model_validate(setting)
    sync = WeightSync(trainer=nobody, fleet=nobody, group=FakeGroup(), settings=settings, lead=SoleLead())
    present = PresentServices(epoch=1, trainer=trainer_pb2.GetStatusResponse(), replicas={})
    assert getattr(sync._rounds._describe(1, present), field) == expected
