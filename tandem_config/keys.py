"""The keys of the schema: their types and texts, and suggestions for a misspelt key.

A key is `section.field`. That of an entry of a list is `section[1].field` in messages; functions here ignore the place.
"""

import difflib
import functools
import re
import types
import typing
from collections.abc import Mapping

from pydantic.fields import FieldInfo

from tandem_config.schema import LISTED, RunConfig, Section

# A typo of one or two letters in a word of six scores about 0.7; below 0.6 suggestions are noise.
_CLOSE_ENOUGH = 0.6

_OF_OTHERS = "docs/coming-from.md says what keys of verl, TRL and others are called here"
# What other trainers have and Tandem does not -> advice; a close spelling would suggest something else.
_LACKING: dict[str, str] = {
    "use_kl_loss use_kl_in_reward": "a KL term is there if grpo.kl_coefficient is more than 0: set that, with "
    "grpo.kl_in: loss or reward",
    "top_p top_k min_p repetition_penalty presence_penalty frequency_penalty": "not for training: the trainer's "
    "log-probs would not be those of the distribution that was sampled (docs/numerics.md); leave it out, see "
    "grpo.temperature",
    "lora_rank lora_alpha lora use_lora peft_config use_peft": "all weights are trained, there is no LoRA: leave it "
    "out",
    "optimizer optim": "the optimizer is AdamW: leave it out; trainer.adam_beta1, adam_beta2, adam_eps and "
    "weight_decay set it",
    "rejection_sampling rollout_rs rollout_rs_threshold rollout_token_veto_threshold": "samples are not vetoed apart "
    "from their weights: leave it out; grpo.correction: mis drops those whose weight is out of bounds",
    "critic": "there is no critic, GRPO's baseline is the group: leave it out",
    "actor_rollout_ref": _OF_OTHERS,
    "tis_cap": "is now grpo.correction: tis with grpo.correction_high; leave a null out",
    "epochs num_epochs total_epochs num_train_epochs": "a run's length is run.iterations, each of "
    "grpo.prompts_per_iteration prompts; the data is repeated as needed (grpo.epochs: passes over an iteration's "
    "samples)",
}
_NOT_SUPPORTED = {name: advice for names, advice in _LACKING.items() for name in names.split()}
# Settings of the release before -> what happens now. Files may still have them, so that old runs resume.
REMOVED: dict[str, str] = {
    "evaluation.save_best": "every policy that improves evaluation.best gets a checkpoint: leave it out",
    "fleet.request_timeout_s": "a request to the Kubernetes API takes 10 s at most: leave it out",
    "profile.stacks": "Python lines are in no profile: leave it out",
}
# A key -> what other trainers call it.
_NAMES_ELSEWHERE: dict[str, str] = {
    "grpo.group_size": "num_generations num_completions rollout_n n samples_per_prompt",
    "run.checkpoint_every": "save_every save_interval save_steps save_freq save_iters",
    "run.evaluate_every": "eval_every eval_interval eval_steps test_freq",
    "run.iterations": "steps max_steps total_steps num_steps train_iters num_rollout",
    "grpo.max_new_tokens": "max_completion_length max_response_length max_tokens response_length",
    "data.max_prompt_tokens": "max_prompt_length prompt_length",
    "trainer.learning_rate": "lr",
    "trainer.recompute": "activation_recompute recompute_granularity gradient_checkpointing",
    "trainer.recompute_layers": "recompute_num_layers",
    "trainer.distributed_optimizer": "use_distributed_optimizer zero_stage zero1",
    "grpo.aggregation": "loss_agg_mode",
    "grpo.objective, grpo.aggregation or grpo.preset": "loss_type",
    "grpo.objective": "loss_mode policy_loss policy_loss_fn importance_sampling_level",
    "grpo.baseline or grpo.preset": "adv_estimator advantage_estimator",
    "grpo.preset": "algorithm recipe",
    "grpo.clip_low": "clip_ratio epsilon cliprange eps_clip",
    "grpo.clip_high": "clip_ratio_high epsilon_high eps_clip_high",
    "grpo.dual_clip": "clip_ratio_c delta eps_clip_c",
    "grpo.correction": "use_tis rollout_is vllm_importance_sampling_correction vllm_importance_sampling_mode "
    "use_decoupled_loss behav_imp_weight_mode",
    "grpo.correction_high": "tis_clip rollout_is_threshold tis_imp_ratio_cap vllm_importance_sampling_cap "
    "vllm_importance_sampling_clip_max behav_imp_weight_cap",
    "grpo.correction_low": "tis_clip_low vllm_importance_sampling_clip_min",
    "trainer.max_tokens_per_micro_batch": "micro_batch_size ppo_max_token_len_per_gpu max_tokens_per_gpu",
    "grpo.prompts_per_iteration": "batch_size train_batch_size rollout_batch_size",
    "evaluation.sets": "eval_sets eval_datasets evals",
    "evaluation.best": "metric_for_best_model best_metric",
    "grpo.stop": "stop_strings stop_sequences stop_words",
    "grpo.stop_token_ids": "eos_token_id eos_token_ids",
    "trackers": "report_to logger wandb tensorboard mlflow wandb_project project_name",
    "grpo.epochs": "ppo_epochs num_iterations mu",
    "grpo.kl_coefficient": "kl_coef kl_loss_coef kl_beta beta init_kl_coef",
    "grpo.kl_estimator": "kl_loss_type kl_penalty",
    "grpo.reference_path": "ref_load ref_model ref_path reference_model",
    "grpo.reference_refresh_every": "sync_ref_model ref_model_sync_steps ref_update_interval",
    "grpo.entropy_coefficient": "entropy_coeff entropy_coef ent_coef",
    "grpo.advantage_std": "norm_adv_by_std_in_grpo scale_rewards",
    "rollout.mem_fraction_static": "gpu_memory_utilization",
    "rollout.context_length": "max_model_len max_seq_len max_seq_length",
    "trainer.warmup_iterations": "warmup_steps lr_warmup_steps warmup_ratio",
    "trainer.clip_grad": "max_grad_norm grad_clip",
    "trainer.offload": "param_offload grad_offload optimizer_offload offload_train cpu_offload",
    "data.train": "train_files train_file train_data dataset dataset_name prompt_data",
    "data.heldout": "eval_data eval_prompt_data val_files val_data test_files",
    "data.prompt_key": "messages messages_key input_key prompt_column question_key",
    "data.answer_key": "label_key label answer_column ground_truth reward_model",
    "data.chat_template": "apply_chat_template custom_chat_template",
    "data.chat_template_kwargs": "apply_chat_template_kwargs template_kwargs enable_thinking",
    "data.system_prompt": "system_message system",
    "data.tools_key": "tool_key tools",
    "data.overlong_prompts": "filter_overlong_prompts truncation",
    "profile.steps": "profiler use_pytorch_profiler profile_steps profile_step_start",
    "data.shuffle": "rollout_shuffle",
    "reward.function": "reward_function reward_fn reward_funcs custom_reward_function custom_rm_path",
    "reward.weight": "reward_weights",
    "reward.cache_tokens": "overlong_buffer overlong_buffer_len soft_punish_cache",
}
_OTHER_NAMES = {name: key for key, names in _NAMES_ELSEWHERE.items() for name in names.split()}


@functools.cache
def sections() -> Mapping[str, type[Section]]:
    """Return the model of every section, by name, in the order of the schema; of a list, what all entries have."""
    return {
        name: LISTED[name][0] if name in LISTED else next(_models(field.annotation))
        for name, field in RunConfig.model_fields.items()
    }


def kinds(section: str) -> Mapping[str, type[Section]]:
    """Return the models of a list's entries by `kind`; empty for other sections."""
    return LISTED[section][1] if section in LISTED else {}


def has_default_kind(section: str) -> bool:
    """Whether an entry of a list may leave its `kind` out."""
    return any(not model.model_fields["kind"].is_required() for model in kinds(section).values())


def split(key: str) -> tuple[str, str]:
    """Split a dotted key into section and field, either of them "".

    >>> split("reward[1].pattern"), split("reward[1]")
    (('reward', 'pattern'), ('reward', ''))
    """
    section, _, field = key.partition(".")
    return re.sub(r"\[\d+\]$", "", section), field


@functools.cache
def _fields(section: str) -> Mapping[str, FieldInfo]:
    """Return the settings of a section, those of all kinds together; the first of a name counts."""
    found: dict[str, FieldInfo] = {}
    for model in (sections().get(section), *kinds(section).values()):
        found = {**({} if model is None else model.model_fields), **found}
    return found


def fields_of(section: str) -> list[str]:
    """List the keys of a section; empty if there is no such section."""
    return list(_fields(section))


def all_keys() -> list[str]:
    """List every dotted key, e.g. `trainer.learning_rate`."""
    return [f"{section}.{field}" for section in sections() for field in fields_of(section)]


def description(key: str) -> str:
    """Return the description of a dotted key; "" if there is no such key."""
    section, field = split(key)
    info = _fields(section).get(field)
    return "" if info is None or info.description is None else info.description


def note(key: str, about: typing.Literal["unit", "why"]) -> str:
    """Return the unit of a dotted key's values, or the reason for its default; "" if its field states none."""
    section, field = split(key)
    return note_of(_fields(section)[field], about)


def note_of(field: FieldInfo, about: typing.Literal["unit", "why"]) -> str:
    """Return the unit of a field's values, or the reason for its default; "" if it states none."""
    extra = field.json_schema_extra
    return str(extra.get(about, "")) if isinstance(extra, dict) else ""


def takes(key: str, kind: typing.Any) -> bool:
    """Whether a dotted key's type is, or may be, `kind` (str, Path, int, ...)."""
    section, field = split(key)
    info = _fields(section).get(field)
    if info is None:
        return False
    annotation = info.annotation
    if typing.get_origin(annotation) is typing.Literal:
        return kind is str
    members = typing.get_args(annotation) if typing.get_origin(annotation) in (typing.Union, types.UnionType) else ()
    return annotation is kind or kind in members


def entry_fields(key: str) -> dict[str, str]:
    """Return the keys of the mappings that a dotted key's list holds, with their descriptions; {}: it holds none."""
    section, field = split(key)
    info = _fields(section).get(field)
    for part in _models(None if info is None else info.annotation):
        return {name: entry.description or "" for name, entry in part.model_fields.items()}
    return {}


def _models(annotation: typing.Any) -> typing.Iterator[type[Section]]:
    """Yield the models within a type."""
    parts = (part for part in _parts(annotation) if isinstance(part, type))
    yield from (part for part in parts if issubclass(part, Section))


def _parts(annotation: typing.Any) -> typing.Iterator[typing.Any]:
    """Yield a type and all types within it."""
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _parts(inner)


def did_you_mean(section: str, field: str) -> str:
    """Suggest a key for an unknown one: from the same section first, then the same or a close name anywhere.

    Args:
        section: "" if `field` is the name of a section.

    >>> did_you_mean("grpo", "group_sise")
    'did you mean grpo.group_size?'
    >>> did_you_mean("grpo", "learning_rate")
    'did you mean trainer.learning_rate?'
    >>> did_you_mean("", "trainr")
    'did you mean trainer?'
    >>> did_you_mean("data", "train_files")
    'did you mean data.train?'
    >>> did_you_mean("grpo", "num_generations")
    'did you mean grpo.group_size?'
    """
    if f"{section}.{field}" in REMOVED:
        return REMOVED[f"{section}.{field}"]
    if field in _NOT_SUPPORTED:
        return _NOT_SUPPORTED[field]
    if field in _OTHER_NAMES:
        return f"did you mean {_OTHER_NAMES[field]}?"
    for candidates in _candidate_lists(section, field):
        if candidates:
            return f"did you mean {' or '.join(candidates)}?"
    valid = fields_of(section) if section else list(sections())
    return f"known keys here: {', '.join(valid)}" if valid else ""


def of_another(path: typing.Sequence[str]) -> str:
    """Say which key a longer path of another trainer is; "": it has less than three parts.

    >>> of_another(["actor_rollout_ref", "rollout", "n"]), of_another(["actor_rollout_ref", "model", "path"])
    ('did you mean grpo.group_size?', 'did you mean model.path?')
    >>> of_another(["actor_rollout_ref", "rollout", "name"])
    'docs/coming-from.md says what keys of verl, TRL and others are called here'
    """
    if len(path) < 3:
        return ""
    whole = _NOT_SUPPORTED.get(path[0], _OF_OTHERS)
    if whole != _OF_OTHERS:
        return whole
    name, known = path[-1], all_keys()
    if ".".join(path[-2:]) in known:
        return f"did you mean {'.'.join(path[-2:])}?"
    named = [key for key in known if key.partition(".")[2] == name and name not in ("name", "path", "kind")]
    return did_you_mean("", name) if name in {**_OTHER_NAMES, **_NOT_SUPPORTED} or len(named) == 1 else _OF_OTHERS


def of_another_section(section: str, given: typing.Any) -> str:
    """Say which keys those within another trainer's section are; "": it has no sections in it.

    >>> of_another_section("actor_rollout_ref", {"rollout": {"n": 8}, "actor": {"optim": {"lr": 1e-6}}})
    'rollout.n: did you mean grpo.group_size?; actor.optim.lr: did you mean trainer.learning_rate?'
    """
    if _NOT_SUPPORTED.get(section, _OF_OTHERS) != _OF_OTHERS:
        return ""
    found = {".".join(path): of_another([section, *path]) for path in _paths(given) if len(path) > 1}
    return "; ".join(f"{path}: {key}" for path, key in list(found.items())[:5])


def _paths(given: typing.Any) -> typing.Iterator[list[str]]:
    if not isinstance(given, typing.Mapping):
        yield []
        return
    for name, inner in given.items():
        yield from ([str(name), *path] for path in _paths(inner))


def _candidate_lists(section: str, field: str) -> typing.Iterator[list[str]]:
    if section:
        yield [f"{section}.{name}" for name in difflib.get_close_matches(field, fields_of(section), 1, 0.75)]
    else:
        yield difflib.get_close_matches(field, list(sections()), 1, _CLOSE_ENOUGH)
    by_name = {key.partition(".")[2]: key for key in all_keys()}
    yield [key for key in all_keys() if key.partition(".")[2] == field]
    if section:
        yield [f"{section}.{name}" for name in difflib.get_close_matches(field, fields_of(section), 1, _CLOSE_ENOUGH)]
    yield [by_name[name] for name in difflib.get_close_matches(field, list(by_name), 1, _CLOSE_ENOUGH)]
