"""The figures of `tandem plan`, for its JSON and its table."""

import resource
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from launcher.plan.fit import fitting_layout
from weightsync.layouts.layout import Parallel
from weightsync.layouts.registry import ROLLOUT_ENGINE, TRAINER_ENGINE
from weightsync.model.spec import ModelSpec
from weightsync.plans.cost import MessageSizes, Speeds, predict
from weightsync.plans.messages import Message, cut_messages
from weightsync.plans.plan import TransferPlan, make_plan

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A weight sync to plan: one trainer, `replicas` replicas of one layout, messages of at most `bucket_bytes`."""

    model: str
    spec: ModelSpec
    trainer: Parallel
    rollout: Parallel
    replicas: int
    dtype: str
    bucket_bytes: int
    speeds: Speeds
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PlannedSync:
    """The plan of a request, and the time it took to make."""

    request: PlanRequest
    plan: TransferPlan
    messages: list[Message]
    seconds: float
    cpu_seconds: float

    @classmethod
    def of(cls, request: PlanRequest) -> "PlannedSync":
        """Make the plan. Raises: ConfigErrors: sizes that do not fit the model, with some that do."""
        start, cpu_start = time.perf_counter(), time.process_time()
        source = fitting_layout("--trainer", TRAINER_ENGINE, request.spec, request.trainer)
        plan = make_plan(source, fitting_layout("--rollout", ROLLOUT_ENGINE, request.spec, request.rollout))
        messages = cut_messages(plan, max(1, request.bucket_bytes // DTYPE_BYTES[request.dtype]))
        return cls(
            request=request,
            plan=plan,
            messages=messages,
            seconds=time.perf_counter() - start,
            cpu_seconds=time.process_time() - cpu_start,
        )

    def as_json(self) -> dict[str, Any]:
        """Return the output of `tandem plan --json`; bytes are of one round, per rank where the key says so."""
        request, dtype_bytes = self.request, DTYPE_BYTES[self.request.dtype]
        sent = self.plan.elements_sent() * dtype_bytes
        sizes = MessageSizes.of(self.plan, self.messages, dtype_bytes)
        prediction = predict(self.plan, sizes, request.replicas, request.speeds)
        return {
            "model": request.model,
            "total_bytes": int(self.plan.source.tensor_shapes.prod(axis=1).sum()) * dtype_bytes,
            "trainer_ranks": request.trainer.world_size,
            "rollout_ranks": request.replicas * request.rollout.world_size,
            "redundancy": self.plan.redundancy(),
            "plan_seconds": self.seconds,
            "peak_rss_bytes": peak_rss_bytes(),
            "messages": len(self.messages),
            "max_sender_bytes": int(sent.max()),
            "max_receiver_bytes": int(np.bincount(sizes.dst, sizes.num_bytes).max()),
            "predicted_seconds": prediction.seconds,
            "bound_by": prediction.bound_by,
            "staging_bytes_per_rank": sizes.staging_bytes,
            "plan_cpu_seconds": self.cpu_seconds,
            "sender_imbalance": float(sent.max() / sent.mean()),
            "trainer_egress_bytes": int(sent.sum()),
            "messages_of_all_replicas": len(self.messages) * request.replicas,
            "plan_digest": self.plan.digest,
            "dtype": request.dtype,
            "replicas": request.replicas,
            "trainer": asdict(request.trainer),
            "rollout": {"tensor": request.rollout.tensor, "expert": request.rollout.expert},
            "bucket_bytes": request.bucket_bytes,
            "speeds": asdict(request.speeds),
            "predicted_terms_s": prediction.terms,
            "notes": request.notes,
        }


def peak_rss_bytes() -> int:
    """Return the largest resident size of this process so far (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
