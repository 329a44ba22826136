"""A run in virtual time: the coordinator's own schedule, dispatch and ledger; the services only wait.

What is left out: failures, evaluations, checkpoints, the length of prompts.
"""

import asyncio
import math
import tempfile
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from coordinator.data.cursor import CursorState, DataCursor, SourcePosition
from coordinator.generate.dispatch import Rollouts
from coordinator.learn.scoring import Scorer
from coordinator.ledger.ledger import Ledger
from coordinator.record.state import RunState
from coordinator.schedule.choice import bounds_of, chosen
from coordinator.schedule.sync import SyncSchedule
from coordinator.sync.weight_sync import WeightSync
from launcher.simulate.engine import EngineSpeed, SimulatedReplica
from launcher.simulate.virtual_loop import Inline, passed, run
from servicekit.lifecycle.background import BackgroundTask
from servicekit.stopwatch import Stopwatch
from tandem_clients.flow import Group, GroupScores, Prompt, Sample, Sampling, SyncResult, TrainBatch, TrainResult
from tandem_config.schema import RunConfig
from tandem_files.ledger.reading import LedgerContent

# Parts into which the time line of a schedule's first iterations is divided.
BEATS = 240


@dataclass(frozen=True, kw_only=True)
class ServiceSpeeds(EngineSpeed):
    """How fast the modelled services are.

    Attributes:
        slots: completions that a replica's engine runs at a time.
        train_s: seconds of a train step of completions that are as long as all are on average, left-out ones included.
        sync_s, reward_s: seconds of a weight sync, and of the scoring of a batch and what else is before a train step.
        lengths: tokens of completions, in the order in which they begin; behind the last one they begin again.
    """

    slots: int
    train_s: float
    sync_s: float
    reward_s: float
    lengths: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a schedule does, over the iterations after its first ones.

    Attributes:
        iteration_s: seconds of an iteration.
        trainer_idle, slots_idle: share of the time in which the trainer does not train; share of the engines' slots
            in which nothing runs.
        age_mean, age_max: versions from the policy that sampled a token to the one that trains on it.
        wasted: share of the tokens of taken groups that are not trained.
        length_ratio: mean length of trained completions / of all.
        beat_s: seconds of a part of the time line, which begins with the run; equal for all schedules.
        trainer_busy, slots_busy: shares, by part.
    """

    schedule: str
    iteration_s: float
    trainer_idle: float
    slots_idle: float
    age_mean: float
    age_max: int
    wasted: float
    length_ratio: float
    beat_s: float
    trainer_busy: tuple[float, ...]
    slots_busy: tuple[float, ...]


class _Cursor:
    """Prompts without end."""

    def __init__(self) -> None:
        self._taken = self._waves = 0

    def take(self, count: int) -> list[Prompt]:
        rows = range(self._taken + 1, self._taken + count + 1)
        self._taken, self._waves = self._taken + count, self._waves + 1
        return [Prompt(row=row, token_ids=array("I", [0]), answer="") for row in rows]

    def read_ahead(self, count: int) -> None:
        """There is nothing to read."""

    def state(self) -> CursorState:
        position = SourcePosition(epoch=0, position=self._taken, num_prompts=1 << 62)
        return CursorState(sources=(position,), waves=self._waves)


@dataclass(kw_only=True)
class _Iteration:
    """An iteration. ages: trained tokens by age; lengths: of trained completions; running_s: of all completions."""

    end_s: float = 0.0
    running_s: float = 0.0
    trained_s: float = 0.0
    taken_tokens: int = 0
    ages: dict[int, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class _World:
    """The services, and what is measured."""

    config: RunConfig
    speeds: ServiceSpeeds
    version: int = 0
    replicas: list[SimulatedReplica] = field(default_factory=list)
    iterations: list[_Iteration] = field(default_factory=list)
    trained_s: float = 0.0
    training_since_s: float | None = None
    # Seconds that the trainer has worked, and that slots were busy, at the end of each beat.
    beats: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])

    def __post_init__(self) -> None:
        speeds, config = self.speeds, self.config
        for index in range(config.rollout.replicas):
            replica = SimulatedReplica(
                name=f"rollout-{index}",
                slots=speeds.slots,
                kv_tokens=max(config.rollout.max_total_tokens or 0, speeds.slots * (config.grpo.max_new_tokens + 1)),
                speed=speeds,
                length_of=self.length_of,
            )
            replica.flips.append((0.0, 0))
            self.replicas.append(replica)

    def length_of(self, group_id: str, index: int) -> int:
        """Return the length of a completion: the same whatever the schedule."""
        lengths, (_, is_row, row) = self.speeds.lengths, group_id.rpartition("row")
        begun = int(row) - 1 if is_row else 0  # others compare log-probs
        place = (begun * self.config.grpo.group_size + index) % len(lengths)
        return min(int(lengths[place]), self.config.grpo.max_new_tokens)

    def serving(self) -> Sequence[SimulatedReplica]:
        return self.replicas

    async def score(self, groups: Sequence[Group], *, is_batch: bool = True) -> GroupScores:
        await passed(self.speeds.reward_s)
        size = self.config.grpo.group_size
        rewards_PG = np.tile(np.arange(size, dtype=np.float64), (len(groups), 1))
        self.iterations.append(_Iteration())
        self.iterations[-1].taken_tokens = sum(len(one.token_ids) for group in groups for one in group.completions)
        return GroupScores(rewards_PG=rewards_PG, accuracy=0.0)

    async def train_step(self, batch: TrainBatch, sent: asyncio.Event) -> TrainResult:
        sent.set()
        self.training_since_s = asyncio.get_running_loop().time()
        now, grpo = self.iterations[-1], self.config.grpo
        for sample in [sample for update in batch.updates for sample in update]:
            self._count(sample, batch.policy_version, now.ages)
            now.lengths.append(len(sample.completion.token_ids))
        expected = grpo.prompts_per_iteration * grpo.group_size * self.mean_length
        now.trained_s = self.speeds.train_s * now.taken_tokens / expected
        await passed(now.trained_s)
        self.trained_s, self.training_since_s = self.trained_s + now.trained_s, None
        self.version += 1
        return TrainResult(step_id=batch.step_id, policy_version=self.version, metrics={}, seconds={})

    @staticmethod
    def _count(sample: Sample, version: int, ages: dict[int, int]) -> None:
        begin, mask = 0, sample.completion.loss_mask
        for end, sampled_by in sample.completion.version_spans:
            tokens = end - begin if mask is None else sum(mask[begin:end])
            ages[version - sampled_by] = ages.get(version - sampled_by, 0) + tokens
            begin = end

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> NDArray[np.float32]:
        return np.zeros(sum(len(sample.completion.token_ids) for sample in samples), np.float32)

    async def publish(self, version: int) -> SyncResult | None:
        """Send the weights; `in_place` stops generation meanwhile."""
        stops = self.config.sync.install == "in_place" or self.config.schedule.kind != "async"
        for replica in self.replicas if stops else ():
            replica.pause(True)
        await passed(self.speeds.sync_s)
        for replica in self.replicas:
            replica.flip(version)
            replica.pause(False)
        return None

    async def seed_late_joiners(self, version: int) -> None:
        """All are there."""

    async def look_ahead(self) -> AsyncIterator[None]:
        for _ in ():
            yield

    async def close(self) -> None:
        for replica in self.replicas:
            await replica.close()

    @property
    def mean_length(self) -> float:
        return float(np.minimum(self.speeds.lengths, self.config.grpo.max_new_tokens).mean())

    @property
    def beat_s(self) -> float:
        """Return the seconds of a beat: all of them last about as long as four iterations that take turns."""
        speeds, grpo = self.speeds, self.config.grpo
        step_s = (speeds.step_s + speeds.slots * speeds.row_s) / (speeds.slots * len(self.replicas))
        work_s = grpo.prompts_per_iteration * grpo.group_size * self.mean_length * step_s
        slowest_s = min(int(speeds.lengths.max()), grpo.max_new_tokens) * (speeds.step_s + speeds.row_s)
        return 4 * (work_s + slowest_s + speeds.train_s + speeds.sync_s + speeds.reward_s) / BEATS

    async def beat(self) -> None:
        """Note who is busy."""
        for _ in range(BEATS):
            await passed(self.beat_s)
            now_s = asyncio.get_running_loop().time()
            for replica in self.replicas:
                replica.advance()
            begun_s = now_s if self.training_since_s is None else self.training_since_s
            row_s = sum(replica.busy_row_s for replica in self.replicas)
            self.beats.append((self.trained_s + now_s - begun_s, row_s))


def simulate(config: RunConfig, speeds: ServiceSpeeds, iterations: int, name: str, *, begins: bool = False) -> Figures:
    """Run so many iterations of a configuration's schedule, and some around them that do not count.

    Args:
        begins: the iterations are those of a run from its second one on; its first one alone does not count.
    """
    before, after = (1, 0) if begins else (config.schedule.max_staleness + 2,) * 2
    all_of_them = before + iterations + after
    config = config.changed("run", iterations=all_of_them)
    world = _World(config=config, speeds=speeds)
    with tempfile.TemporaryDirectory(prefix="tandem-simulate-") as folder:
        run(_all_iterations(world, Path(folder)))
    return _figures(world, range(before, before + iterations), name)


async def _all_iterations(world: _World, folder: Path) -> None:
    config = world.config
    max_staleness, waves_ahead = bounds_of(config)
    ledger = Ledger(
        run_dir=folder,
        run_id="simulated",
        found=LedgerContent(),
        max_mib=0,  # the groups are not kept
        model="",
        warn=lambda message: None,
        thread=Inline(),
        max_staleness=max_staleness,
        waves_ahead=waves_ahead,
    )
    cursor = _Cursor()
    await ledger.open(RunState(cursor=cursor.state(), batch_rng={}, model_fingerprint=""), saved=0)
    rollouts = Rollouts(
        fleet=world,
        max_groups_per_call=config.rollout.max_groups_per_call,
        timeout_s=config.rollout.generate_timeout_s,
        slots=world.speeds.slots,
    )
    sync = SyncSchedule(
        grpo=config.grpo,
        sampling=Sampling(temperature=1.0, max_new_tokens=config.grpo.max_new_tokens, stop_token_ids=()),
        cursor=cast(DataCursor, cursor),
        rollouts=rollouts,
        scorer=cast(Scorer, world),
        trainer=world,
        weights=cast(WeightSync, world),
        ledger=ledger,
        incarnation="",
        rng=np.random.default_rng(0),
    )
    schedule, version = chosen(config, sync, beside_training=rollouts), 0
    try:
        async with BackgroundTask(world.beat):
            for number in range(1, config.run.iterations + 1):
                record = await schedule.iterate(number, version, Stopwatch())
                version, done = record.policy_version, world.iterations[-1]
                done.end_s, done.running_s = asyncio.get_running_loop().time(), record.generation.running_s
    finally:
        await schedule.close()
        await world.close()


def _figures(world: _World, counted: range, name: str) -> Figures:
    iterations = world.iterations[counted.start : counted.stop]
    took_s = iterations[-1].end_s - world.iterations[counted.start - 1].end_s
    ages: Counter[int] = Counter()
    for one in iterations:
        ages.update(one.ages)
    trained_tokens = max(1, ages.total())
    lengths = [length for one in iterations for length in one.lengths]
    slots = world.speeds.slots * len(world.replicas)
    trained_s, row_s = np.diff(np.array(world.beats).reshape(-1, 2), axis=0).T / world.beat_s
    return Figures(
        schedule=name,
        iteration_s=took_s / len(counted),
        trainer_idle=1.0 - sum(one.trained_s for one in iterations) / took_s,
        slots_idle=1.0 - sum(one.running_s for one in iterations) / (took_s * slots),
        age_mean=sum(age * tokens for age, tokens in ages.items()) / trained_tokens,
        age_max=max((age for age, tokens in ages.items() if tokens), default=0),
        wasted=1.0 - ages.total() / sum(one.taken_tokens for one in iterations),
        length_ratio=float(np.mean(lengths) / world.mean_length) if lengths else math.nan,
        beat_s=world.beat_s,
        trainer_busy=tuple(trained_s.tolist()),
        slots_busy=tuple((row_s / slots).tolist()),
    )
