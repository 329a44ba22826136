"""What may change on a resume: every key is in one table, and the rest is refused by name."""

import ast
from pathlib import Path
from typing import Any

import pytest

from servicekit.errors import ConfigError
from tandem_config import keys
from tandem_config.comparing.agreeing import agreed_settings
from tandem_config.comparing.described import described
from tandem_config.comparing.resuming import (
    BY_CONTENT,
    CONFIGURATION,
    MAY_CHANGE,
    MUST_STAY,
    OF_A_REPLICA,
    OF_THE_COORDINATOR,
    OF_THE_TRAINER,
    RunComparison,
    compare,
    mark_of,
    refuse,
)
from tandem_config.schema import RunConfig
from tandem_files.run_folder import RunIdentity

REPO = Path(__file__).resolve().parents[3]
OWNER = RunIdentity(run_id="first")


def config(**sections: Any) -> RunConfig:
    base: dict[str, Any] = {"model": {"path": Path("/models/qwen")}, "data": {"train": Path("/data/sums.jsonl")}}
    for section, settings in sections.items():
        base[section] = base.get(section, {}) | settings if isinstance(settings, dict) else settings
    return RunConfig.model_validate(base)


def against(saved: RunConfig, now: RunConfig, owner: RunIdentity = OWNER) -> RunComparison:
    return compare(mark_of(saved, "first"), now, owner)


def test_every_key_is_in_one_table() -> None:
    tables = {"MAY_CHANGE": MAY_CHANGE, "BY_CONTENT": BY_CONTENT, "MUST_STAY": MUST_STAY}
    for key in keys.all_keys():
        places = [name for name, table in tables.items() if key in table]
        assert len(places) == 1, f"{key} is in {places or 'no table'} of tandem_config/comparing/resuming.py"
    assert frozenset().union(*tables.values()) <= set(keys.all_keys())


def test_the_same_configuration_may_resume_whatever_its_folders_are() -> None:
    moved = config(
        model={"path": Path("/mnt/qwen")}, data={"train": Path("/mnt/sums.jsonl")}, run={"output_dir": Path("x")}
    )
    comparison = against(config(), moved)
    assert (comparison.refused, comparison.recorded) == ([], True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"run": {"name": "second"}}, "run.name: default in the checkpoint, second in the run"),
        ({"run": {"seed": 7}}, "run.seed: 0 in the checkpoint, 7 in the run"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype: float32 in the checkpoint, bfloat16 in the run"),
        ({"reward": "math_verify"}, "reward.kind: exact_match in the checkpoint, math_verify in the run"),
        ({"reward": [{"kind": "exact_match", "weight": 0.5}]}, "reward.weight: 1.0 in the checkpoint, 0.5 in the run"),
        ({"reward": ["exact_match", "overlong"]}, "entries of reward: 1 in the checkpoint, 2 in the run"),
        ({"grpo": {"objective": "gspo"}}, "grpo.objective: grpo in the checkpoint, gspo in the run"),
        (
            {"trainer": {"initial_checkpoint": Path("/a/step-00000001")}},
            "trainer.initial_checkpoint: null in the checkpoint, /a/step-00000001",
        ),
    ],
)
def test_what_must_stay_is_refused_by_name(change: dict[str, Any], told: str) -> None:
    reward = change.get("reward")
    if isinstance(reward, str):
        change = {"reward": ({"kind": reward},)}
    elif reward is not None:
        change = {"reward": tuple(entry if isinstance(entry, dict) else {"kind": entry} for entry in reward)}
    comparison = against(config(), config(**change))
    assert comparison.refused == [text for text in comparison.refused if text.startswith(told)] != []
    with pytest.raises(
        ConfigError, match=r"cannot resume from step-4: .*give back what was, or start a new run with an id"
    ):
        refuse(comparison, "step-4")


def test_the_second_of_two_rewards_is_named_with_its_place() -> None:
    first, second = {"kind": "exact_match"}, {"kind": "overlong"}
    comparison = against(config(reward=(first, second)), config(reward=(first, second | {"weight": 0.1})))
    assert comparison.refused == ["reward[1].weight: 1.0 in the checkpoint, 0.1 in the run"]


def test_another_run_id_is_refused_whatever_its_configuration() -> None:
    assert against(config(), config(), RunIdentity(run_id="second")).refused == [
        "run id (TANDEM_RUN_ID): first in the checkpoint, second in the run"
    ]


def test_a_folder_that_was_renamed_names_its_run_anew() -> None:
    launched = RunIdentity(run_id="first", launch_id="first-2")
    assert against(config(), config(run={"name": "renamed"}), launched).refused == []


def test_what_may_change_is_listed_and_not_refused() -> None:
    now = config(run={"iterations": 50}, trainer={"learning_rate": 1e-7, "tensor_parallel": 2}, rollout={"replicas": 3})
    comparison = against(config(), now)
    assert comparison.refused == []
    assert comparison.changed == [
        "run.iterations: 40 in the checkpoint, 50 in the run",
        "trainer.tensor_parallel: 1 in the checkpoint, 2 in the run",
        f"trainer.learning_rate: {config().trainer.learning_rate} in the checkpoint, 1e-07 in the run",
        "rollout.replicas: 1 in the checkpoint, 3 in the run",
    ]


def test_settings_that_the_checkpoints_release_did_not_have_count_as_their_default() -> None:
    mark = mark_of(config(), "first")
    for key in ("run.seed", "grpo.objective"):
        del mark[CONFIGURATION][key]
    mark[CONFIGURATION]["grpo.of_another_release"] = "1"
    assert compare(mark, config(), OWNER).refused == []
    assert compare(mark, config(run={"seed": 7}), OWNER).refused == [
        "run.seed: not set in the checkpoint, 7 in the run"
    ]


def test_a_checkpoint_of_an_older_release_is_not_compared() -> None:
    assert compare({"iteration": 4}, config(run={"seed": 7}), OWNER) == RunComparison(
        refused=[], changed=[], recorded=False
    )


def test_secrets_and_long_values_are_digests() -> None:
    judge = {"kind": "judge", "url": "http://judge:8000/v1", "model": "m", "body": {"key": "hunter2"}}
    mlflow = {"kind": "mlflow", "uri": "http://me:hunter2@mlflow:5000"}
    texts = described(config(reward=({**judge, "prompt": "x" * 100 + "{completion}"},), trackers=(mlflow,)))
    assert not [text for text in texts.values() if "hunter2" in text or "xxxx" in text]
    assert texts["trackers[0].uri"].startswith("(digest ")
    assert texts["reward[0].url"] == '"http://judge:8000/v1"'
    assert texts["reward[0].model"] == '"m"'


def test_own_code_counts_by_its_file_and_function() -> None:
    def of(reference: str) -> str:
        return described(config(reward=({"kind": "function", "function": reference},)))["reward[0].function"]

    assert of("/a/rewards.py:concise") == of("/b/rewards.py:concise") == '"rewards.py:concise"'
    assert len({of("/a/rewards.py:concise"), of("/a/rewards.py:long"), of("rewards:concise")}) == 3


def test_services_agree_on_all_but_what_one_of_them_acts_on_alone() -> None:
    alone_of = [OF_THE_COORDINATOR, OF_THE_TRAINER, OF_A_REPLICA]
    assert frozenset().union(*alone_of) <= MAY_CHANGE
    assert sum(map(len, alone_of)) == len(frozenset().union(*alone_of))
    agreed = agreed_settings(config())
    sizes = {"replicas": 7, "max_total_tokens": 1024}
    alone = config(run={"keep_checkpoints": 5}, rollout=sizes, samples={"every": 3}, trainer={"tensor_parallel": 2})
    assert agreed_settings(alone) == agreed
    for other in ({"grpo": {"temperature": 0.7}}, {"trainer": {"learning_rate": 1e-7}}, {"run": {"iterations": 9}}):
        assert agreed_settings(config(**other)) != agreed


@pytest.mark.parametrize(
    ("service", "others"),
    [
        ("trainer_service", OF_THE_COORDINATOR | OF_A_REPLICA),
        ("rollout_service", OF_THE_COORDINATOR | OF_THE_TRAINER),
    ],
)
def test_no_other_service_acts_on_the_settings_of_one(service: str, others: frozenset[str]) -> None:
    read = set()
    for path in (REPO / service).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                read.add(f"{node.value.attr.lstrip('_')}.{node.attr}")
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id != "samples":
                read.add(f"{node.value.id}.{node.attr}")  # samples: a batch
    assert "sync.lease_ttl_s" in read
    assert sorted(read & others) == []
