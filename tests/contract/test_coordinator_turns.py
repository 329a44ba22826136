"""Runs with an environment that answers between turns: what trainer, metrics, samples, and a resume get."""

import asyncio
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from coordinator.app import conduct
from servicekit.environment import ServiceEnvironment
from tandem_clients.trainer import sample_chunks
from tandem_config.schema import RunConfig
from tandem_files.samples.folder import SampleFolder
from tests.contract.coordinator_runs import attempt, rows, saved_state, with_settings
from tests.contract.test_coordinator_ledger import fail_sync_after
from tests.fakes.fake_fleet import announced_fleet
from tests.fakes.fake_trainer import FakeTrainer
from tests.kit.folders import EOS, encode

# Roles have no marks: a message ends with "=", an answer with the end of sequence.
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '<eos>' if m.role == 'assistant' else '=' }}{% endfor %}"
TWICE = """
import os

class Twice:
    def __init__(self, log):
        self.log = log

    async def reset(self, row, seed):
        self.answer = row["answer"]
        return []

    async def step(self, turn):
        with open(self.log, "a") as log:
            log.write("x")
        if turn.index == 0:
            return [{"role": "user", "content": "1+1"}], 0.25 * (turn.text == self.answer), False
        return [], 1.0, True
"""
# An earlier turn is another text in it, in front of a user's message.
FORGETS = """{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}{% set ns.last = loop.index %}
{%- endfor %}{% set seen = namespace(users=0) %}{% for m in messages %}
{%- if m.role == 'user' %}{% set seen.users = seen.users + 1 %}{% endif %}
{{- '0+' if m.role == 'assistant' and seen.users < ns.last }}{{ m.content }}
{{- '<eos>' if m.role == 'assistant' else '=' }}{% endfor %}"""
BETWEEN = encode("1+1=")


@pytest.fixture
def with_turns(config: RunConfig, tmp_path: Path) -> RunConfig:
    (tmp_path / "twice.py").write_text(TWICE)
    return with_settings(
        config,
        run={"iterations": 3},
        data={"prompt_as": "user_message", "chat_template": TEMPLATE, "heldout": None},
        grpo={"max_new_tokens": 24},
        reward=[{"kind": "environment"}],
        environment={"function": f"{tmp_path}/twice.py:Twice", "args": {"log": str(tmp_path / "log")}, "workers": 1},
    )


def masks_of(trainer: FakeTrainer) -> dict[str, tuple[list[int], list[int]]]:
    """Ids and mask of each trained sample."""
    found = {}
    for chunk in (chunk for step in trainer.steps for chunk in step.chunks):
        ids, mask = iter(memoryview(chunk.token_ids_u32).cast("I")), iter(chunk.loss_mask_u8)
        lengths = zip(chunk.prompt_lengths, chunk.completion_lengths, strict=True)
        for name, (before, length) in zip(chunk.sample_ids, lengths, strict=True):
            found[name] = (list(islice(ids, before + length))[before:], list(islice(mask, length)))
    return found


@pytest.mark.parametrize("kind", ["sync", "one_step_off", "async"])
async def test_every_schedule_trains_on_what_the_policy_said(
    with_turns: RunConfig, environment: ServiceEnvironment, kind: str
) -> None:
    changes: dict[str, Any] = {"schedule": {"kind": kind}}
    if kind != "sync":
        changes["grpo"] = {"preset": "decoupled"}
    if kind == "async":
        changes["sync"] = {"install": "staged", "pause": "keep_kv"}
    config, trainer = with_settings(with_turns, **changes), FakeTrainer()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    trained = masks_of(trainer)
    assert len(trained) == 3 * 32
    for ids, mask in trained.values():
        first = ids.index(EOS) + 1
        assert ids[first : first + len(BETWEEN)] == BETWEEN
        assert mask == [1] * first + [0] * len(BETWEEN) + [1] * (len(ids) - first - len(BETWEEN))
        assert ids[-1] == EOS
    assert all(1.0 <= row["reward_mean"] <= 1.25 for row in rows(environment))
    assert {(row["turns_mean"], row["failed_episodes"]) for row in rows(environment)} == {(2.0, 0)}
    samples = SampleFolder(environment.run_dir).load(1, "train", range(32))
    said = [json.loads(sample.transcript) for sample in samples]
    assert {one["end"] for one in said} == {"done"}
    assert {len(one["messages"]) for one in said} == {3}
    assert {one["rewards"][1] for one in said} == {1.0}
    assert all(sample.reward == sum(one["rewards"]) for sample, one in zip(samples, said, strict=True))


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_turn_whose_history_the_template_changes_is_trained_behind_what_it_read(
    with_turns: RunConfig, environment: ServiceEnvironment, kind: str
) -> None:
    changes: dict[str, Any] = {"schedule": {"kind": kind}, "data": {"chat_template": FORGETS}}
    if kind == "async":
        changes |= {"grpo": {"preset": "decoupled"}, "sync": {"install": "staged", "pause": "keep_kv"}}
    config, trainer = with_settings(with_turns, **changes), FakeTrainer()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    found, flags = sequences_of(trainer)
    firsts = [name for name, continues in flags.items() if not continues]
    assert len(firsts) == 3 * 32
    assert len(found) == 2 * len(firsts)
    for name in firsts:
        (prompt, first), (read, second) = found[name], found[f"{name}.1"]
        assert first[-1] == second[-1] == EOS
        assert read == [*prompt, *encode("0+"), *first, *BETWEEN], "the template's own text, behind the same prompt"
    assert {row["turns_mean"] for row in rows(environment)} == {2.0}
    kept = SampleFolder(environment.run_dir).load(1, "train", range(32))
    assert {json.loads(sample.transcript)["messages"][1]["branch"] for sample in kept} == {True}


async def test_the_reference_measures_every_branch(
    with_turns: RunConfig, environment: ServiceEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the messages are cut; tokens that only repeat what was said count nowhere."""
    monkeypatch.setattr(sample_chunks, "__defaults__", (0, 1))
    config = with_settings(
        with_turns,
        run={"iterations": 1},
        data={"chat_template": FORGETS},
        grpo={"kl_in": "reward", "kl_coefficient": 0.5, "kl_estimator": "k1"},
    )
    trainer = FakeTrainer(reference_logprob=-0.625)
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert trainer.measured.count((1, True)) == 2 * 32
    (row,) = rows(environment)
    assert row["kl_reference"] == pytest.approx(math.exp(-0.5) + 0.5 - 1)


async def test_a_history_that_is_kept_has_no_branches(with_turns: RunConfig, environment: ServiceEnvironment) -> None:
    config = with_settings(with_turns, data={"chat_template": FORGETS}, environment={"history": "keep"})
    trainer = FakeTrainer()
    async with announced_fleet(environment.redis_url, environment.run_id, trainer):
        assert await conduct(config, environment, resume=False, stop=asyncio.Event()) == 0
    assert {len(mask) - sum(mask) for _, mask in masks_of(trainer).values()} == {len(BETWEEN)}
    assert not any(sequences_of(trainer)[1].values())


def sequences_of(trainer: FakeTrainer) -> tuple[dict[str, tuple[list[int], list[int]]], dict[str, bool]]:
    """Prompt and completion of each sequence, and whether it continues an episode."""
    found, flags = dict[str, tuple[list[int], list[int]]](), dict[str, bool]()
    for chunk in (chunk for step in trainer.steps for chunk in step.chunks):
        ids = iter(memoryview(chunk.token_ids_u32).cast("I"))
        lengths = zip(chunk.prompt_lengths, chunk.completion_lengths, strict=True)
        for name, (before, length) in zip(chunk.sample_ids, lengths, strict=True):
            found[name] = (list(islice(ids, before)), list(islice(ids, length)))
        flags |= dict(zip(chunk.sample_ids, chunk.continues or [False] * len(chunk.sample_ids), strict=True))
    return found, flags


async def test_a_resume_restores_episodes_that_had_ended(
    with_turns: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    """With what they got: no environment is asked again."""
    config = with_settings(with_turns, run={"iterations": 4, "checkpoint_every": 3})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.trainer_service.before_step = fail_sync_after(fleet, 4)
        assert await attempt(config, environment, resume=False) == 1
        first = fleet.trainer_service.steps[-1]
    turns = 4 * 32 * 2
    assert (tmp_path / "log").read_text() == "x" * turns
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        assert await attempt(config, environment) == 0
        again = fleet.trainer_service.steps[0]
    assert again.chunks == first.chunks
    assert (tmp_path / "log").read_text() == "x" * turns
    assert rows(environment)[-1]["reward_mean"] >= 1.0


async def test_a_resume_with_other_code_is_warned_of_and_asks_it_about_every_episode(
    with_turns: RunConfig, environment: ServiceEnvironment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Episodes that had ended would mix two environments in one batch."""
    config = with_settings(with_turns, run={"iterations": 4, "checkpoint_every": 3})
    async with announced_fleet(environment.redis_url, environment.run_id) as fleet:
        fleet.trainer_service.before_step = fail_sync_after(fleet, 4)
        assert await attempt(config, environment, resume=False) == 1
    (tmp_path / "twice.py").write_text(TWICE.replace("[], 1.0, True", "[], 2.0, True"))
    async with announced_fleet(environment.redis_url, environment.run_id):
        assert await attempt(config, environment) == 0
    assert caplog.text.count(f"environment: code of {tmp_path}/twice.py: ") == 1
    assert caplog.text.count("the scores before and after this resume do not compare") == 1
    assert (tmp_path / "log").read_text() == "x" * (5 * 32 * 2)
    assert rows(environment)[-1]["reward_mean"] >= 2.0


async def test_a_run_that_is_stopped_while_its_environment_starts_does_not_wait_for_it(
    with_turns: RunConfig, environment: ServiceEnvironment, tmp_path: Path
) -> None:
    (tmp_path / "twice.py").write_text(f"import time\ntime.sleep(100)\n{TWICE}")
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, stop.set)
    async with announced_fleet(environment.redis_url, environment.run_id), asyncio.timeout(60):
        assert await conduct(with_turns, environment, resume=False, stop=stop) == 0
    # Where it was stopped before it served, it has no state yet.
    has_state = (environment.run_dir / "state.json").exists()
    assert not has_state or saved_state(environment)["status"] == "interrupted"
    assert not (environment.run_dir / "metrics.jsonl").exists()


async def test_a_broken_environment_ends_the_run_by_name_when_most_episodes_fail(
    with_turns: RunConfig, environment: ServiceEnvironment, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = "os.fails = getattr(os, 'fails', 0) + 1\n        if ({} if os.fails % 2 else [])[turn.index] == 0:"
    (tmp_path / "twice.py").write_text(TWICE.replace("if turn.index == 0:", fails))
    async with announced_fleet(environment.redis_url, environment.run_id):
        assert await attempt(with_turns, environment, resume=False) == 1
    why = saved_state(environment)["error"]
    assert "environment: 32 of 32 episodes failed, more than environment.max_error_share = 50%" in why
    assert "KeyError: 0 (twice.py:16)" in why
    assert "16 of them: " in why
    assert "IndexError: list index out of range (twice.py:16)" in why
