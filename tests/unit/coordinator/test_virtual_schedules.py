"""Schedules, dispatch and ledger as they are, in virtual time, with kills at random moments: each sample is used once.

The world outlives the processes: a trainer, whose line of steps a restart shortens to the last checkpoint, replicas,
and the run's folder. Each policy has a number of its own, which is in the log-probs of what it samples.
"""

import asyncio
import contextlib
import logging
import math
import os
import random
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import structlog
from numpy.typing import NDArray

from coordinator.data.cursor import CursorState, DataCursor, SourcePosition
from coordinator.data.prompts import load_prompts
from coordinator.generate.dispatch import Rollouts
from coordinator.generate.joiners import Patience
from coordinator.learn.scoring import Scorer
from coordinator.ledger.ledger import Ledger, Restored
from coordinator.ledger.past import MAX_REPEATS
from coordinator.ledger.returning import ReturningTrainer
from coordinator.record.state import RunState
from coordinator.schedule import sync
from coordinator.schedule.asynchronous import Asynchronous
from coordinator.schedule.one_step_off import OneStepOff
from coordinator.schedule.pipeline import Pipeline
from coordinator.schedule.sync import SyncSchedule
from coordinator.sync.weight_sync import WeightSync
from coordinator.take_over import LastIteration
from launcher.simulate.virtual_loop import Inline, run
from servicekit.errors import Internal, TandemError, Unavailable
from servicekit.lifecycle.tasks import cancel
from servicekit.stopwatch import Stopwatch
from tandem_api.trainer.v1 import trainer_pb2
from tandem_clients.flow import Group, GroupScores, Order, Prompt, Sample, Sampling, TrainBatch, TrainResult
from tandem_clients.trainer import Trainer, step_requests
from tandem_config.schema import DataSection, GrpoSection
from tandem_files.checkpoints import COORDINATOR_FILE, mark_complete, newest_sound
from tandem_files.ledger.reading import read_ledger
from tandem_files.tokenizer import TextCodec
from tests.fakes.fake_sampler import FakeSampler
from tests.kit.folders import write_rows, write_small_model

ITERATIONS, PROMPTS, SIZE, EVERY, KEPT = 9, 4, 3, 3, 2
# In the last one a replica dies while a step that the trainer has done already is sent again.
SEEDS = (*range(15), 527)
# Further runs, of the slow tests: 2,000 with all the kinds.
MORE_SEEDS, SEEDS_A_TEST = range(1000, 1400), 100
GRPO = GrpoSection(prompts_per_iteration=PROMPTS, group_size=SIZE, updates_per_iteration=1, zero_variance="drop")
SAMPLING = Sampling(temperature=1.0, max_new_tokens=60, stop_token_ids=())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is killed here are processes: what they have written stays, and no disk is waited for."""
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: None)
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder that is in memory, where the machine has such a thing: a run makes a thousand small files."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="virtual-") as folder:
        yield Path(folder)


class Cursor:
    """A data cursor over rows without end."""

    def __init__(self, before: CursorState | None = None) -> None:
        self.taken, self.waves = (before.num_taken, before.waves) if before else (0, 0)

    def take(self, count: int) -> list[Prompt]:
        self.waves += 1
        rows = range(self.taken, self.taken + count)
        self.taken += count
        return [Prompt(row=row, token_ids=array("I", [row]), answer="") for row in rows]

    def read_ahead(self, count: int) -> None:
        """There is nothing to read."""

    def state(self) -> CursorState:
        position = SourcePosition(epoch=0, position=self.taken, num_prompts=10**6)
        return CursorState(sources=(position,), waves=self.waves)


@dataclass
class Step:
    step_id: str
    policy: int
    samples: dict[str, set[int]]  # with the policies that sampled each
    becomes: int = 0
    sent: list[bytes] = field(default_factory=list)  # all of it


@dataclass
class World:
    """What outlives the processes of the coordinator.

    Attributes:
        line: the steps of which the trainer's present policy is made; `policy` is its number.
    """

    random: random.Random
    folder: Path
    max_staleness: int = 0
    in_flight: bool = False
    window: int = PROMPTS
    line: list[Step] = field(default_factory=list)
    policy: int = 0
    policies: int = 0
    version: int = 0
    replies: dict[str, TrainResult] = field(default_factory=dict)
    replicas: list[FakeSampler] = field(default_factory=list)
    last: RunState | None = None
    saved: RunState | None = None
    num_saved: int = 0  # steps
    step_id: str = ""  # as the trainer says it
    known: dict[str, Step] = field(default_factory=dict)
    blinks: float = 0.0  # how often a step is one with which the trainer is lost
    redone: int = 0
    is_away: bool = False
    newest: int = 0  # of all versions
    finished: dict[str, set[int]] = field(default_factory=dict)  # groups, with the policies that sampled them
    grpo: GrpoSection = GRPO
    cursor: Callable[[CursorState], Any] = Cursor

    def __post_init__(self) -> None:
        self.replicas = [self.replica(index) for index in range(2)]

    def replica(self, index: int) -> FakeSampler:
        speed = self.random.choice([5.0, 20.0])
        made = FakeSampler(f"rollout-{index}", self.random, tokens_per_s=speed, kv_tokens=500)
        made.policy_version, made.logprob = self.version, -float(self.policy)
        return made

    # The trainer.

    async def train_step(self, batch: TrainBatch, sent: asyncio.Event) -> TrainResult:
        if batch.step_id in self.replies:
            sent.set()
            return self.replies[batch.step_id]
        assert batch.policy_version == self.version
        sent.set()
        await asyncio.sleep(self.random.uniform(0.5, 10.0))
        if self.random.random() < self.blinks:
            self.blink()
            raise Unavailable("killed")
        whole = [sample for update in batch.updates for sample in update]
        samples = {sample.sample_id: self.sampled_by(sample.completion.logprobs) for sample in whole}
        ages = {name: self.age_of(policies) for name, policies in samples.items()}
        assert max(ages.values()) <= self.max_staleness, ages
        said = {sample.sample_id: batch.policy_version - sample.completion.oldest_version for sample in whole}
        assert said == ages
        assert not {name for step in self.line for name in step.samples} & samples.keys(), "trained twice"
        return self._done(self._step(batch.step_id, list(step_requests(batch))))

    def _step(self, step_id: str, messages: Sequence[trainer_pb2.TrainStepRequest]) -> Step:
        """What was sent again is what was sent before, and leads to the same policy."""
        content = [message.SerializeToString() for message in messages]
        if step_id not in self.known:
            self.policies += 1
            samples: dict[str, set[int]] = {}
            for chunk in [message.chunk for message in messages[1:]]:
                logprobs, at = np.frombuffer(chunk.rollout_logprobs_f32, np.float32), 0
                for name, num in zip(chunk.sample_ids, chunk.completion_lengths, strict=True):
                    samples[name], at = self.sampled_by(logprobs[at : at + num].tolist()), at + num
            self.known[step_id] = Step(step_id, self.policy, samples, self.policies, content)
        step = self.known[step_id]
        assert (self.policy, content) == (step.policy, step.sent)
        return step

    def _done(self, step: Step) -> TrainResult:
        self.line.append(step)
        self.policy, self.version, self.step_id = step.becomes, self.version + 1, step.step_id
        self.newest = max(self.newest, self.version)
        result = TrainResult(step_id=step.step_id, policy_version=self.version, metrics={}, seconds={})
        self.replies = {step.step_id: result}
        return result

    async def redo_step(
        self, requests: Callable[[], Iterator[trainer_pb2.TrainStepRequest]], step_id: str
    ) -> TrainResult:
        """A step that was done before leads to the policy that it led to."""
        await asyncio.sleep(self.random.uniform(0.5, 10.0))
        if self.random.random() < self.blinks:
            self.blink()
            raise Unavailable("killed")
        again = list(requests())
        assert again[0].header.policy_version == self.version
        self.redone += 1
        return self._done(self._step(step_id, again))

    async def status(self) -> trainer_pb2.GetStatusResponse:
        if self.is_away:
            raise Unavailable("connection refused")
        return trainer_pb2.GetStatusResponse(policy_version=self.version, step_id=self.step_id)

    async def restore(self, folder: Path | None, version: int) -> None:
        assert version >= self.version
        self.version = version

    async def until_back(self, error: TandemError) -> None:
        await asyncio.sleep(self.random.uniform(5.0, 100.0))
        self.is_away = False

    @staticmethod
    def sampled_by(logprobs: Sequence[float]) -> set[int]:
        return {round(-logprob) for logprob in logprobs}

    async def logprobs(self, samples: Sequence[Sample], *, reference: bool = False) -> NDArray[np.float32]:
        return np.full(sum(len(sample.completion.token_ids) for sample in samples), -self.policy, np.float32)

    def age_of(self, policies: Iterable[int]) -> float:
        """The age of the oldest; infinite: the policy is lost."""
        ancestors = [step.policy for step in self.line] + [self.policy]
        return max(len(ancestors) - 1 - ancestors.index(one) if one in ancestors else math.inf for one in policies)

    def blink(self) -> None:
        """It starts again from the checkpoint, under the version that this has."""
        self.is_away = True
        self.version -= len(self.line) - self.num_saved
        if self.num_saved < len(self.line):
            self.policy = self.line[self.num_saved].policy
        del self.line[self.num_saved :]
        self.replies, self.step_id = {}, ""

    def lose_trainer(self) -> None:
        """The next one begins at the checkpoint, under a version that nobody has had."""
        self.begin_at_the_checkpoint()
        self.version, self.last = -1, None

    def begin_at_the_checkpoint(self) -> None:
        """It has the checkpoint's policy."""
        self.step_id, self.replies = "", {}
        if self.num_saved < len(self.line):
            self.policy = self.line[self.num_saved].policy
        del self.line[self.num_saved :]

    # The weight sync.

    async def publish(self, version: int) -> None:
        await asyncio.sleep(self.random.uniform(0.1, 1.0))
        await self.seed_late_joiners(version)

    async def seed_late_joiners(self, version: int) -> None:
        assert version == self.version
        for index, replica in enumerate(self.replicas):
            if replica.is_dead:
                self.replicas[index] = self.replica(index)
            is_same = not replica.running or replica.policy_version == version
            assert is_same or self.in_flight, "weights change under a generation"
            self.replicas[index].policy_version, self.replicas[index].logprob = version, -float(self.policy)

    async def look_ahead(self) -> Any:
        for _ in ():
            yield

    def serving(self) -> Sequence[FakeSampler]:
        return tuple(replica for replica in self.replicas if not replica.is_dead)

    # The rewards.

    async def score(self, groups: Sequence[Group], *, is_batch: bool = True) -> GroupScores:
        await asyncio.sleep(self.random.uniform(0.0, 3.0))
        draws = [random.Random(f"{group.group_id}") for group in groups]
        rewards_PG = np.array([[float(draw.random() < 0.5) for _ in range(SIZE)] for draw in draws])
        return GroupScores(rewards_PG=rewards_PG, accuracy=float(rewards_PG.mean()))


class WatchedLedger(Ledger):
    """Restores all that is finished and young enough, unless an iteration has failed with it again and again."""

    world: World

    def finished(self, wave: int, group: Group) -> None:
        self.world.finished[group.group_id] = set().union(
            *[World.sampled_by(one.logprobs) for one in group.completions]
        )
        super().finished(wave, group)

    def _drop(self, wave: int, why: str) -> None:
        for name in self._account.groups_of(wave):
            self.world.finished.pop(name, None)
        super()._drop(wave, why)

    async def begin(self, wave: int, prompts: Mapping[str, Prompt], order: Order, first: int) -> Restored:
        finished, most = self.world.finished, self.past._max_staleness - (wave - self.past.first_wave)
        open_names = prompts.keys() - self._account.settled_groups(wave)
        young = {name for name in open_names if name in finished and self.world.age_of(finished[name]) <= most}
        restored = await super().begin(wave, prompts, order, first)
        assert young <= restored.groups.keys() or self._found.repeats[wave] >= MAX_REPEATS
        for name in open_names - restored.groups.keys():  # they are generated anew
            finished.pop(name, None)
        return restored


async def process(world: World, kind: str, number: int, *, may_repeat: bool = True) -> None:
    """One process of the coordinator, as coordinator/run.py lets it continue."""
    found, world.is_away = read_ledger(world.folder, "r"), False
    staleness, ahead = ages_of(world, kind)
    world.max_staleness, world.in_flight = staleness, kind == "async"
    ledger = WatchedLedger(
        run_dir=world.folder,
        run_id="r",
        found=found,
        max_mib=64,
        model="m",
        max_staleness=staleness,
        waves_ahead=ahead,
        redoes=True,
        thread=Inline(),
    )
    trainer = ReturningTrainer(
        trainer=cast(Trainer, world),
        run_dir=world.folder,
        until_back=world.until_back,
        ending=asyncio.Event(),
        written=ledger.written,
        warn=lambda _: None,
    )
    ledger.world = world
    state, sent = (world.last or world.saved or first_state()).model_copy(deep=True), ""
    saved = state.policy_version
    if world.last is not None and may_repeat:
        sound = newest_sound(world.folder, deep=False)
        served = max(replica.policy_version for replica in world.replicas)
        last = LastIteration(state=world.last, may_repeat=may_repeat)
        await last.bring(trainer, None if sound is None else sound.folder, ledger, served, sends=True)
    if world.last is not None and world.version == saved + 1:
        sent = ledger.past.sent_step(state.iteration + 1)
        assert sent == world.line[-1].step_id, "its samples are kept"
    elif world.last is not None and world.version != saved:  # as where it was lost, and its steps were being done again
        state = (world.saved or first_state()).model_copy(deep=True)
        saved, world.last = state.policy_version, None
    if not sent and not world.version == saved >= world.newest:
        world.begin_at_the_checkpoint()
        world.newest += 1
        world.version = state.policy_version = world.newest
    cursor = world.cursor(state.cursor)
    await ledger.open(state, saved=saved, step_id=sent)
    trainer.stands_at(world.version, sent or state.step_id)
    await world.publish(world.version)
    world.last = state.model_copy(deep=True)
    parts: dict[str, Any] = {
        "grpo": world.grpo,
        "sampling": SAMPLING,
        "cursor": cast(DataCursor, cursor),
        "rollouts": rollouts_of(world, world.seed_late_joiners),
        "scorer": cast(Scorer, world),
        "trainer": trainer,
        "persist": trainer.persist,
        "weights": cast(WeightSync, world),
        "ledger": ledger,
        "incarnation": str(number),
        "rng": np.random.default_rng(0),
    }
    beside: dict[str, Any] = {"beside_training": rollouts_of(world, None), "iterations": ITERATIONS}
    schedule = SyncSchedule(**parts)
    if kind == "one_step_off":
        schedule = OneStepOff(**parts, **beside)
    elif kind == "async":
        pipeline = pipeline_of(world)
        schedule = Asynchronous(**parts, pipeline=pipeline, iterations=ITERATIONS, max_token_age=pipeline.max_age)
    try:
        await iterations(world, schedule, ledger, state)
    finally:
        await schedule.close()


async def iterations(world: World, schedule: SyncSchedule, ledger: Ledger, state: RunState) -> None:
    while state.iteration < ITERATIONS:
        record = await schedule.iterate(state.iteration + 1, state.policy_version, Stopwatch())
        assert not record.compared or record.compared["logprob_abs_diff_max"] == 0.0
        state.iteration, state.policy_version = record.iteration, record.policy_version
        state.cursor, state.steps_digest = schedule.position(), ledger.digest
        state.step_id = state.step_id if record.step is None else record.step.step_id
        world.last = state.model_copy(deep=True)
        ledger.done(state.wave)
        if record.iteration % EVERY == 0:
            await ledger.checkpoint(state)
            folder = world.folder / "checkpoints" / f"step-{record.iteration:08d}"
            folder.mkdir(parents=True)
            state.save(folder / COORDINATOR_FILE)
            mark_complete(folder, iteration=record.iteration, policy_version=0, model="m", model_fingerprint="m")
            for old in sorted(folder.parent.iterdir())[:-KEPT]:
                shutil.rmtree(old)
            world.saved, world.num_saved = state.model_copy(deep=True), len(world.line)


def pipeline_of(world: World) -> Pipeline:
    return Pipeline(batch=PROMPTS, depth=1, max_staleness=2, window=world.window)


def ages_of(world: World, kind: str) -> tuple[int, int]:
    """The most versions between the policy that samples and the one that is trained; waves beside the first one."""
    pipeline = pipeline_of(world)
    one = {"sync": 0, "one_step_off": 1}
    return (pipeline.max_age, pipeline.max_staleness + 1) if kind == "async" else (one[kind], one[kind])


def first_state() -> RunState:
    return RunState(cursor=Cursor().state(), batch_rng={}, model_fingerprint="m")


def rollouts_of(world: World, seed: Any) -> Rollouts:
    patience = Patience(probe_s=5.0, rejoin_s=60.0)
    return Rollouts(
        fleet=world, max_groups_per_call=1024, timeout_s=60.0, patience=patience, seed=seed, warn=lambda _: None
    )


async def story(world: World, kinds: Sequence[str], kills: int) -> None:
    """Processes one after the other, each with one of the schedules, until the run is over; most are killed."""
    before = kind = kinds[0]
    for number in range(kills + 1):
        kind = world.random.choice(kinds)
        if kind != before and world.last is not None and world.version != world.last.policy_version:
            world.lose_trainer()  # a step that was sent is repeated only if no setting has changed
        world.blinks *= number < kills
        work = asyncio.create_task(process(world, kind, number, may_repeat=kind == before))
        before = kind
        trouble = asyncio.create_task(kill_replicas(world))
        try:
            await asyncio.wait({work}, timeout=world.random.expovariate(1 / 60) if number < kills else None)
        finally:
            await cancel(trouble)
        if work.done():
            with contextlib.suppress(Unavailable):  # the trainer is lost, and both are started again
                work.result()
                return
            continue
        await cancel(work)
        if (chance := world.random.random()) < 0.4:
            world.lose_trainer()
        elif chance < 0.6:
            world.blink()


async def kill_replicas(world: World) -> None:
    while True:
        await asyncio.sleep(world.random.expovariate(1 / 40))
        world.random.choice(world.replicas).die()


def names() -> dict[str, bool]:
    """All samples of the run, and whether their rewards differ."""
    groups = [
        f"i{number + 1}.g{place}.row{number * PROMPTS + place}"
        for number in range(ITERATIONS)
        for place in range(PROMPTS)
    ]
    differ = {}
    for group in groups:
        draw = random.Random(group)
        differ[group] = len({draw.random() < 0.5 for _ in range(SIZE)}) > 1
    return {f"{group}#{index}": differ[group] for group in groups for index in range(SIZE)}


def wave_of(name: str) -> int:
    return int(name[1:].partition(".")[0])


KINDS = (["sync"], ["one_step_off"], ["async"], ["sync", "one_step_off"], ["sync", "one_step_off", "async"])


@pytest.mark.parametrize("kinds", KINDS)
def test_every_sample_is_trained_once_whatever_is_killed_and_when(
    memory: Path, monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str]
) -> None:
    every_sample_is_trained_once(memory, monkeypatch, kinds, SEEDS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", MORE_SEEDS[::SEEDS_A_TEST])
@pytest.mark.parametrize("kinds", KINDS)
def test_every_sample_is_trained_once_in_two_thousand_runs(
    memory: Path, monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str], first: int
) -> None:
    every_sample_is_trained_once(memory, monkeypatch, kinds, range(first, first + SEEDS_A_TEST))


def every_sample_is_trained_once(
    memory: Path, monkeypatch: pytest.MonkeyPatch, kinds: Sequence[str], seeds: Iterable[int]
) -> None:
    """A run of each seed, with kills: in its line of steps, and in its ledger, no sample is missing or there twice."""
    monkeypatch.setattr(sync, "COMPARE_EVERY", 4)
    expected = {name for name, differs in names().items() if differs}
    returned = redone = 0
    for seed in seeds:
        folder = memory / str(seed)
        folder.mkdir()
        world = World(random.Random(seed), folder, blinks=[0.0, 0.1, 0.3][seed % 3])
        run(story(world, kinds, kills=seed % 7))
        redone += world.redone
        trained = Counter(name for step in world.line for name in step.samples)
        assert set(trained.values()) == {1}, seed
        if left := expected - trained.keys():
            # A wave of which `async` has trained some groups is a smaller iteration of the other schedules.
            assert {"async"} < {*kinds}, seed
            assert min(map(wave_of, left)) > max(map(wave_of, trained)), seed
        ledger = read_ledger(folder, "r")
        assert ledger.problems == [], seed
        account = ledger.account
        assert account.total("trained") == len(trained), seed
        assert left or account.under_way == 0, seed
        assert left or account.total("filtered") == len(names()) - len(expected), seed
        returned += account.counts["returned"]
        shutil.rmtree(folder)
    assert returned, "no step was undone: the kills say nothing"
    assert redone, "no step was done again: the trainer's losses say nothing"


class OneRow(World):
    """A curriculum of one row, whose completions all get the same reward."""

    async def score(self, groups: Sequence[Group], *, is_batch: bool = True) -> GroupScores:
        return GroupScores(rewards_PG=np.ones((len(groups), SIZE)), accuracy=1.0)


def one_row(folder: Path) -> Callable[[CursorState], DataCursor]:
    data = DataSection.model_validate({"train": write_rows(folder / "train.jsonl", 1)})
    codec = TextCodec.from_folders(write_small_model(folder / "model"))
    return lambda _: DataCursor(load_prompts(data, "train", codec), seed=0, shuffle=True)


async def in_time(world: World, kind: str) -> None:
    async with asyncio.timeout(100_000):
        await process(world, kind, 0)


@pytest.mark.parametrize("kind", ["sync", "one_step_off", "async"])
def test_a_single_row_is_enough_for_all_groups_under_way(tmp_path: Path, kind: str) -> None:
    world = World(random.Random(0), tmp_path, cursor=one_row(tmp_path))
    run(in_time(world, kind))
    trained = [name for step in world.line for name in step.samples]
    assert world.last is not None
    assert world.last.iteration == ITERATIONS
    assert {name.rpartition(".")[2].partition("#")[0] for name in trained} == {"row1"}
    assert len(trained) == len({*trained}) == read_ledger(tmp_path, "r").account.total("trained")


def test_a_single_row_that_teaches_nothing_is_named(tmp_path: Path) -> None:
    grpo = GRPO.model_copy(update={"zero_variance": "replace"})
    world = OneRow(random.Random(0), tmp_path, grpo=grpo, cursor=one_row(tmp_path))
    with pytest.raises(Internal, match="look at the reward and the task's difficulty"):
        run(in_time(world, "async"))
