"""The dashboard's prediction is that of `tandem plan`, and a model that the planner does not know has none."""

import math
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from coordinator.sync.forecast import Forecast
from coordinator.watch import metrics
from launcher.plan.figures import PlannedSync, PlanRequest
from servicekit.errors import ConfigError
from tandem_api.weights.v1 import weights_pb2
from tandem_config.schema import SyncSection
from tests.kit.waiting import until
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec
from weightsync.plans.cost import GIGABIT, Speeds
from weightsync.plans.participants import Participants

MODEL = Path(__file__).parents[3] / "examples" / "arithmetic" / "model"
TRAINER, ROLLOUT = Parallel(tensor=2), Parallel(tensor=1)


def a_round(replicas: int) -> weights_pb2.Round:
    specs = [weights_pb2.ReplicaSpec(name=f"rollout-{i}", parallel=ROLLOUT.to_proto()) for i in range(replicas)]
    return weights_pb2.Round(trainer=TRAINER.to_proto(), replicas=specs)


@pytest.mark.parametrize("replicas", [1, 2, 5])
def test_it_is_that_of_tandem_plan(replicas: int) -> None:
    settings = SyncSection(link_gbit=100.0, bucket_mib=1.0)
    forecast = Forecast(str(MODEL), "float32", settings).predict(Participants.of_round(a_round(replicas)))
    link = 100 * GIGABIT
    request = PlanRequest(
        model="arithmetic",
        spec=ModelSpec.from_folder(MODEL),
        trainer=TRAINER,
        rollout=ROLLOUT,
        replicas=replicas,
        dtype="float32",
        bucket_bytes=2**20,
        speeds=Speeds(trainer_link=link, rollout_link=link),
    )
    planned = PlannedSync.of(request).as_json()
    assert forecast.seconds == planned["predicted_seconds"]
    assert forecast.received_bytes == planned["total_bytes"] * replicas
    assert forecast.goodput == forecast.received_bytes / forecast.seconds


def test_half_the_bytes_travel_in_bfloat16() -> None:
    fleet = Participants.of_round(a_round(2))
    full, half = (
        Forecast(str(MODEL), "float32", SyncSection(dtype=dtype)).predict(fleet) for dtype in ("same", "bfloat16")
    )
    assert 2 * half.received_bytes == full.received_bytes


def test_a_model_that_is_not_known_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    forecast = Forecast(str(tmp_path), "float32", SyncSection())
    with pytest.raises(ConfigError):
        forecast.predict(Participants.of_round(a_round(1)))
    metrics.SYNC_PREDICTED_SECONDS.set(0)  # an earlier test may have left NaN
    forecast.of(a_round(1))

    def shown() -> float:
        value = REGISTRY.get_sample_value("tandem_weight_sync_predicted_seconds")
        return 0.0 if value is None else value

    until(lambda: math.isnan(shown()), 20)
    Forecast(str(MODEL), "float32", SyncSection()).of(a_round(1))
    until(lambda: shown() > 0, 20)
