"""Presets, and settings of the loss that do not fit together."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem_config.loading import draft_config, dump_resolved, load_config
from tandem_config.sections.grpo import PRESETS, GrpoSection

MINIMAL = "model: {path: m}\ndata: {train: rows.jsonl}\n"


def write(folder: Path, grpo: str) -> Path:
    """A file with that section, in braces or as one line."""
    file = folder / "run.yaml"
    file.write_text(f"{MINIMAL}grpo: {grpo if '{' in grpo else '{' + grpo + '}'}\n", encoding="utf-8")
    return file


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_its_fields_and_the_resolved_file_shows_them(tmp_path: Path, preset: str) -> None:
    config = load_config(write(tmp_path, f"preset: {preset}"))
    text = dump_resolved(config)
    shown = yaml.safe_load(text)["grpo"]
    assert {name: shown[name] for name in PRESETS[preset]} == dict(PRESETS[preset])
    assert shown == GrpoSection().model_dump(mode="json") | {"preset": preset, **PRESETS[preset]}
    (tmp_path / "resolved.yaml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "resolved.yaml") == config


def test_without_a_preset_nothing_is_set() -> None:
    assert GrpoSection().model_fields_set == set()
    assert GrpoSection().preset is None


@pytest.mark.parametrize(
    ("file", "options", "clip_high"),
    [
        ("{preset: dapo, clip_high: 0.3}", [], 0.3),
        ("{clip_high: 0.3, preset: dapo}", [], 0.3),
        ("{preset: dapo}", ["grpo.clip_high=0.3"], 0.3),
        ("{clip_high: 0.3}", ["grpo.preset=dapo"], 0.28),
        ("{clip_high: 0.3}", ["grpo.preset=dapo", "grpo.clip_high=0.4"], 0.4),
        ("{clip_high: 0.3}", ["grpo.clip_high=0.4", "grpo.preset=dapo"], 0.4),
        ("{preset: gspo}", ["grpo.preset=dapo"], 0.28),
        ("{preset: dapo, clip_high: 0.3}", ["grpo.preset=null"], 0.3),
    ],
)
def test_what_is_given_beside_a_preset_or_after_it_wins(
    tmp_path: Path, file: str, options: list[str], clip_high: float
) -> None:
    assert load_config(write(tmp_path, file), options).grpo.clip_high == clip_high


def test_an_option_s_preset_replaces_that_of_a_resolved_file(tmp_path: Path) -> None:
    """As in `tandem run --resume`, whose file holds all settings."""
    first = load_config(write(tmp_path, "preset: gspo"))
    (tmp_path / "resolved.yaml").write_text(dump_resolved(first), encoding="utf-8")
    second = load_config(tmp_path / "resolved.yaml", ["grpo.preset=cispo"])
    assert second.grpo == GrpoSection(preset="cispo")


BAD: list[tuple[str, str, str, str, str]] = [
    ("preset: dappo", "preset", "dappo", "must be one of", "did you mean dapo?"),
    ("preset: [dapo]", "preset", "['dapo']", "must be one of", ""),
    ("objective: dr_grpo", "objective", "dr_grpo", "objective: grpo with other settings", "grpo.preset: dr_grpo"),
    ("objective: vanilla", "objective", "vanilla", "another name", "use grpo"),
    ("tis_cap: 2", "tis_cap", "2", "unknown key", "grpo.correction: tis"),
    ("loss_mode: gspo", "loss_mode", "gspo", "unknown key", "did you mean grpo.objective?"),
    ("{preset: gspo, dual_clip: 3}", "dual_clip", "3.0", "does nothing with grpo.objective: gspo", "null"),
    ("{preset: cispo, clip_low: 0.1}", "clip_low", "0.1", "does nothing with grpo.objective: cispo", "0.2"),
    ("{objective: cispo, dual_clip: 3}", "dual_clip", "3.0", "does nothing with grpo.objective: cispo", "null"),
    ("correction_high: 2", "correction_high", "2.0", "does nothing with grpo.correction: none", "null"),
    ("correction_low: 0.5", "correction_low", "0.5", "does nothing with grpo.correction: none", "null"),
    ("correction_level: sequence", "correction_level", "sequence", "does nothing with grpo.correction: none", "token"),
    ("{preset: decoupled, correction_high: 2}", "correction_high", "2.0", "grpo.correction: importance", "null"),
    ("correction: tis", "correction", "tis", "needs grpo.correction_high", "2"),
    ("{correction: icepop, correction_high: 5}", "correction", "icepop", "needs grpo.correction_low", "0.5"),
    ("{correction: mis, correction_low: 0.5}", "correction", "mis", "needs grpo.correction_high", "2"),
    ("{correction: tis, correction_high: 0.5}", "correction_high", "0.5", "must be at least 1", ""),
    ("{correction: tis, correction_high: 2, correction_low: 1}", "correction_low", "1", "must be less than 1", ""),
    ("{old_logprobs: rollout, preset: decoupled}", "correction", "importance", "recompute", "none"),
    ("{old_logprobs: rollout, correction: tis, correction_high: 2}", "correction", "tis", "recompute", "none"),
    (
        "{correction: icepop, correction_low: 0.5, correction_high: 5, correction_level: geometric}",
        "correction_level", "geometric", "weights tokens", "mis",
    ),
    ("{preset: gspo, correction: tis, correction_high: 2}", "correction_level", "token", "of whole", "geometric"),
    ("kl_in: reward", "kl_in", "reward", "does nothing with grpo.kl_coefficient: 0", "loss"),
    ("kl_estimator: k2", "kl_estimator", "k2", "does nothing with grpo.kl_coefficient: 0", "k3"),
    ("reference_refresh_every: 5", "reference_refresh_every", "5", "does nothing with grpo.kl_coefficient: 0", "null"),
    ("kl_coefficient: -0.1", "kl_coefficient", "-0.1", "must be at least 0", ""),
    ("{kl_coefficient: 0.1, kl_estimator: k4}", "kl_estimator", "k4", "must be one of", ""),
    ("{kl_coefficient: 0.1, kl_estimator: k1}", "kl_estimator", "k1", "does not bind the policy", "k2 or k3"),
    ("{kl_coefficient: 0.1, kl_in: reward, zero_variance: drop}", "zero_variance", "drop", "differ by the KL", "keep"),
    ("{kl_coefficient: 0.1, reference_refresh_every: 0}", "reference_refresh_every", "0", "must be greater than 0", ""),
    ("epochs: 0", "epochs", "0", "must be greater than 0", ""),
    ("non_finite_budget: 3", "non_finite_budget", "3", "does nothing with grpo.on_non_finite: fail", "10"),
    ("on_non_finite: ignore", "on_non_finite", "ignore", "must be one of", ""),
    ("objective: gspo", "clip_low", "0.2", "would clip next to nothing", "3e-4"),
    ("{objective: gspo, clip_low: 0.001}", "clip_high", "0.2", "would clip next to nothing", "4e-4"),
]  # fmt: skip


@pytest.mark.parametrize(("grpo", "key", "value", "message", "suggestion"), BAD, ids=[row[0] for row in BAD])
def test_settings_that_do_not_fit_are_named(
    tmp_path: Path, grpo: str, key: str, value: str, message: str, suggestion: str
) -> None:
    (problem,) = draft_config(write(tmp_path, grpo)).problems
    assert (problem.key, problem.value) == (f"grpo.{key}", value)
    assert message in problem.message
    assert suggestion in problem.suggestion


def test_a_setting_that_a_preset_makes_wrong_is_placed_where_the_preset_is(tmp_path: Path) -> None:
    (problem,) = draft_config(write(tmp_path, "{old_logprobs: rollout,\n preset: decoupled}")).problems
    assert (problem.key, problem.where) == ("grpo.correction", f"{tmp_path / 'run.yaml'}:4")


@pytest.mark.parametrize(
    "grpo",
    [
        {"preset": "gspo", "correction": "mis", "correction_level": "geometric", "correction_high": 2.0},
        {"objective": "cispo", "correction": "icepop", "correction_low": 0.5, "correction_high": 5.0},
        {"preset": "dapo", "correction": "tis", "correction_level": "sequence", "correction_high": 2.0},
        {"preset": "grpo", "kl_coefficient": 0.04, "reference_path": "m2", "reference_refresh_every": 10, "epochs": 2},
        {"kl_coefficient": 0.001, "kl_in": "reward", "kl_estimator": "k1", "old_logprobs": "rollout"},
        {"on_non_finite": "skip", "non_finite_budget": 1},
        {"preset": "dr_grpo", "baseline": "leave-one-out", "entropy_coefficient": 0.01, "dual_clip": 3.0},
    ],
)
def test_settings_that_fit(tmp_path: Path, grpo: dict[str, Any]) -> None:
    assert draft_config(write(tmp_path, str(grpo))).problems == []


@pytest.mark.parametrize(("grpo", "fits"), [("{}", False), ("preset: decoupled", True), ("preset: dapo", False)])
def test_samples_of_an_older_policy_need_a_correction(tmp_path: Path, grpo: str, fits: bool) -> None:
    file = write(tmp_path, grpo)
    assert draft_config(file).problems == []
    problems = draft_config(file, ["schedule.kind=one_step_off"]).problems
    assert [problem.key for problem in problems] == ([] if fits else ["schedule.kind"])
    assert all("grpo.preset: decoupled" in str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["schedule.kind=async"], None),
        (["schedule.kind=async", "schedule.depth=2", "schedule.window=2", "schedule.max_token_age=1"], None),
        (["schedule.kind=async", "schedule.depth=3"], "schedule.depth"),
        (["schedule.kind=async", "schedule.window=2.1"], "schedule.window"),
        (["schedule.kind=async", "schedule.window=0.031"], "schedule.window"),
        (["schedule.kind=async", "schedule.window=0.04"], None),
        (["schedule.kind=async", "schedule.window=0"], None),
        (["schedule.kind=async", "schedule.max_staleness=0"], "schedule.max_staleness"),
        (["schedule.kind=async", "schedule.max_staleness=17"], "schedule.max_staleness"),
        (["schedule.kind=async", "schedule.stale=wait", "schedule.max_token_age=1"], "schedule.max_token_age"),
        (["schedule.kind=async", "sync.pause=drain"], "sync.pause"),
        (["schedule.kind=async", "sync.pause=abort_requeue"], None),
        (["schedule.kind=async", "sync.pause=abort_requeue", "grpo.stop=[END]"], "sync.pause"),
        (["schedule.kind=async", "sync.pause=recompute", "grpo.stop=[END]"], None),
        (["schedule.kind=async", "sync.pause=recompute", "sync.install=in_place"], None),
        (["schedule.kind=async", "grpo.zero_variance=replace"], None),
        (["schedule.kind=one_step_off", "grpo.zero_variance=replace"], "grpo.zero_variance"),
        (["schedule.kind=one_step_off", "schedule.window=0.5"], "schedule.window"),
        (["schedule.max_token_age=3"], "schedule.max_token_age"),
        (["schedule.kind=async", "evaluation.replicas=1", "rollout.replicas=2"], None),
        (["schedule.kind=async", "evaluation.replicas=2", "rollout.replicas=2"], "evaluation.replicas"),
        (
            ["schedule.kind=async", "evaluation.replicas=1", "rollout.replicas=2", "rollout.min_replicas=2"],
            "evaluation.replicas",
        ),
        (
            ["schedule.kind=async", "evaluation.replicas=1", "rollout.replicas=2", "evaluation.concurrent=false"],
            "evaluation.replicas",
        ),
        (["evaluation.replicas=1", "rollout.replicas=2"], "evaluation.replicas"),
    ],
)
def test_what_async_cannot_do_or_others_do_not_read_is_named(
    tmp_path: Path, settings: list[str], key: str | None
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: {path: model}\ndata: {train: t.jsonl}\ngrpo: {preset: decoupled, prompts_per_iteration: 64}\n"
    )
    draft = draft_config(file, settings)
    assert [problem.key for problem in draft.problems] == ([] if key is None else [key])
    if "schedule.window=0.031" in settings:
        assert (draft.problems[0].severity, "to 0.04 at least" in draft.problems[0].suggestion) == ("warning", True)
    if "schedule.max_staleness=0" in settings:
        assert "schedule.kind: sync" in draft.problems[0].suggestion
    if draft.config is not None and draft.config.schedule.kind == "async" and "sync.pause" not in str(settings):
        assert (draft.config.sync.install, draft.config.sync.pause) == ("staged", "keep_kv")
        assert draft.config.evaluation.concurrent or "evaluation.concurrent=false" in settings
