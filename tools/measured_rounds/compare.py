"""Rounds measured beside rounds simulated: speeds of this machine, taken in the same run, and real fleets over gloo."""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tandem_api.weights.v1 import weights_pb2 as pb
from tools.measured_rounds.speeds import BUCKET_BYTES, mean_speeds, measure_speeds, pair
from weightsync.layouts.layout import Parallel
from weightsync.layouts.sglang import sglang_layout
from weightsync.membership.rendezvous import Rendezvous
from weightsync.model.spec import ModelSpec
from weightsync.plans.cost import Speeds
from weightsync.plans.messages import cut_messages
from weightsync.plans.participants import Participants
from weightsync.plans.plan import make_plan
from weightsync.plans.round_plan import source_layout
from weightsync.round.phases import ROUND
from weightsync.simulate.phases import SimulatedFleet
from weightsync.simulate.round import RoundScenario, simulate
from weightsync.transfer.session import SyncMember

GROUP = "tandem:measured-rounds"
# How far two looks at the machine's speeds may be apart for the time between them to count.
STEADY = 1.25


class UnsteadyMachine(RuntimeError):
    """Other work on the machine came and went all the time."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's width (megabytes grow with its square), and who takes part."""

    hidden: int
    trainer: Parallel
    rollout: Parallel
    replicas: int

    @property
    def spec(self) -> ModelSpec:
        """A small Qwen3 of four layers of this hidden size."""
        config = {
            "model_type": "qwen3",
            "num_hidden_layers": 4,
            "hidden_size": self.hidden,
            "intermediate_size": 3 * self.hidden,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": self.hidden // 8,
            "vocab_size": 4000,
            "max_position_embeddings": 64,
        }
        return ModelSpec.from_config(config)


@dataclass(frozen=True, kw_only=True)
class RoundComparison:
    """Medians of the measured rounds, and of one simulation for each of them, in seconds by phase and "total".

    ratio: median of simulated / measured total, round by round: each is simulated with the speeds just before and
    after it, because other work on the machine comes and goes.
    """

    case: Case
    shard_bytes: int
    rounds: int
    rounds_tried: int
    measured: dict[str, float]
    simulated: dict[str, float]
    ratio: float
    speeds: Speeds


class Fleet:
    """Members by slot, in threads of this process, with random float32 weights."""

    def __init__(self, case: Case, redis_url: str) -> None:
        self._round = pb.Round(
            group=GROUP,
            trainer=case.trainer.to_proto(),
            replicas=[
                pb.ReplicaSpec(name=f"rollout-{i}", parallel=case.rollout.to_proto()) for i in range(case.replicas)
            ],
            install_mode=pb.INSTALL_MODE_IN_PLACE,
            transport=pb.SYNC_TRANSPORT_COLLECTIVE,
            bucket_bytes=BUCKET_BYTES,
            formation_timeout_s=10,
            transfer_timeout_s=60,
        )
        self._rendezvous = Rendezvous(redis_url, GROUP)
        self.members: dict[str, SyncMember] = {}
        layouts = {"trainer": source_layout(case.spec, case.trainer)}
        for slot in Participants.of_round(self._round).slots:
            role, _, rank = slot.rpartition("/")
            layout = layouts.setdefault(role, sglang_layout(case.spec, case.rollout))
            self.members[slot] = SyncMember(
                spec=case.spec,
                slot=slot,
                parallel=case.trainer if role == "trainer" else case.rollout,
                tensors={name: torch.rand(shape) for name, shape in layout.parameters_of(int(rank)).items()},
                redis_url=redis_url,
                group=GROUP,
            )
            self.members[slot].start()

    def timed_round(self, version: int) -> dict[str, float]:
        """Seconds of each phase of a real round, called as a coordinator does, and in total."""
        self._round.round_id, self._round.policy_version = f"round-{version}", version
        self._round.epoch = self._rendezvous.snapshot().epoch
        seconds = {}
        for rule in ROUND:
            start = time.perf_counter()
            with ThreadPoolExecutor(len(self.members)) as pool:
                calls = [pool.submit(member.run_phase, rule.phase, self._round) for member in self.members.values()]
                for call in calls:
                    call.result()
            seconds[rule.name] = time.perf_counter() - start
        return {**seconds, "total": sum(seconds.values())}

    def close(self) -> None:
        """Close all members."""
        for member in self.members.values():
            member.close()


@contextmanager
def fleet_of(case: Case, redis_url: str) -> Iterator[Fleet]:
    """A fleet for a case, closed at the end."""
    fleet = Fleet(case, redis_url)
    try:
        yield fleet
    finally:
        fleet.close()


def compare(case: Case, redis_url: str, rounds: int = 7) -> RoundComparison:
    """Measure speeds and rounds in turns, and simulate each round.

    A round counts if the machine was as fast after it as before it, so that its own speed is known; up to four times
    `rounds` are tried.
    """
    stage = _stage(case)
    taken: list[dict[str, float]] = []
    simulated: list[dict[str, float]] = []
    counted: list[Speeds] = []
    tried = 0
    with fleet_of(case, redis_url) as fleet, pair() as ends:
        fleet.timed_round(1)  # forms the communicator, plans, fills caches
        before = measure_speeds(ends, len(fleet.members))
        while len(taken) < rounds and tried < 4 * rounds:
            tried += 1
            measured = fleet.timed_round(tried + 1)
            after = measure_speeds(ends, len(fleet.members))
            if _steady(before, after):
                taken.append(measured)
                counted.append(mean_speeds([before, after]))
                simulated.append(simulate(_scene(stage, counted[-1], measured)).seconds)
            before = after
    if not taken:
        raise UnsteadyMachine(f"speeds changed by more than {STEADY} in each of {tried} rounds")
    return RoundComparison(
        case=case,
        shard_bytes=stage.plan.target.elements_of(0) * 4,
        rounds=len(taken),
        rounds_tried=tried,
        measured=_medians(taken),
        simulated=_medians(simulated),
        ratio=statistics.median(ours["total"] / real["total"] for ours, real in zip(simulated, taken, strict=True)),
        speeds=mean_speeds(counted),
    )


def _steady(before: Speeds, after: Speeds) -> bool:
    changes = [after.trainer_link / before.trainer_link, after.link_cores / before.link_cores]
    return all(1 / STEADY <= change <= STEADY for change in changes)


def _stage(case: Case) -> SimulatedFleet:
    plan = make_plan(source_layout(case.spec, case.trainer), sglang_layout(case.spec, case.rollout))
    messages = cut_messages(plan, BUCKET_BYTES // 4)
    return SimulatedFleet(
        plan=plan, messages=messages, dtype_bytes=4, replicas=case.replicas, speeds=Speeds(), device="cpu"
    )


def _scene(stage: SimulatedFleet, speeds: Speeds, measured: dict[str, float]) -> RoundScenario:
    """A call costs what PAUSE takes, which does nothing else; planning and agreeing, what PREPARE takes beyond."""
    rpc_s = measured["pause"]
    prepare_s = max(0.0, measured["prepare"] - rpc_s)
    return RoundScenario(fleet=replace(stage, speeds=replace(speeds, rpc_s=rpc_s), prepare_s=prepare_s))


def _medians(samples: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
