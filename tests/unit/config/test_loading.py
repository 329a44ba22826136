"""From YAML and --set to a RunConfig: what is accepted, where paths lead, and every way to get it wrong."""

from pathlib import Path

import pytest
import yaml

from tandem_config.loading import draft_config, dump_resolved, load_config
from tandem_config.problems import ConfigErrors, ConfigProblem
from tandem_config.sections.data import DataSource

MINIMAL = "model:\n  path: m\ndata:\n  train: rows.jsonl\n"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def problems_of(path: Path | None, overrides: list[str] | None = None) -> list[ConfigProblem]:
    with pytest.raises(ConfigErrors) as raised:
        load_config(path, overrides or [])
    return raised.value.problems


def test_paths_in_the_file_are_relative_to_it_and_results_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config = load_config(write(tmp_path, MINIMAL.replace("m\n", "../m\n")), ["data.heldout=held.jsonl"])
    assert config.model.path == tmp_path.parent / "m"
    assert config.data.train == (DataSource(path=tmp_path / "rows.jsonl"),)
    assert config.data.heldout == (DataSource(path=elsewhere / "held.jsonl"),)
    assert config.run.output_dir == elsewhere / "runs"


def test_a_later_override_wins_and_values_are_yaml(tmp_path: Path) -> None:
    options = ["trainer.learning_rate=1e-3", "trainer.learning_rate=2e-4", "run.name=2026", "data.shuffle=false"]
    config = load_config(write(tmp_path, MINIMAL + "grpo: {dual_clip: 2}\n"), [*options, "grpo.dual_clip=null"])
    assert (config.trainer.learning_rate, config.run.name, config.data.shuffle) == (2e-4, "2026", False)
    assert config.grpo.dual_clip is None


def test_numbers_without_a_dot_are_numbers(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL + "trainer: {learning_rate: 3e-4, adam_eps: 1E-9, clip_grad: 2}\n"))
    assert (config.trainer.learning_rate, config.trainer.adam_eps, config.trainer.clip_grad) == (3e-4, 1e-9, 2.0)


def test_a_resolved_file_loads_to_the_same_configuration_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(write(tmp_path, MINIMAL), ["reward.kind=regex", r"reward.pattern=is (\d+): 'x'", "run.seed=3"])
    resolved = tmp_path / "resolved" / "config.resolved.yaml"
    resolved.parent.mkdir()
    resolved.write_text(dump_resolved(config), encoding="utf-8")
    monkeypatch.chdir(resolved.parent)
    assert load_config(resolved) == config


@pytest.mark.parametrize("target", [-0.25, -5.5, 80.0])
def test_a_target_of_a_reward_of_any_scale(tmp_path: Path, target: float) -> None:
    scored = "data: {train: x, heldout: y}\nreward: {kind: function, function: scores.py:score}\n"
    config = load_config(write(tmp_path, f"model: {{path: m}}\n{scored}"), [f"run.target_accuracy={target}"])
    assert config.run.target_accuracy == target


def test_lists_are_kept_in_the_file_and_given_by_option(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL + "grpo: {stop: [</answer>]}\n"), ["grpo.stop_token_ids=[3, 4]"])
    assert (config.grpo.stop, config.grpo.stop_token_ids) == (("</answer>",), (3, 4))
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(config), encoding="utf-8")
    assert load_config(resolved) == config


def test_evaluation_sets_are_those_of_the_section_after_the_heldout_data(tmp_path: Path) -> None:
    sets = "evaluation: {sets: [{name: aime, data: aime.jsonl, samples: 16, temperature: 0.6}]}\n"
    config = load_config(write(tmp_path, MINIMAL + sets), ["data.heldout=held.jsonl", "run.target_accuracy=0.5"])
    assert [(each.name, each.samples) for each in config.evaluation_sets()] == [("heldout", 1), ("aime", 16)]
    assert [source.path for source in config.evaluation_sets()[1].data] == [tmp_path / "aime.jsonl"]
    assert list(config.evaluation_sets()[1].metrics()) == ["mean@16", "pass@2", "pass@4", "pass@8", "pass@16", "maj@16"]
    resolved = tmp_path / "resolved" / "config.yaml"
    resolved.parent.mkdir()
    resolved.write_text(dump_resolved(config), encoding="utf-8")
    assert load_config(resolved) == config


def test_sources_in_each_form_keep_their_paths_and_are_written_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture = "[{path: a.jsonl, weight: 2, name: A}, {path: '../b/*.parquet', weight: 0.5, answer_key: x.y}]"
    text = f"model: {{path: m}}\ndata: {{train: {mixture}, heldout: [h.jsonl, '~/i.jsonl'], chat_template: t.jinja}}\n"
    monkeypatch.setenv("HOME", "/home/me")
    config = load_config(write(tmp_path, text))
    assert config.data.train == (
        DataSource(path=tmp_path / "a.jsonl", weight=2.0, name="A"),
        DataSource(path=tmp_path.parent / "b/*.parquet", weight=0.5, answer_key="x.y"),
    )
    assert [source.path for source in config.data.heldout or ()] == [tmp_path / "h.jsonl", Path("/home/me/i.jsonl")]
    assert config.data.chat_template == str(tmp_path / "t.jinja")
    written = yaml.safe_load(dump_resolved(config))["data"]
    assert written["train"][0] == {"path": str(tmp_path / "a.jsonl"), "weight": 2.0, "name": "A"}
    assert written["heldout"] == [str(tmp_path / "h.jsonl"), "/home/me/i.jsonl"]
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(config), encoding="utf-8")
    monkeypatch.chdir("/")
    assert load_config(resolved) == config


def test_rows_need_no_answer_where_no_reward_reads_one(tmp_path: Path) -> None:
    options = ["data.answer_key=null", "reward.kind=regex", r"reward.pattern=\(x\) (?:y|z)"]
    assert load_config(write(tmp_path, MINIMAL), options).data.answer_key is None
    text = "model: {path: m}\ndata: {train: {path: a, answer_key: x}, answer_key: null}\n"
    assert load_config(write(tmp_path, text)).data.train[0].answer_key == "x"


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ("a: b", ["a: b"]),
        ("[a, {path: b}]", ["a", "b"]),
        ("{path: b, name: x}", ["b"]),
        ("'[1].jsonl'", ["[1].jsonl"]),
    ],
)
def test_sources_in_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, paths: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(write(tmp_path, MINIMAL), [f"data.train={value}"])
    assert [source.path for source in config.data.train] == [tmp_path / path for path in paths]


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, MINIMAL + "grpo:\n")).grpo.group_size == 16


# file after MINIMAL, or --set; expected key, value, part of the message, part of the suggestion.
BAD_FILES = [
    ("grpo: {group_sise: 4}", "grpo.group_sise", "4", "unknown key", "did you mean grpo.group_size?"),
    ("grpo: {learning_rate: 1e-4}", "grpo.learning_rate", "0.0001", "unknown key", "trainer.learning_rate?"),
    ("rollout: {learnin_rate: 1}", "rollout.learnin_rate", "1", "unknown key", "trainer.learning_rate?"),
    ("trainr: {learning_rate: 1}", "trainr", "", "unknown section", "did you mean trainer?"),
    ("group_size: 4", "group_size", "4", "unknown section", "did you mean grpo.group_size?"),
    ("grpo: {xyzzy: 1}", "grpo.xyzzy", "1", "unknown key", "known keys here: preset, prompts_per_iteration"),
    ("grpo: {group_size: 1}", "grpo.group_size", "1", "every advantage would be 0", "16"),
    ("grpo: {group_size: 4.5}", "grpo.group_size", "4.5", "whole number", "write 4"),
    ("grpo: {group_size: '4'}", "grpo.group_size", "4", "whole number", "remove the quotes"),
    ("grpo: {group_size: true}", "grpo.group_size", "true", "whole number", "Completions"),
    ("grpo: {group_size: many}", "grpo.group_size", "many", "whole number", "Completions"),
    ("grpo: {clip_low: 2}", "grpo.clip_low", "2", "less than 1", "lower bound"),
    ("grpo: {clip_high: .inf}", "grpo.clip_high", "inf", "finite", ""),
    ("grpo: {clip_high: .nan}", "grpo.clip_high", "nan", "finite", ""),
    ("run: {target_accuracy: .inf}", "run.target_accuracy", "inf", "finite", ""),
    ("run: {name: 12}", "run.name", "12", "must be text", 'quote it: "12"'),
    ("run: {name: ../x}", "run.name", "../x", "letters", ""),
    ("data: {train: x, shuffle: maybe}", "data.shuffle", "maybe", "true or false", ""),
    ("model: {path: x, dtype: bfloat61}", "model.dtype", "bfloat61", "'float32' or 'bfloat16'", "mean bfloat16?"),
    ("grpo: {aggregation: token_mean}", "grpo.aggregation", "token_mean", "must be one of", "did you mean token-mean?"),
    (
        "grpo: {aggregation: seq-mean-token-sum-norm}",
        "grpo.aggregation",
        "seq-mean-token-sum-norm",
        "in verl it is",
        "use dr-grpo",
    ),
    ("grpo: {use_kl_loss: true}", "grpo.use_kl_loss", "true", "unknown key", "grpo.kl_coefficient is more than 0"),
    ("grpo: {kl_loss_coef: 0.1}", "grpo.kl_loss_coef", "0.1", "unknown key", "did you mean grpo.kl_coefficient?"),
    ("grpo: {ppo_epochs: 2}", "grpo.ppo_epochs", "2", "unknown key", "did you mean grpo.epochs?"),
    ("grpo: {num_generations: 8}", "grpo.num_generations", "8", "unknown key", "mean grpo.group_size?"),
    ("grpo: {top_p: 0.9}", "grpo.top_p", "0.9", "unknown key", "not be those of the distribution that was sampled"),
    ("grpo: {repetition_penalty: 1.1}", "grpo.repetition_penalty", "1.1", "unknown key", "not for training"),
    ("grpo: {stop: </answer>}", "grpo.stop", "</answer>", "must be a list", "Texts that end"),
    ("grpo: {stop: ['</answer>', '']}", "grpo.stop", "", "must not be empty", "Texts that end"),
    ("grpo: {stop: [7]}", "grpo.stop", "7", "must be text", 'quote it: "7"'),
    ("grpo: {stop_token_ids: [3, -1]}", "grpo.stop_token_ids", "-1", "must be at least 0", ""),
    ("grpo: {stop_token_ids: ['3']}", "grpo.stop_token_ids", "3", "whole number", "remove the quotes"),
    ("trainer: {recompute: true}", "trainer.recompute", "true", "'none', 'selective' or 'full'", ""),
    ("trainer: {gradient_checkpointing: true}", "trainer.gradient_checkpointing", "true", "unknown key",
     "trainer.recompute"),
    ("trainer: {lora_rank: 8}", "trainer.lora_rank", "8", "unknown key", "no LoRA"),
    ("run: {report_to: wandb}", "run.report_to", "wandb", "unknown key", "mean trackers?"),
    ("logger: [wandb]", "logger", "['wandb']", "unknown section", "mean trackers?"),
    ("run: {save_every: 5}", "run.save_every", "5", "unknown key", "mean run.checkpoint_every?"),
    ("model: {dtype: float32}", "model.path", "", "is missing and has no default", "add `path:` under `model:`"),
    ("model: {path: ''}", "model.path", "", "must be a path", "Hugging Face model folder"),
    ("trainer: 5", "trainer", "5", "must be a section", "tensor_parallel"),
    ("trainer: {tensor_parallel: [1, 2]}", "trainer.tensor_parallel", "[1, 2]", "whole number", ""),
    ("rollout: {replicas: 2, min_replicas: 3}", "rollout.min_replicas", "3", "could never start", "at most 2"),
    ("reward: {kind: regex}", "reward.pattern", "", "is missing and has no default", "group 1 must equal"),
    ("reward: {kind: regex, pattern: '(a'}", "reward.pattern", "(a", "not a regular expression", "single quotes"),
    ("grpo: {updates_per_iteration: 7}", "grpo.updates_per_iteration", "7", "does not divide the 1024 samples", "8"),
    (
        "grpo: {prompts_per_iteration: 6, updates_divide: prompts}",
        "grpo.updates_divide",
        "prompts",
        "updates_per_iteration 4 does not divide the 6 prompts",
        "samples",
    ),
    ("trainer: {sequence_parallel: true}", "trainer.sequence_parallel", "true", "tensor_parallel is 1", "false"),
    ("rollout: {tensor_parallel: 4, nodes: 3}", "rollout.nodes", "3", "4 ranks", "1, 2, 4"),
    (
        "rollout: {tensor_parallel: 4, nodes: 2}\nfleet: {kind: kubernetes}",
        "fleet.rollout_set_kind",
        "StatefulSet",
        "rollout.nodes is 2",
        "lws-rollout",
    ),
    ("rollout: {tensor_parallel: 4, expert_parallel: 3}", "rollout.expert_parallel", "3", "4 ranks", "1, 2, 4"),
    ("trainer: {virtual_pipeline: 2}", "trainer.virtual_pipeline", "2", "pipeline_parallel is 1", "leave"),
    ("trainer: {loss_counts: true}", "trainer.loss_counts", "true", "pipeline_parallel is 1", "2 or more"),
    ("trainer: {pipeline_parallel: 2, last_stage_layers: 1, loss_counts: true}", "trainer.last_stage_layers", "1",
     "two ways", "one of them"),
    ("trainer: {data_parallel: 4, expert_parallel: 3}", "trainer.expert_parallel", "3", "the 4 ranks", "1, 2, 4"),
    ("trainer: {expert_tensor_parallel: 2}", "trainer.expert_parallel", "1", "the 1 ranks", "expert_tensor_parallel"),
    ("trainer: {distributed_optimizer: true}", "trainer.distributed_optimizer", "true", "context_parallel is 1", "2"),
    ("trainer: {overlap_grad_reduce: true}", "trainer.overlap_grad_reduce", "true", "context_parallel is 1", "false"),
    ("trainer: {data_parallel: 2, overlap_param_gather: true, overlap_grad_reduce: true}",
     "trainer.overlap_param_gather", "true", "needs trainer.distributed_optimizer", "distributed_optimizer: true"),
    ("trainer: {data_parallel: 2, overlap_param_gather: true, distributed_optimizer: true}",
     "trainer.overlap_param_gather", "true", "needs trainer.overlap_grad_reduce", "overlap_grad_reduce: true"),
    ("trainer: {data_parallel: 2, ddp_bucket_size: 100}", "trainer.ddp_bucket_size", "100", "overlap_grad_reduce",
     "leave"),
    ("trainer: {moe_grouped_gemm: true}", "trainer.moe_grouped_gemm", "true", "layer_spec is torch", "leave"),
    ("profile: {steps: 1, ranks: [4]}", "profile.ranks", "[4]", "has 1, counted from 0", "[] for all"),
    ("profile: {steps: 3, every: 2}", "profile.every", "2", "within the one before", "3 or more"),
    ("profile: {steps: 1, first: 50}", "profile.first", "50", "after the last step", "1 to 40"),
    ("trainer: {use_pytorch_profiler: true}", "trainer.use_pytorch_profiler", "true", "unknown key", "profile.steps"),
    ("trainer: {recompute_layers: 2}", "trainer.recompute_layers", "2", "that is none", "recompute: full"),
    ("trainer: {recompute: full, recompute_modules: [mlp]}", "trainer.recompute_modules", "[mlp]", "selective",
     "leave"),
    ("trainer: {recompute: selective, recompute_modules: []}", "trainer.recompute_modules", "[]", "names nothing",
     "core_attn"),
    ("trainer: {recompute: selective, recompute_modules: [layernorm]}", "trainer.recompute_modules", "layernorm",
     "'core_attn', 'mlp' or 'moe'", ""),
    ("data: {train: t, heldout: h}\nrun: {target_accuracy: 1.5}", "run.target_accuracy", "1.5", "at most 1", "0.9"),
    ("data: {train: t, heldout: h}\nrun: {target_accuracy: -0.5}", "run.target_accuracy", "-0.5",
     "of reward exact_match", "0.9"),
    ("run: {target_accuracy: 0.9}", "run.target_accuracy", "0.9", "needs data.heldout", "null"),
    ("evaluation: {sets: [{name: a, data: x}, {name: a, data: y}]}", "evaluation.sets", "a", "two sets", "another"),
    ("data: {train: t, heldout: h}\nevaluation: {sets: [{name: heldout, data: x}]}", "evaluation.sets", "heldout",
     "of which data.heldout makes one", "data.heldout: null"),
    ("evaluation: {sets: [{name: a, data: x, samples: 4}]}", "evaluation.sets", "a", "all completions would be equal",
     "temperature"),
    ("evaluation: {sets: [{name: a, data: x, top_k: 0}]}", "evaluation.sets", "a", "keeps no token", "-1"),
    ("rollout: {max_total_tokens: 65536}\nevaluation: {sets: [{name: a, data: x, max_new_tokens: 99999}]}",
     "evaluation.sets", "a", "no room for a prompt", "raise rollout.max_total_tokens"),
    ("evaluation: {sets: [{name: a, data: x}], best: a/mean@4}", "evaluation.best", "a/mean@4", "is not measured",
     "measured are a/mean@1"),
    ("evaluation: {best: heldout/mean@1}", "evaluation.best", "heldout/mean@1", "is not measured", "set data.heldout"),
    ("evaluation: {sets: [{name: a b, data: x}]}", "evaluation.sets", "a b", "letters", ""),
    ("evaluation: {metric_for_best_model: x}", "evaluation.metric_for_best_model", "x", "unknown", "evaluation.best?"),
    ("rollout: {max_total_tokens: 200}", "rollout.max_total_tokens", "200", "too small for one completion", "512"),
    ("rollout: {context_length: 256}", "grpo.max_new_tokens", "256", "no room for a prompt", "context_length"),
    ("grpo: {group_size: 2, prompts_per_iteration: 2}\ntrainer: {data_parallel: 2}", "trainer.data_parallel", "2",
     "exceeds the 1 samples of an update", "raise grpo.prompts_per_iteration"),
    ("data: {train: []}", "data.train", "[]", "at least one file", "a glob"),
    ("data: {train: 3}", "data.train", "3", "must be a path", "a glob"),
    ("data: {train: [{path: a, weight: 0}]}", "data.train", "0", "entry 1: weight must be greater than 0", "Rate"),
    ("reward: [{kind:exact_match}]", "reward.kind:exact_match", "null", "YAML reads", "space after the colon: kind: "),
    ("trackers: [{kind:wandb}]", "trackers", "{'kind:wandb': None}", "YAML reads", "the colon: kind: wandb"),
    ("data: {train: [a, {path: b, weight:2}]}", "data.train", "null", "YAML reads 'weight:2'", "the colon: weight: 2"),
    ("data: {train: [a, {path: b, weigth: 1}]}", "data.train", "1", "entry 2: unknown key weigth", "mean weight?"),
    ("data: {train: [{weight: 1}]}", "data.train", "", "entry 1: path is missing", "File"),
    ("data: {train: [{path: a, weight: 1}, b]}", "data.train", "a", "weights for some sources only", ""),
    ("data: {train: [a, a]}", "data.train", "a", "has two sources of the path", ""),
    ("data: {train: a, heldout: {path: b, weight: 2}}", "data.heldout", "b", "scored once", "leave the weight out"),
    ("data: {train: a, answer_key: null}", "data.answer_key", "null", "exact_match compares", "column"),
    (
        "data: {train: a, answer_key: null}\nreward: {kind: regex, pattern: 'is (a)'}",
        "data.answer_key", "null", "regex compares", "column",
    ),
    ("data: {train: a, chat_template: none, system_prompt: x}", "data.system_prompt", "x", "chat_template is none", ""),
    ("data: {train: a, chat_template: none, prompt_as: user_message}", "data.prompt_as", "", "is none", "auto"),
    ("data: {train: a, chat_template_kwargs: {messages: 1}}", "data.chat_template_kwargs", "1", "may not hold", ""),
    ("data: {train: a, input_key: q}", "data.input_key", "q", "unknown key", "data.prompt_key?"),
    ("data: {train: a, apply_chat_template: true}", "data.apply_chat_template", "true", "key", "data.chat_template?"),
    ("fleet: {kind: kubernets}", "fleet.kind", "kubernets", "must be one of", "did you mean kubernetes?"),
    ("fleet: {scale: true}", "fleet.scale", "true", "does nothing with fleet.kind: registry", "kubernetes"),
    ("fleet: {kubeconfig: k}", "fleet.kubeconfig", "k", "does nothing with fleet.kind: registry", "kubernetes"),
    ("fleet: {stuck_after_s: 10}", "fleet.stuck_after_s", "10", "not more than sync.probe_timeout_s", "e.g. 100"),
]  # fmt: skip


def merged(extra: str) -> str:
    """MINIMAL, without the section that `extra` brings itself."""
    model = "" if extra.startswith("model:") else "model: {path: m}\n"
    data = "" if extra.startswith("data:") else "data: {train: rows.jsonl}\n"
    return f"{model}{data}{extra}\n"


@pytest.mark.parametrize(
    ("extra", "key", "value", "message", "suggestion"), BAD_FILES, ids=[row[0] for row in BAD_FILES]
)
def test_each_mistake_in_a_file_is_named(
    tmp_path: Path, extra: str, key: str, value: str, message: str, suggestion: str
) -> None:
    file = write(tmp_path, merged(extra))
    (problem,) = problems_of(file)
    assert problem.key == key
    assert value in problem.value
    assert message in problem.message
    assert suggestion in problem.suggestion


BAD_OPTIONS = [
    ("grpo.group_size", "grpo.group_size", "has no '='", "--set grpo.group_size=VALUE"),
    ("grpo=4", "grpo", "is a section, not a key", "grpo.prompts_per_iteration"),
    ("group_size=4", "group_size", "needs the form section.key", "did you mean grpo.group_size?"),
    ("trainr.clip_grad=4", "trainr.clip_grad", "no section 'trainr'", "did you mean trainer.clip_grad?"),
    ("trainr.x=4", "trainr.x", "no section 'trainr'", "did you mean trainer?"),
    ("grpo.grop_size=4", "grpo.grop_size", "unknown key", "did you mean grpo.group_size?"),
    ("grpo.group_size=[4", "grpo.group_size", "not valid YAML", "quote it"),
    ("grpo.group_size=four", "grpo.group_size", "whole number", ""),
    ("grpo.group_size=", "grpo.group_size", "whole number", ""),
    ("model.path=", "model.path", "must be a path", ""),
    ("=4", "--set", "needs the form section.key", "known keys here"),
]


@pytest.mark.parametrize(("option", "key", "message", "suggestion"), BAD_OPTIONS, ids=[row[0] for row in BAD_OPTIONS])
def test_each_mistake_in_an_option_is_named(
    tmp_path: Path, option: str, key: str, message: str, suggestion: str
) -> None:
    (problem,) = problems_of(write(tmp_path, MINIMAL), [option])
    assert problem.key == key
    assert message in problem.message
    assert suggestion in problem.suggestion
    assert problem.where == f"--set {option}"


def test_all_problems_come_at_once_with_their_lines(tmp_path: Path) -> None:
    text = "model: {path: m}\ndata:\n  train: a\n  train: b\n"
    text += "grpo:\n  group_sise: 3\n  correction: importance\n  old_logprobs: rollout\n"
    found = problems_of(write(tmp_path, text), ["rollout.replicas=0", "oops"])
    assert [(problem.key, problem.where.rpartition(":")[2]) for problem in found] == [
        ("data.train", "4"),
        ("oops", "--set oops"),
        ("grpo.group_sise", "6"),
        ("rollout.replicas", "--set rollout.replicas=0"),
        ("grpo.correction", "7"),
    ]


def test_duplicate_keys_name_both_lines(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, "model: {path: m}\ndata:\n  train: a\n  train: b\n"))
    assert (problem.key, problem.value) == ("data.train", "b")
    assert problem.message == "given twice: on line 3 and again on line 4"


BROKEN_FILES = [
    (b"model:\n  path: [m\n", "line 3, column 1: not valid YAML"),
    (b"model:\n\tpath: m\n", "line 2, column 1: not valid YAML"),
    (b"", "is empty"),
    (b"- model\n", "holds a list"),
    (b"model:\n  path: \xff\n", "line 2 is not UTF-8"),
    (b"a: 1\n---\nb: 2\n", "line 2, column 1: not valid YAML"),
    (b"model: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN_FILES, ids=[row[1] for row in BROKEN_FILES])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    (problem,) = problems_of(file)
    assert problem.value == str(file)
    assert message in problem.message


def test_a_missing_file_lists_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, MINIMAL)
    (problem,) = problems_of(tmp_path / "rum.yaml")
    assert problem.message == "no such configuration file"
    assert problem.suggestion == "files in that folder: run.yaml"


def test_a_draft_keeps_what_is_good_beside_what_is_bad(tmp_path: Path) -> None:
    draft = draft_config(write(tmp_path, MINIMAL + "trainer: 5\ngrpo: {group_size: 1}\n"))
    assert draft.config is not None
    assert draft.config.model.path == tmp_path / "m"
    assert draft.usable("model.path", "grpo.max_new_tokens")
    assert not draft.usable("grpo.group_size")
    assert not draft.usable("trainer.tensor_parallel")


@pytest.mark.parametrize(
    "settings",
    [
        ["model.dtype=bfloat16", "grpo.logprob_diff_limit=0.0001"],
        ["model.dtype=bfloat16", "grpo.logprob_diff_limit=0.2"],
        ["sync.dtype=bfloat16", "grpo.logprob_diff_limit=0.0001"],
    ],
)
def test_warnings_do_not_stop_a_run(tmp_path: Path, settings: list[str]) -> None:
    draft = draft_config(write(tmp_path, MINIMAL), settings)
    assert [(problem.key, problem.severity) for problem in draft.problems] == [("grpo.logprob_diff_limit", "warning")]
    loaded = load_config(write(tmp_path, MINIMAL), settings)
    assert "bfloat16" in (loaded.model.dtype, loaded.sync.dtype)


@pytest.mark.parametrize(
    "name", ["007", "12:30:45", "on", "2024-01-15", "2024-01-15 10:00:00", "1_000", "0x1F", "3.10"]
)
@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("run: {name: VALUE}\n", "run.name"),
        ("run:\n  name: VALUE  # a name\n", "run.name"),
        ("grpo: {reference_path: VALUE}\n", "grpo.reference_path"),
        ("evaluation: {sets: [{name: a, data: a.jsonl}, {name: VALUE, data: b.jsonl}]}\n", "evaluation.sets"),
        ("reward: {kind: regex, pattern: VALUE}\n", "reward.pattern"),
        ("reward: [{kind: exact_match}, {kind: regex, pattern: VALUE}]\n", "reward[1].pattern"),
    ],
)
def test_a_text_that_yaml_reads_as_something_else_is_quoted_as_it_is_written(
    tmp_path: Path, text: str, key: str, name: str
) -> None:
    if key == "evaluation.sets" and ":" in name:
        text = text.replace("VALUE, data: b.jsonl", "VALUE , data: b.jsonl")
    (problem,) = problems_of(write(tmp_path, MINIMAL + text.replace("VALUE", name)))
    assert (problem.key, problem.value, problem.suggestion.partition(";")[0]) == (key, name, f'quote it: "{name}"')


def test_a_text_in_an_option_is_quoted_as_it_is_written(tmp_path: Path) -> None:
    (problem,) = problems_of(write(tmp_path, MINIMAL), ["evaluation.sets=[{name: 007, data: a.jsonl}]"])
    assert (problem.value, problem.suggestion) == ("007", 'quote it: "007"')


def test_quoting_as_advised_gives_the_text(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, MINIMAL + 'run: {name: "007"}\n')).run.name == "007"


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        ("actor_rollout_ref.rollout.n=8", "did you mean grpo.group_size?"),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "did you mean trainer.learning_rate?"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.5", "did you mean rollout.mem_fraction_static?"),
        ("actor_rollout_ref.rollout.name=sglang", "docs/coming-from.md says"),
        ("actor_rollout_ref.hybrid_engine=true", "docs/coming-from.md says"),
        ("critic.optim.lr=1e-6", "there is no critic"),
        ("critic.enable=false", "there is no critic"),
    ],
)
def test_paths_of_other_trainers_are_translated(tmp_path: Path, option: str, advice: str) -> None:
    (problem,) = problems_of(write(tmp_path, MINIMAL), [option])
    assert problem.suggestion.startswith(advice)


def test_a_section_of_another_trainer_is_translated(tmp_path: Path) -> None:
    text = "actor_rollout_ref: {rollout: {n: 8}, actor: {optim: {lr: 1.0e-6}}}\ncritic: {optim: {lr: 1}}\n"
    one, other = problems_of(write(tmp_path, MINIMAL + text))
    assert (
        one.suggestion
        == "rollout.n: did you mean grpo.group_size?; actor.optim.lr: did you mean trainer.learning_rate?"
    )
    assert other.suggestion.startswith("there is no critic")


@pytest.mark.parametrize(
    ("key", "value", "now"),
    [
        ("evaluation.save_best", "false", "every policy that improves"),
        ("fleet.request_timeout_s", "10.0", "10 s at most"),
        ("profile.stacks", "true", "Python lines are in no profile"),
    ],
)
def test_a_removed_setting_of_a_file_is_a_warning_and_an_option_an_error(
    tmp_path: Path, key: str, value: str, now: str
) -> None:
    section, name = key.split(".")
    draft = draft_config(write(tmp_path, f"{MINIMAL}{section}: {{{name}: {value}}}\n"))
    assert draft.config == load_config(write(tmp_path, MINIMAL))
    (warning,) = draft.problems
    assert (warning.severity, warning.key, warning.value) == ("warning", key, value)
    assert warning.where.endswith("run.yaml:5")
    assert now in warning.suggestion
    (error,) = problems_of(write(tmp_path, MINIMAL), [f"{key}={value}"])
    assert (error.key, error.message) == (key, "unknown key")
    assert now in error.suggestion
