"""Validate requests to generate before the engine sees them, and convert them to our own types."""

import math
from collections.abc import Container, Mapping, Sequence

from rollout_service.engine import EngineLimits, GroupRequest, SamplingSettings
from servicekit.errors import InvalidRequest, TooLarge
from servicekit.rpc.arrays import read_array
from servicekit.rpc.limits import MAX_COMPLETIONS_PER_CALL
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_config.sections.base import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE

NOTHING: Mapping[str, Container[int]] = {}


def read_groups(
    messages: Sequence[pb.PromptGroup],
    sampling: SamplingSettings,
    limits: EngineLimits,
    max_groups: int,
    running: Mapping[str, Container[int]] = NOTHING,
) -> list[GroupRequest]:
    """Convert groups that are to be sampled.

    Args:
        max_groups: most that this message may hold.
        running: the completions that run, by group.
    Raises: InvalidRequest: naming the field, the value and what is allowed; TooLarge: more than a message may hold.
    """
    if len(messages) > max_groups:
        raise TooLarge(
            f"{len(messages)} groups in one call; at most {max_groups} (rollout.max_groups_per_call), split the call"
        )
    groups = [_read_group(index, group, sampling, limits) for index, group in enumerate(messages)]
    _check_distinct(groups, running)
    num_completions = sum(group.num_completions for group in groups)
    if num_completions > MAX_COMPLETIONS_PER_CALL:
        raise TooLarge(f"{num_completions} completions in one call; at most {MAX_COMPLETIONS_PER_CALL}, split the call")
    return groups


def read_sampling(sampling: pb.SamplingParams, limits: EngineLimits) -> SamplingSettings:
    """Convert the sampling parameters. Raises: InvalidRequest: one is out of range or not a number."""
    temperature, top_p = sampling.temperature, sampling.top_p
    if temperature != 0.0 and not LOWEST_TEMPERATURE * (1 - 1e-6) <= temperature <= HIGHEST_TEMPERATURE:
        raise InvalidRequest(
            f"sampling.temperature is {temperature:g}; "
            f"use 0 (greedy) or a value from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
        )
    if math.isnan(top_p) or not 0.0 < top_p <= 1.0:
        raise InvalidRequest(f"sampling.top_p is {top_p:g}; it must be in (0, 1], 1 is the full distribution")
    if sampling.top_k < 1 and sampling.top_k != -1:
        raise InvalidRequest(f"sampling.top_k is {sampling.top_k}; use a positive number, or -1 for all tokens")
    if not 1 <= sampling.max_new_tokens < limits.longest_request:
        raise InvalidRequest(
            f"sampling.max_new_tokens is {sampling.max_new_tokens}; it must be from 1 to {limits.longest_request - 1}, "
            "because prompt and completion share the context"
        )
    _check_stop(sampling, limits)
    return SamplingSettings(
        temperature=temperature,
        top_p=top_p,
        top_k=sampling.top_k,
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=tuple(sampling.stop_token_ids),
        min_p=sampling.min_p,
        # 0: a client that does not know of it.
        repetition_penalty=sampling.repetition_penalty if sampling.repetition_penalty > 0 else 1.0,
        stop=tuple(sampling.stop),
    )


def _check_stop(sampling: pb.SamplingParams, limits: EngineLimits) -> None:
    """Check what ends a completion. Raises: InvalidRequest."""
    for index, token in enumerate(sampling.stop_token_ids):
        if token >= limits.vocab_size:
            raise InvalidRequest(
                f"sampling.stop_token_ids[{index}] is {token}; the vocabulary has {limits.vocab_size} tokens"
            )
    if "" in sampling.stop:
        raise InvalidRequest(f"sampling.stop[{list(sampling.stop).index('')}] is empty; every text would match it")
    if sampling.stop and limits.why_no_stop:
        raise InvalidRequest(
            f"sampling.stop is {list(sampling.stop)}, but this replica cannot read text: {limits.why_no_stop}; put "
            "tokenizer.json there (model.path, model.tokenizer_path), or use stop_token_ids"
        )


def _read_group(index: int, group: pb.PromptGroup, sampling: SamplingSettings, limits: EngineLimits) -> GroupRequest:
    if not group.group_id:
        raise InvalidRequest(f"groups[{index}].group_id is empty; set it: replies are matched by it")
    name = f"group {group.group_id!r}"
    if group.num_completions < 1:
        raise InvalidRequest(f"{name}: num_completions is 0; ask for at least 1")
    try:
        prompt_ids = read_array(group, "prompt_ids_u32").tolist()
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}: {error}") from None
    if not prompt_ids:
        raise InvalidRequest(f"{name}: prompt_ids is empty; a prompt has at least one token")
    prompts = {
        sample.index: read_array(sample, "prompt_ids_u32").tolist() for sample in group.samples if sample.prompt_ids_u32
    }
    for place, ids in {name: prompt_ids, **{f"{name}, sample {index}": ids for index, ids in prompts.items()}}.items():
        total = len(ids) + sampling.max_new_tokens
        if total > limits.longest_request:
            raise InvalidRequest(
                f"{place}: {len(ids)} prompt tokens and max_new_tokens {sampling.max_new_tokens} are {total} "
                f"tokens; at most {limits.longest_request} fit (rollout.context_length, rollout.max_total_tokens, "
                "rollout.mem_fraction_static)"
            )
        _check_vocabulary(f"{place}: prompt_ids", ids, limits)
    return GroupRequest(
        group_id=group.group_id,
        prompt_ids=prompt_ids,
        num_completions=group.num_completions,
        seed=group.seed if group.HasField("seed") else None,
        prefixes=_read_prefixes(name, group, sampling, limits),
        prompts=prompts,
    )


def _check_vocabulary(name: str, token_ids: Sequence[int], limits: EngineLimits) -> None:
    highest = max(token_ids)
    if highest >= limits.vocab_size:
        raise InvalidRequest(
            f"{name}[{token_ids.index(highest)}] is {highest}; "
            f"the vocabulary has {limits.vocab_size} tokens, so the tokenizer is not this model's"
        )


def _read_prefixes(
    name: str, group: pb.PromptGroup, sampling: SamplingSettings, limits: EngineLimits
) -> dict[int, list[int]]:
    """Read the tokens that completions have already, by index. Raises: InvalidRequest."""
    prefixes: dict[int, list[int]] = {}
    for sample in group.samples:
        place = f"{name}, sample {sample.index}"
        token_ids = read_array(sample, "token_ids_u32").tolist()
        if sample.index >= group.num_completions or sample.index in prefixes:
            raise InvalidRequest(f"{place}: each of the {group.num_completions} completions is asked for at most once")
        if len(token_ids) >= sampling.max_new_tokens:
            raise InvalidRequest(f"{place} has {len(token_ids)} tokens already; max_new_tokens is too few for more")
        if token_ids and (sampling.stop or sampling.repetition_penalty != 1.0):
            raise InvalidRequest(f"{place} has tokens already: with stop or repetition_penalty it must begin anew")
        if token_ids:
            _check_vocabulary(f"{place}: token_ids", token_ids, limits)
        prefixes[sample.index] = token_ids
    return prefixes


def _check_distinct(groups: list[GroupRequest], running: Mapping[str, Container[int]]) -> None:
    seen: set[str] = set()
    for group in groups:
        if group.group_id in seen:
            raise InvalidRequest(
                f"group_id {group.group_id!r} occurs twice; make it unique in the call: replies are matched by it"
            )
        seen.add(group.group_id)
        runs = running.get(group.group_id, ())
        if (index := next((index for index in group.starts() if index in runs), None)) is not None:
            raise InvalidRequest(f"group {group.group_id!r}: completion {index} runs already")
