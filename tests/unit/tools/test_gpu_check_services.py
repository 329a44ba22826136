"""gpu-check's verdicts on the real services: each says what is wrong, and passes what is right."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from launcher.check.model.folder import check_model
from tandem_api.weights.v1 import weights_pb2 as pb
from tandem_files.profiles.folder import RankProfile, step_folder, write_profile
from tools.gpu_check.__main__ import verdict
from tools.gpu_check.services.deaths import PROMISED_S, wrong_deaths
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.services.fleet import Strike, StruckRounds, StruckTrainer
from tools.gpu_check.services.memory import UNCOUNTED_MIB, gpu_growth, gpu_ranks, over_budget
from tools.gpu_check.services.resume import distance, unequal
from tools.gpu_check.services.rounds import apart, differing, mislabelled
from tools.gpu_check.services.run import choose
from tools.gpu_check.services.samples import Sample, first_of, labels
from tools.gpu_check.services.settings import SCALES, Shape, model_config, run_config, write_model
from tools.gpu_check.services.trainers import TRAINERS, check_trainer, fixed_samples
from weightsync.round.client import RoundClient
from weightsync.round.phases import PREPARE, TRANSFER, VERIFY, Phase

CPU = SCALES["cpu"]
TRUTH = {"rollout-0/0": {"a": "1", "b": "2"}}
NAN = {"rollout-0/0": {"a": "n", "b": "n"}}


def sample(*spans: tuple[int, int, int]) -> Sample:
    length = spans[-1][2]
    return Sample(prompt=(1,), tokens=(7,) * length, logprobs=(-1.0,) * length, spans=spans)


def test_checksums_of_the_loader_pass_and_one_other_does_not() -> None:
    assert differing(TRUTH, NAN, TRUTH) == []
    (wrong,) = differing(TRUTH, NAN, {"rollout-0/0": {"a": "1", "b": "3"}})
    assert "rollout-0/0: b is not what" in wrong


def test_a_parameter_that_was_not_poisoned_proves_nothing() -> None:
    (wrong,) = differing(TRUTH, {"rollout-0/0": {"a": "1", "b": "n"}}, TRUTH)
    assert "a was not poisoned" in wrong


@pytest.mark.parametrize(("by", "num_wrong"), [(0.0, 0), (2e-4, 1), (math.nan, 1)])
def test_one_log_prob_that_differs_is_seen(by: float, num_wrong: int) -> None:
    theirs = np.full(100, -2.0)
    ours = theirs.copy()
    ours[50] += by
    assert len(apart(theirs, ours, CPU)) == num_wrong


def test_a_mixture_may_choose_other_experts_for_a_few_tokens_and_no_more() -> None:
    theirs = np.full(100, -2.0)
    few, more, nan = theirs.copy(), theirs.copy(), theirs.copy()
    few[:5] += 1.0
    more[:6] += 1.0
    nan[0] = math.nan
    assert apart(theirs, few, CPU, odd=0.05) == []
    assert len(apart(theirs, more, CPU, odd=0.05)) == 2
    assert apart(theirs, nan, CPU, odd=0.05) == ["some log-probs are not finite"]


def test_no_log_probs_or_fewer_than_tokens_are_no_parity() -> None:
    assert apart(np.zeros(0), np.zeros(0), CPU) != []
    assert apart(np.zeros(3), np.zeros(2), CPU) != []


def test_labels_and_first_tokens_of_a_version() -> None:
    samples = [sample((3, 0, 2), (4, 2, 5)), sample((4, 0, 1)), sample((3, 0, 1), (4, 1, 2))]
    assert labels(samples).tolist() == [3, 3, 4, 4, 4, 4, 3, 4]
    assert first_of(samples, 4).tolist() == [2, 7]


def test_a_token_of_the_old_policy_under_the_new_label_is_seen() -> None:
    samples = [sample((3, 0, 2), (4, 2, 5)), sample((3, 0, 1), (4, 1, 2))]
    theirs = np.full(7, -1.0)
    of_old = np.array([-1.0, -1.0, -3.0, -3.0, -3.0, -1.0, -4.0])
    assert mislabelled(samples, theirs, of_old, 3, 4, CPU) == []
    shifted = np.array([-1.0, -1.0, -1.0, -3.0, -3.0, -1.0, -1.0])  # one more of each was sampled before the change
    (wrong,) = mislabelled(samples, theirs, shifted, 3, 4, CPU)
    assert "first token that is labelled 4" in wrong
    (wrong,) = mislabelled(samples, theirs, np.full(7, -1.0) - np.eye(7)[0], 3, 4, CPU)[:1]
    assert wrong.startswith("labelled 3")
    assert mislabelled([sample((4, 0, 5))], theirs[:5], theirs[:5], 3, 4, CPU) == [
        "tokens are labelled [4], not 3 and then 4"
    ]


@pytest.mark.parametrize(
    ("ended", "seconds", "says"),
    [
        ({"rollout-1": "killed"}, 1.0, ""),
        ({"rollout-1": "killed"}, PROMISED_S + 0.1, "promised"),
        ({}, 1.0, "rollout-1 was killed and lives"),
        ({"rollout-1": "killed", "trainer-0": "trainer-0 was ended by SIGABRT"}, 1.0, "trainer-0 was ended by SIGABRT"),
        ({}, None, "was not killed"),
    ],
)
def test_who_died_and_when_the_rest_went_on(ended: dict[str, str], seconds: float | None, says: str) -> None:
    wrong = wrong_deaths(ended, "rollout-1", seconds)
    assert (says in " ".join(wrong)) if says else wrong == []


def test_one_bit_after_a_resume_is_seen() -> None:
    one = {"w": torch.ones(4), "b": torch.zeros(2)}
    assert distance(one, {name: tensor.clone() for name, tensor in one.items()}) == 0
    assert distance(one, {**one, "b": torch.tensor([0.0, 1e-45])}) > 0
    assert distance(one, {**one, "b": torch.tensor([0.0, -0.0])}) > 0
    assert distance(one, {"w": torch.ones(4)}) == math.inf
    assert unequal(0.0, CPU.resume_limit) == []
    assert unequal(1e-9, CPU.resume_limit) != []
    assert unequal(math.nan, 0.5) != []
    assert unequal(0.4, SCALES["cuda"].resume_limit) != []


def test_memory_beyond_the_budget_and_a_gpu_that_was_not_used_are_seen() -> None:
    growth = gpu_growth(["0, a, 100", "1, b, 100", "0, a, 5000", "1, b, 100", "0, a, 4000", "1, b, ["])
    assert growth == {"0": 4900.0, "a": 4900.0, "1": 0.0, "b": 0.0}
    assert over_budget({"0": 4900.0}, {"0": 1000.0}, {"0": 1}) == []
    assert len(over_budget({"0": 1001.0 + UNCOUNTED_MIB}, {"0": 1000.0}, {"0": 1})) == 1
    assert len(over_budget(growth, {"1": 1000.0}, {"1": 1})) == 1


ALONE, NARROW = ([shapes[number].name for shapes in TRAINERS.values()] for number in (0, -1))


@pytest.mark.parametrize(
    ("num_gpus", "multi_rank", "names", "num_skipped"),
    [
        (4, False, ["TP2 -> TP2", "TP2 -> 2 x TP1", "TP2 EP2 -> TP2 EP2", *ALONE], 0),
        (3, False, ["TP1 -> TP1", "TP1 -> 2 x TP1", "TP1 -> TP1", *NARROW], 5),
        (2, False, ["TP1 -> TP1", "TP1 -> TP1", *NARROW], 6),
        (1, True, ["TP1 -> TP1", "TP1 -> 2 x TP1", "TP1 -> TP1", ALONE[0]], 7),
        (1, False, [ALONE[0]], 10),
    ],
)
def test_what_cannot_run_is_named(num_gpus: int, multi_rank: bool, names: list[str], num_skipped: int) -> None:
    chosen, skipped = choose([str(gpu) for gpu in range(num_gpus)], multi_rank=multi_rank)
    assert [shape.name for shape in chosen.values()] == names
    assert len(skipped) == num_skipped
    assert all(f"{num_gpus} GPUs for" in line for line in skipped)


class FakeFleet:
    """What gpu_ranks reads of a fleet."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.scale = shape, SCALES["cuda"]
        self.replicas = tuple(f"rollout-{index}" for index in range(shape.replicas))


def test_ranks_take_gpus_in_turn_or_share_the_first() -> None:
    wide = Shape(name="", gpus=("4", "5", "6", "7"))
    assert gpu_ranks(FakeFleet(wide)) == {
        "4": ["trainer/0"],
        "5": ["trainer/1"],
        "6": ["rollout-0/0"],
        "7": ["rollout-0/1"],
    }
    narrow = Shape(name="", tensor=1, rollout_tensor=1, gpus=("0",))
    assert gpu_ranks(FakeFleet(narrow)) == {"0": ["trainer/0", "rollout-0/0"]}
    plan = wide.devices(CPU)
    assert (plan.trainer, plan.rollouts) == ("", ("",))  # and so hidden, where there are some
    assert plan.available > 0


@pytest.mark.parametrize("experts", [0, 8])
def test_the_run_s_model_is_one_that_tandem_check_accepts(tmp_path: Path, experts: int) -> None:
    folder = write_model(model_config(CPU, experts), tmp_path / "model")
    config = run_config(Shape(name="", experts=experts), CPU, folder)
    spec, problems = check_model(config, lambda *_: True)
    assert (spec is not None, problems) == (True, [])
    assert config.trainer.expert_parallel == config.rollout.expert_parallel == (2 if experts else 1)


def test_a_failed_check_fails_the_run_and_none_at_all_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    findings = Findings()
    findings.add("right", [], seconds=1.23456)
    assert verdict({"services": findings.checks}, 2) == 0
    findings.add("wrong", ["a is not b"])
    assert findings.failed == ["wrong"]
    assert verdict({"services": findings.checks}, 2) == 1
    assert verdict({"services": [], "cases": [{"exact": False}]}, 2) == 1
    assert verdict({"services": [], "cases": []}, 2) == 2
    assert "right: seconds 1.235" in capsys.readouterr().out


class _Rounds(RoundClient):
    """A trainer whose TRANSFER lasts until it is struck."""

    def __init__(self) -> None:
        self.calls: list[tuple[Phase, ...]] = []
        self.begun, self.struck = asyncio.Event(), asyncio.Event()

    async def run_phases(self, phases: Sequence[Phase], round_: pb.Round) -> list[pb.PhaseReport]:
        self.calls.append(tuple(phases))
        if TRANSFER in phases:
            self.begun.set()
            async with asyncio.timeout(10):
                await self.struck.wait()
        return [pb.PhaseReport()]


@pytest.mark.parametrize("phase", [TRANSFER, VERIFY])
async def test_a_strike_comes_while_its_phase_is_under_way_and_only_once(phase: Phase) -> None:
    trainer, inner = StruckTrainer("127.0.0.1:1"), _Rounds()
    rounds, strikes = StruckRounds(trainer, inner), []

    async def during() -> None:
        async with asyncio.timeout(10):
            await inner.begun.wait()
        strikes.append(inner.calls[-1])
        inner.struck.set()

    trainer.strike = Strike(phase=phase, during=during)
    try:
        assert len(await rounds.run_phase(PREPARE, pb.Round())) == 1
        for _ in range(2):
            assert len(await rounds.run_phases((TRANSFER, VERIFY), pb.Round())) == 1
    finally:
        await trainer.close()
    assert inner.calls == [(PREPARE,), (TRANSFER, VERIFY), (TRANSFER, VERIFY)]
    assert strikes == [(TRANSFER, VERIFY)]


class FakeTrainer:
    """Whose parameter is 1 less after each step; `drift` is what a step takes more after the checkpoint was read."""

    def __init__(self, folder: Path, drift: float) -> None:
        self._folder, self._drift, self._value, self._version = folder, drift, 0.0, 0

    async def status(self) -> Any:
        return SimpleNamespace(policy_version=self._version)

    async def train_step(self, batch: Any) -> Any:
        self._value -= 1.0 + self._drift * (self._version > 9)
        self._version += 1
        return await self.status()

    async def save_checkpoint(self, folder: Path, *, background: bool) -> None:
        self._saved = self._value

    async def finish_checkpoint(self, folder: Path) -> None:
        """It is in memory."""

    async def restore(self, folder: Path, version: int) -> None:
        self._value, self._version = self._saved, version + 10

    async def export(self) -> Path:
        self._folder.mkdir(exist_ok=True)
        save_file({"w": torch.full((2,), self._value)}, self._folder / "model.safetensors")
        return self._folder


@pytest.mark.parametrize(
    ("drift", "first", "profiled", "says"),
    [
        (0.0, -2.0, False, ""),
        (1e-3, -2.0, False, "two steps after a resume differ"),
        (0.0, -2.1, False, "from those of one rank without options"),
        (0.0, math.nan, False, "from those of one rank without options"),
        (0.0, -2.0, True, "waited 60 s for the first step's profile"),
    ],
)
def test_a_trainer_that_trains_otherwise_is_seen(
    tmp_path: Path, drift: float, first: float, profiled: bool, says: str
) -> None:
    trainer, findings = FakeTrainer(tmp_path / "hf", drift), Findings()
    findings.kept["trainer of 0 experts"] = {"w": torch.full((2,), first)}
    fleet: Any = SimpleNamespace(
        shape=Shape(name="x"),
        scale=CPU,
        run_dir=tmp_path,
        trainer=trainer,
        export=trainer.export,
        until=partial(awaited, lambda: None),
        config=SimpleNamespace(profile=SimpleNamespace(covers=lambda step, rank: profiled)),
    )
    asyncio.run(check_trainer(fleet, findings))
    (check,) = findings.checks
    assert (says in check["wrong"][0]) if says else check["passed"], check
    if profiled:  # made beside the trainer, after the checks
        fleet.until = partial(awaited, lambda: write_table(tmp_path))
        asyncio.run(check_trainer(fleet, findings))
        assert not [wrong for wrong in findings.checks[-1]["wrong"] if "profile" in wrong]


async def awaited(
    meanwhile: Callable[[], None], condition: Callable[[], Awaitable[bool]], timeout_s: float, what: str
) -> None:
    meanwhile()
    if not await condition():
        raise RuntimeError(f"waited {timeout_s:g} s for {what}")


def write_table(run_dir: Path) -> None:
    zeros = dict.fromkeys(("seconds", "recorded_s", "compute_s", "communication_s", "exposed_s", "idle_s"), 0.0)
    step_folder(run_dir, 1).mkdir(parents=True)
    write_profile(run_dir, RankProfile(step=1, rank=0, world_size=1, timeline="cpu", parts={}, operators=(), **zeros))


def test_trainers_have_what_they_are_for(tmp_path: Path) -> None:
    configs = {shape.name: run_config(shape, CPU, tmp_path) for shapes in TRAINERS.values() for shape in shapes}
    whole = configs[ALONE[1]].trainer
    assert (whole.world_size, whole.distributed_optimizer, whole.overlap_param_gather) == (4, True, True)
    assert (whole.offload.optimizer, whole.recompute, configs[ALONE[1]].profile.steps) == (True, "full", 1)
    assert (configs[ALONE[2]].trainer.context_parallel, configs[ALONE[2]].trainer.share_prompts) == (2, True)
    assert all(config.grpo.kl_in_loss for config in configs.values())
    samples = fixed_samples(CPU.vocabulary)
    assert [samples[0].prompt == other.prompt for other in samples[1:3]] == [True, False]
    assert {len(each.tokens) for each in samples} == {len(each.logprobs) for each in samples}
