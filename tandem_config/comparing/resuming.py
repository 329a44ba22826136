"""What may change when a run resumes, and what must be as it was: every key of the configuration is in one table.

The rule: what a run learns, and from what, stays; how far, how fast, where and under whose eyes may change. Whoever
wants another goal starts another run, with an id of its own, from the weights of the first.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from servicekit.errors import ConfigError
from tandem_config import keys
from tandem_config.comparing.described import Texts, base_key, described, is_default, shown
from tandem_config.schema import LISTED, RunConfig

ADVICE = (
    "give back what was, or start a new run with an id and a folder of its own (docs/configuration.md, Resuming, says "
    "what may change)"
)
# Accepted, because an upgrade must not strand the checkpoints of a run; model and data are compared anyway.
UNRECORDED = (
    "the checkpoint does not say of which run and configuration it is, as an older release wrote it: they were not "
    "compared; the next one will say"
)
# The fields of a checkpoint's mark (complete.json) that say whose it is.
RUN_ID, CONFIGURATION = "run_id", "configuration"
UNSET = "not set"


def _keys(section: str, names: str) -> frozenset[str]:
    return frozenset(f"{section}.{name}" for name in names.split())


# Only the coordinator and `tandem run` act on these: what a run keeps, shows and tolerates, and how many replicas it
# asks for. The services of a run need not agree on them (agreeing.py).
OF_THE_COORDINATOR = (
    _keys(
        "run",
        "output_dir checkpoint_every keep_checkpoints checkpoint_async missed_checkpoint_budget export_every",
    )
    | _keys("run", "ledger_max_mib full_disk_timeout_s")
    | _keys("run", "keep_exports evaluate_every target_accuracy trainer_restarts replica_restarts coordinator_restarts")
    | _keys("rollout", "replicas min_replicas rejoin_timeout_s generate_timeout_s")
    # A resume with another value is warned of: the scores do not compare.
    | _keys("rollout", "seeded skip_special_tokens")
    | _keys("schedule", "kind depth max_staleness window stale max_token_age")
    | _keys("sync", "straggler_timeout_s")
    | _keys("fleet", "kind kubeconfig rollout_set rollout_set_kind scale stuck_after_s max_evictions_per_hour")
    | _keys("fleet", "unready_after_s reschedule_timeout_s trainer_set trainer_set_kind release_after_s")
    | _keys("data", "heldout")
    | _keys("evaluation", "sets right_from best concurrent replicas")
    | _keys("samples", "enabled every max_mib token_ids")
    | _keys("environment", "turn_timeout_s episode_timeout_s start_timeout_s on_error max_error_share workers")
    | _keys("environment", "memory_mib address security")
    | _keys("trackers", "kind uri experiment project entity group tags mode dir completions")
)
# How far, how fast and how carefully it learns: amounts that are tuned during a run.
_AMOUNTS = (
    # The trainer's learning rate may fall until then.
    _keys("run", "iterations")
    | _keys("grpo", "prompts_per_iteration group_size updates_per_iteration epochs max_new_tokens temperature")
    | _keys("grpo", "clip_low clip_high dual_clip entropy_coefficient kl_coefficient reference_refresh_every")
    | _keys("grpo", "correction correction_level correction_low correction_high on_non_finite non_finite_budget")
    | _keys("grpo", "logprob_diff_limit logprob_diff_stop")
    # A name for other settings of the section, which are compared.
    | _keys("grpo", "preset")
    | _keys("trainer", "learning_rate learning_rate_decay warmup_iterations weight_decay adam_beta1 adam_beta2")
    | _keys("trainer", "adam_eps clip_grad")
)
# Where and how the trainer computes: a checkpoint moves between layouts. All of its ranks must agree on these, and no
# other service need.
OF_THE_TRAINER = (
    _keys("trainer", "tensor_parallel pipeline_parallel data_parallel sequence_parallel context_parallel")
    | _keys("trainer", "expert_parallel expert_tensor_parallel virtual_pipeline first_stage_layers last_stage_layers")
    | _keys("trainer", "embedding_counts loss_counts layer_spec max_tokens_per_micro_batch moe_grouped_gemm")
    | _keys("trainer", "share_prompts recompute recompute_modules recompute_layers offload distributed_optimizer")
    | _keys("trainer", "overlap_grad_reduce overlap_param_gather ddp_bucket_size peak_tflops collective_timeout_s")
    | _keys("trainer", "checkpoint_optimizer checkpoint_extra")
    | _keys("profile", "steps first every ranks shapes memory")
)
# The sizes of an engine, which each replica has for itself, and says in its status where others act on them; and when
# it gives its own engine up.
OF_A_REPLICA = _keys(
    "rollout", "tensor_parallel expert_parallel max_total_tokens context_length max_running_requests"
) | _keys("rollout", "mem_fraction_static stall_timeout_s")
# How the services work together, and what happens when one of them, or a reward, does not.
_TOGETHER = (
    _keys("run", "startup_timeout_s stop_timeout_s")
    | _keys("rollout", "nodes max_groups_per_call serve_model")
    | _keys("sync", "install allow_staged_nccl pause transport dtype disk_folder bucket_mib link_gbit")
    | _keys("sync", "formation_timeout_s transfer_timeout_s probe_timeout_s lease_ttl_s")
    | _keys("reward", "on_error max_error_share timeout_s start_timeout_s retries open_after open_s concurrency")
    | _keys("reward", "batch_size workers memory_mib trial url address security api_key_env")
)
MAY_CHANGE = OF_THE_COORDINATOR | OF_THE_TRAINER | OF_A_REPLICA | _AMOUNTS | _TOGETHER

# Compared by what they lead to, not by how they are written: the model's fingerprint, and the order of the prompts
# (coordinator/record/resuming.py), with the bytes of the files, the columns, the tokenizer and the chat template.
BY_CONTENT = (
    _keys("model", "path tokenizer_path")
    | _keys("data", "train prompt_key answer_key prompt_as tools_key shuffle")
    | _keys("data", "chat_template chat_template_kwargs system_prompt system_key")
    # By the prompts that are left.
    | _keys("data", "max_prompt_tokens overlong_prompts")
)

MUST_STAY = (
    _keys("run", "name seed")
    | _keys("model", "dtype")
    | _keys("reward", "kind name weight accuracy require_stop function args per completions pattern find_answer")
    | _keys("reward", "full_tokens zero_tokens cache_tokens model prompt system scores full_score temperature")
    | _keys("reward", "max_answer_tokens body")
    | _keys("environment", "function args tools max_turns history")
    | _keys("grpo", "objective aggregation baseline advantage_std zero_variance truncated updates_divide old_logprobs")
    | _keys("grpo", "stop stop_token_ids kl_estimator kl_in reference_path")
    # Read at the beginning of a run only: another one would have no effect.
    | _keys("trainer", "initial_checkpoint")
)


class Owner(Protocol):
    """Whose folder a run's is (tandem_files.run_folder.RunIdentity)."""

    @property
    def run_id(self) -> str:
        """The run's id."""
        ...

    @property
    def is_launched(self) -> bool:
        """Whether `tandem run` runs it, which names the run by its folder, whatever the folder was called before."""
        ...


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """A checkpoint's run compared with one that is to resume from it.

    Attributes:
        refused: why it may not, as texts: another run's id, and settings that must stay.
        changed: settings that differ and may.
        recorded: whether the checkpoint says of which run and configuration it is; older releases did not record that.
    """

    refused: list[str]
    changed: list[str]
    recorded: bool


def mark_of(config: RunConfig, run_id: str) -> dict[str, Any]:
    """Return what a checkpoint's mark says of its run."""
    return {RUN_ID: run_id, CONFIGURATION: described(config)}


def compare(mark: Mapping[str, Any], config: RunConfig, owner: Owner | None) -> RunComparison:
    """Compare a checkpoint's mark with the run that is to resume from it.

    Args:
        mark: with what `mark_of` returns; of a checkpoint of an older release, without it.
        owner: whose folder it is; None: run ids are not compared.
    """
    run_id, saved = mark.get(RUN_ID), mark.get(CONFIGURATION)
    if not isinstance(run_id, str) or not isinstance(saved, Mapping):
        return RunComparison(refused=[], changed=[], recorded=False)
    refused: list[str] = []
    changed: list[str] = []
    if owner is not None and run_id != owner.run_id:
        refused.append(difference("run id (TANDEM_RUN_ID)", run_id, owner.run_id))
    for key, text in _differences(saved, config):
        base = base_key(key)
        if base in BY_CONTENT or (base == "run.name" and owner is not None and owner.is_launched):
            continue
        (changed if base in MAY_CHANGE else refused).append(text)
    return RunComparison(refused=refused, changed=changed, recorded=True)


def refuse(comparison: RunComparison, where: object, others: Sequence[str] = ()) -> None:
    """Raise ConfigError if a run may not resume from its checkpoint.

    Args:
        others: further differences that forbid it.
    """
    different = in_one_list(others, comparison.refused)
    if different:
        raise ConfigError(f"cannot resume from {where}: {'; '.join(different)}: {ADVICE}")


def in_one_list(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """Join two lists of differences; a key that both name counts once.

    >>> in_one_list([difference("run.seed", 0, 7)], [difference("run.seed", 0, 7), difference("run.name", "a", "b")])
    ['run.seed: 0 in the checkpoint, 7 in the run', 'run.name: a in the checkpoint, b in the run']
    """
    named = {text.partition(":")[0] for text in first}
    return [*first, *(text for text in second if text.partition(":")[0] not in named)]


def difference(key: str, was: object, now: object) -> str:
    """Say how a run differs from the checkpoint in a key."""
    return f"{key}: {was} in the checkpoint, {now} in the run"


def _value(text: str | None) -> str:
    """Return a described value as messages show it: texts without quotation marks."""
    if text is None:
        return UNSET
    return str(json.loads(text)) if text.startswith('"') else text


def _differences(saved: Texts, config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the keys that differ, each with its `difference`."""
    own = described(config)
    known, over = set(keys.all_keys()), _entries_that_differ(saved, own)
    for entry, text in over.items():
        yield f"{entry}.kind", text
    for key in dict.fromkeys([*own, *saved]):
        entry = key.partition(".")[0]
        if entry in over or entry.partition("[")[0] in over:
            continue  # its settings are those of another kind
        was, now = saved.get(key), own.get(key)
        if was is None and is_default(config, key):
            continue  # a setting that the checkpoint's release did not have
        if was != now and (now is not None or base_key(key) in known):
            yield key, difference(shown(key, own), _value(was), _value(now))


def _entries_that_differ(saved: Texts, own: Texts) -> dict[str, str]:
    """Return the lists of another length, and the entries of another kind, with the `difference` of each."""
    found: dict[str, str] = {}
    for section in LISTED:
        was, now = (
            [key for key in texts if key.startswith(f"{section}[") and key.endswith("].kind")] for texts in (saved, own)
        )
        if len(was) != len(now):
            found[section] = difference(f"entries of {section}", len(was), len(now))
            continue
        for key in now:
            if saved.get(key) != own[key]:
                found[key.partition(".")[0]] = difference(shown(key, own), _value(saved.get(key)), _value(own[key]))
    return found
