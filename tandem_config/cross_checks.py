"""Checks across keys that need no file; a check is skipped if one of the keys that it reads is invalid."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tandem_config.problems import ConfigProblem
from tandem_config.schema import RewardSection, RunConfig


@dataclass(frozen=True, kw_only=True)
class _Check:
    keys: tuple[str, ...]
    find: Callable[[RunConfig], ConfigProblem | None]


_CHECKS: list[_Check] = []
_Find = Callable[[RunConfig], ConfigProblem | None]


def _check(*keys: str) -> Callable[[_Find], _Find]:
    def register(find: _Find) -> _Find:
        _CHECKS.append(_Check(keys=keys, find=find))
        return find

    return register


def cross_check(config: RunConfig, usable: Callable[..., bool]) -> Iterator[ConfigProblem]:
    """Find problems between keys that are valid on their own.

    Args:
        usable: whether all of the given keys have valid values; otherwise the check is skipped.
    """
    for check in _CHECKS:
        if usable(*check.keys):
            found = check.find(config)
            if found is not None:
                yield found


@_check("grpo.tis_cap", "grpo.old_logprobs")
def _tis_needs_recompute(config: RunConfig) -> ConfigProblem | None:
    if config.grpo.tis_cap is None or config.grpo.old_logprobs == "recompute":
        return None
    return ConfigProblem(
        key="grpo.tis_cap",
        value=str(config.grpo.tis_cap),
        message="needs grpo.old_logprobs: recompute; with `rollout` the weight pi_old / pi_roll is always 1",
        suggestion="set grpo.old_logprobs: recompute, or grpo.tis_cap: null",
    )


@_check("rollout.min_replicas", "rollout.replicas")
def _min_replicas_can_be_present(config: RunConfig) -> ConfigProblem | None:
    if config.rollout.min_replicas <= config.rollout.replicas:
        return None
    return ConfigProblem(
        key="rollout.min_replicas",
        value=str(config.rollout.min_replicas),
        message=f"is more than rollout.replicas = {config.rollout.replicas}: the run could never start",
        suggestion=f"at most {config.rollout.replicas}",
    )


@_check("reward.kind", "reward.pattern")
def _regex_needs_pattern(config: RunConfig) -> ConfigProblem | None:
    if config.reward.kind != "regex":
        return None
    if config.reward.pattern is None:
        return ConfigProblem(
            key="reward.pattern",
            value="null",
            message="reward.kind: regex needs a pattern",
            suggestion="e.g. pattern: 'answer is (\\d+)'; group 1 is compared with the answer",
        )
    try:
        re.compile(config.reward.pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return ConfigProblem(
            key="reward.pattern",
            value=config.reward.pattern,
            message=f"is not a regular expression: {error}",
            suggestion="in YAML, put the pattern in single quotes",
        )
    return None


# Settings of the reward -> the kinds that read them.
_REWARD_SETTINGS = {
    "pattern": ("regex",),
    "find_answer": ("math_verify",),
    "timeout_s": ("regex", "math_verify"),
    "workers": ("regex", "math_verify"),
}


def _unread_reward_setting(name: str) -> _Find:
    def find(config: RunConfig) -> ConfigProblem | None:
        value, default = getattr(config.reward, name), RewardSection.model_fields[name].default
        kinds = _REWARD_SETTINGS[name]
        if config.reward.kind in kinds or value == default:
            return None
        return ConfigProblem(
            key=f"reward.{name}",
            value=str(value),
            message=f"does nothing with reward.kind: {config.reward.kind}",
            suggestion=f"set reward.kind: {' or '.join(kinds)}, or leave reward.{name} out",
            severity="warning",
        )

    return find


for _name in _REWARD_SETTINGS:
    _check("reward.kind", f"reward.{_name}")(_unread_reward_setting(_name))


@_check("grpo.prompts_per_iteration", "grpo.group_size", "grpo.updates_per_iteration")
def _updates_divide_samples(config: RunConfig) -> ConfigProblem | None:
    grpo = config.grpo
    samples = grpo.prompts_per_iteration * grpo.group_size
    if samples % grpo.updates_per_iteration == 0:
        return None
    fits = [n for n in range(1, samples + 1) if samples % n == 0]
    nearest = min(fits, key=lambda n: abs(n - grpo.updates_per_iteration))
    return ConfigProblem(
        key="grpo.updates_per_iteration",
        value=str(grpo.updates_per_iteration),
        message=f"does not divide the {samples} samples of an iteration "
        f"({grpo.prompts_per_iteration} prompts x {grpo.group_size} completions)",
        suggestion=f"nearest that does: {nearest}",
    )


@_check("grpo.prompts_per_iteration", "grpo.group_size", "grpo.updates_per_iteration", "trainer.data_parallel")
def _data_parallel_has_samples(config: RunConfig) -> ConfigProblem | None:
    grpo, copies = config.grpo, config.trainer.data_parallel
    samples = grpo.prompts_per_iteration * grpo.group_size // grpo.updates_per_iteration
    if samples >= copies:
        return None
    return ConfigProblem(
        key="trainer.data_parallel",
        value=str(copies),
        message=f"exceeds the {samples} samples of an update: some copies of the model would have none",
        suggestion="raise grpo.prompts_per_iteration, or lower grpo.updates_per_iteration or trainer.data_parallel",
    )


@_check("rollout.nodes", "rollout.tensor_parallel")
def _hosts_divide_an_engines_ranks(config: RunConfig) -> ConfigProblem | None:
    ranks, nodes = config.rollout.tensor_parallel, config.rollout.nodes
    if ranks % nodes == 0:
        return None
    return ConfigProblem(
        key="rollout.nodes",
        value=str(nodes),
        message=f"does not divide the {ranks} ranks of an engine (rollout.tensor_parallel)",
        suggestion=f"numbers of hosts that do: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
    )


@_check("rollout.nodes", "fleet.kind", "fleet.rollout_set_kind")
def _pods_of_an_engine_are_a_group(config: RunConfig) -> ConfigProblem | None:
    fleet, nodes = config.fleet, config.rollout.nodes
    if fleet.kind != "kubernetes" or nodes == 1 or fleet.rollout_set_kind == "LeaderWorkerSet":
        return None
    return ConfigProblem(
        key="fleet.rollout_set_kind",
        value=fleet.rollout_set_kind,
        message=f"makes engines of one pod, and rollout.nodes is {nodes}",
        suggestion="LeaderWorkerSet, with the component lws-rollout",
    )


@_check("rollout.expert_parallel", "rollout.tensor_parallel")
def _expert_groups_divide_an_engines_ranks(config: RunConfig) -> ConfigProblem | None:
    ranks, groups = config.rollout.tensor_parallel, config.rollout.expert_parallel
    if ranks % groups == 0:
        return None
    return ConfigProblem(
        key="rollout.expert_parallel",
        value=str(groups),
        message=f"does not divide the {ranks} ranks of an engine (rollout.tensor_parallel)",
        suggestion=f"sizes that do: {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}",
    )


@_check("trainer.sequence_parallel", "trainer.tensor_parallel")
def _sequence_parallel_needs_tensor_parallel(config: RunConfig) -> ConfigProblem | None:
    if not config.trainer.sequence_parallel or config.trainer.tensor_parallel > 1:
        return None
    return ConfigProblem(
        key="trainer.sequence_parallel",
        value="true",
        message="splits activations over the tensor-parallel ranks, but trainer.tensor_parallel is 1",
        suggestion="set trainer.tensor_parallel: 2 or more, or trainer.sequence_parallel: false",
    )


@_check(
    "trainer.pipeline_parallel",
    "trainer.virtual_pipeline",
    "trainer.first_stage_layers",
    "trainer.last_stage_layers",
    "trainer.embedding_counts",
    "trainer.loss_counts",
)
def _splits_need_a_pipeline(config: RunConfig) -> ConfigProblem | None:
    trainer = config.trainer
    uneven = [name for name in ("first_stage_layers", "last_stage_layers") if getattr(trainer, name) is not None]
    counted = [name for name in ("embedding_counts", "loss_counts") if getattr(trainer, name)]
    splits = [*uneven, *counted, *(["virtual_pipeline"] if trainer.virtual_pipeline > 1 else [])]
    if splits and trainer.pipeline_parallel == 1:
        return ConfigProblem(
            key=f"trainer.{splits[0]}",
            value=str(getattr(trainer, splits[0])).lower(),
            message="divides layers among pipeline stages, but trainer.pipeline_parallel is 1",
            suggestion=f"set trainer.pipeline_parallel: 2 or more, or leave trainer.{splits[0]} out",
        )
    if uneven and counted:
        return ConfigProblem(
            key=f"trainer.{uneven[0]}",
            value=str(getattr(trainer, uneven[0])),
            message=f"and trainer.{counted[0]} are two ways to divide the layers unequally",
            suggestion="use one of them",
        )
    return None


@_check(
    "trainer.tensor_parallel",
    "trainer.data_parallel",
    "trainer.context_parallel",
    "trainer.expert_parallel",
    "trainer.expert_tensor_parallel",
)
def _experts_divide_a_stage(config: RunConfig) -> ConfigProblem | None:
    trainer = config.trainer
    ranks = trainer.world_size // trainer.pipeline_parallel
    sharers = trainer.expert_parallel * trainer.expert_tensor_parallel
    if ranks % sharers == 0:
        return None
    fits = [n for n in range(1, ranks + 1) if ranks % (n * trainer.expert_tensor_parallel) == 0]
    return ConfigProblem(
        key="trainer.expert_parallel",
        value=str(trainer.expert_parallel),
        message=f"x expert_tensor_parallel {trainer.expert_tensor_parallel} does not divide the {ranks} ranks of a "
        f"pipeline stage (tensor_parallel x context_parallel x data_parallel)",
        suggestion=f"expert_parallel that fits: {', '.join(map(str, fits))}"
        if fits
        else "lower trainer.expert_tensor_parallel",
    )


@_check("fleet.kind", "fleet.kubeconfig", "fleet.scale")
def _only_kubernetes_has_pods(config: RunConfig) -> ConfigProblem | None:
    fleet = config.fleet
    if fleet.kind == "kubernetes" or (fleet.kubeconfig is None and not fleet.scale):
        return None
    key, value = ("scale", "true") if fleet.scale else ("kubeconfig", str(fleet.kubeconfig))
    return ConfigProblem(
        key=f"fleet.{key}",
        value=value,
        message=f"does nothing with fleet.kind: {fleet.kind}",
        suggestion=f"set fleet.kind: kubernetes, or leave fleet.{key} out",
    )


@_check("fleet.stuck_after_s", "sync.probe_timeout_s")
def _stuck_is_longer_than_a_probe(config: RunConfig) -> ConfigProblem | None:
    probe_s = config.sync.probe_timeout_s
    if config.fleet.stuck_after_s > probe_s:
        return None
    return ConfigProblem(
        key="fleet.stuck_after_s",
        value=str(config.fleet.stuck_after_s),
        message=f"is not more than sync.probe_timeout_s = {probe_s:g}: one slow answer would evict a pod",
        suggestion=f"several times as long, e.g. {10 * probe_s:g}",
    )


@_check("run.target_accuracy", "data.heldout")
def _target_needs_heldout(config: RunConfig) -> ConfigProblem | None:
    if config.run.target_accuracy is None or config.data.heldout is not None:
        return None
    return ConfigProblem(
        key="run.target_accuracy",
        value=str(config.run.target_accuracy),
        message="needs data.heldout: without it no accuracy is measured and the run would never stop early",
        suggestion="set data.heldout, or run.target_accuracy: null",
    )


@_check("grpo.max_new_tokens", "rollout.context_length")
def _context_holds_a_completion(config: RunConfig) -> ConfigProblem | None:
    limit = config.rollout.context_length
    if limit is None or config.grpo.max_new_tokens < limit:
        return None
    return ConfigProblem(
        key="grpo.max_new_tokens",
        value=str(config.grpo.max_new_tokens),
        message=f"leaves no room for a prompt in rollout.context_length ({limit})",
        suggestion="raise rollout.context_length or lower grpo.max_new_tokens",
    )


@_check("grpo.max_new_tokens", "rollout.max_total_tokens")
def _cache_holds_a_completion(config: RunConfig) -> ConfigProblem | None:
    limit = config.rollout.max_total_tokens
    if config.grpo.max_new_tokens < limit:
        return None
    return ConfigProblem(
        key="rollout.max_total_tokens",
        value=str(limit),
        message=f"the KV cache is too small for one completion of grpo.max_new_tokens ({config.grpo.max_new_tokens})",
        suggestion=f"at least prompt + completion; {2 * config.grpo.max_new_tokens} or more",
    )


@_check("data.train", "data.heldout")
def _heldout_is_other_data(config: RunConfig) -> ConfigProblem | None:
    if config.data.heldout is None or config.data.heldout != config.data.train:
        return None
    return ConfigProblem(
        key="data.heldout",
        value=str(config.data.heldout),
        message="is the training file, so the held-out accuracy will measure memorization",
        suggestion="use rows that are not trained on",
        severity="warning",
    )


@_check("model.dtype", "grpo.logprob_diff_limit")
def _limit_suits_dtype(config: RunConfig) -> ConfigProblem | None:
    if config.model.dtype != "bfloat16" or config.grpo.logprob_diff_limit > 1e-3:
        return None
    return ConfigProblem(
        key="grpo.logprob_diff_limit",
        value=str(config.grpo.logprob_diff_limit),
        message="is meant for float32; bfloat16 engines differ by 0.05 to 0.1, so every iteration will warn",
        suggestion="use 0.2 with model.dtype: bfloat16",
        severity="warning",
    )
