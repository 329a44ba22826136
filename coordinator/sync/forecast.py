"""Predicts how long a weight-sync round of the present fleet takes: for the dashboard and `tandem check`.

It uses the planner and the formula of `tandem plan`. A large plan takes seconds: 2 s and 1 GiB for a 235 B model on
4,096 ranks. So it is made in a thread of its own, once per change of the fleet, while the round itself runs.
"""

import math
import threading
from dataclasses import dataclass

from coordinator.watch import metrics
from servicekit.errors import TandemError
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2
from tandem_config.schema import SyncSection
from weightsync.layouts.layout import Parallel
from weightsync.layouts.registry import ROLLOUT_ENGINE, TRAINER_ENGINE, layout_of
from weightsync.model.spec import ModelSpec
from weightsync.plans.cost import GIGABIT, MessageSizes, Speeds, predict
from weightsync.plans.limits import bucket_bytes, largest_message
from weightsync.plans.messages import cut_messages
from weightsync.plans.participants import Participants
from weightsync.plans.plan import make_plan

_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class RoundForecast:
    """Predicted figures of a round.

    Attributes:
        seconds: of the whole round.
        received_bytes: by all rollout ranks together.
    """

    seconds: float
    received_bytes: int

    @property
    def goodput(self) -> float:
        """Bytes per second of the whole round."""
        return self.received_bytes / self.seconds


class Forecast:
    """Keeps the metrics of the predicted round up to date.

    Args:
        model: folder whose config.json gives the sizes.
        dtype: of the trainer's parameters.
    """

    def __init__(self, model: str, dtype: str, settings: SyncSection) -> None:
        self._model = model
        self._dtype_bytes = _DTYPE_BYTES[dtype if settings.dtype == "same" else settings.dtype]
        self._asked_bytes = bucket_bytes(settings.bucket_mib)
        link = settings.link_gbit * GIGABIT
        self._speeds = Speeds(trainer_link=link, rollout_link=link)
        self._fleet: Participants | None = None

    def of(self, description: weights_pb2.Round) -> None:
        """Predict a round like `description` in the background and set the metrics; return immediately."""
        fleet = Participants.of_round(description)
        if fleet != self._fleet:
            self._fleet = fleet
            threading.Thread(target=self._show, args=(fleet,), name="forecast", daemon=True).start()

    def _show(self, fleet: Participants) -> None:
        try:
            forecast = self.predict(fleet)
        except (TandemError, ValueError, KeyError) as error:
            log.warning("sync forecast unavailable", error=str(error))
            forecast = None
        metrics.SYNC_PREDICTED_SECONDS.set(forecast.seconds if forecast is not None else math.nan)
        metrics.SYNC_PREDICTED_GOODPUT.set(forecast.goodput if forecast is not None else math.nan)

    def predict(self, fleet: Participants) -> RoundForecast:
        """Predict a round; chains of different layouts are fed concurrently, so the slowest counts.

        Raises: ConfigError: a model or a layout that the planner does not know.
        """
        # sync.link_gbit is the speed between GPUs, so messages are cut as for them.
        message_bytes = largest_message(self._asked_bytes, "cuda", fleet.longest_chain)
        chains = [
            self._predict_chain(fleet.trainer, layout, len(names), message_bytes)
            for layout, names in fleet.chains().items()
        ]
        return RoundForecast(
            seconds=max(chain.seconds for chain in chains), received_bytes=sum(chain.received_bytes for chain in chains)
        )

    def _predict_chain(self, trainer: Parallel, rollout: Parallel, replicas: int, message_bytes: int) -> RoundForecast:
        spec = ModelSpec.from_folder(self._model)
        plan = make_plan(layout_of(TRAINER_ENGINE, spec, trainer), layout_of(ROLLOUT_ENGINE, spec, rollout))
        messages = cut_messages(plan, max(1, message_bytes // self._dtype_bytes))
        prediction = predict(plan, MessageSizes.of(plan, messages, self._dtype_bytes), replicas, self._speeds)
        received = int(plan.elements_sent().sum()) * self._dtype_bytes * replicas
        return RoundForecast(seconds=prediction.seconds, received_bytes=received)
