"""Checks what a replica streams and turns protobuf into the coordinator's own types."""

from array import array
from collections.abc import Sequence

from coordinator.flow import Completion, Group, Prompt
from servicekit.errors import Internal
from tandem_api.rollout.v1 import rollout_pb2

_KNOWN_REASONS = (rollout_pb2.FINISH_REASON_STOP, rollout_pb2.FINISH_REASON_LENGTH, rollout_pb2.FINISH_REASON_ABORT)


class MalformedReply(Internal):
    """A service's reply contradicts its contract."""


def read_group(result: rollout_pb2.GroupResult, prompt: Prompt, num_completions: int, *, source: str) -> Group | None:
    """Convert a group that a replica streamed; None if any of its completions was aborted.

    Args:
        source: the replica's name, for errors.
    Raises: MalformedReply: names `source`, the group and the completion.
    """
    place = f"{source}: group {result.group_id}"
    if len(result.completions) != num_completions:
        raise MalformedReply(f"{place} has {len(result.completions)} completions instead of {num_completions}")
    if any(item.finish_reason == rollout_pb2.FINISH_REASON_ABORT for item in result.completions):
        return None
    completions = tuple(_read(item, place, k) for k, item in enumerate(result.completions))
    return Group(group_id=result.group_id, prompt=prompt, completions=completions)


def _read(item: rollout_pb2.Completion, place: str, index: int) -> Completion:
    # A slice of a protobuf field is a list, from which an array is made twice as fast as from the field.
    token_ids, logprobs, mask = array("I", item.token_ids[:]), array("f", item.logprobs[:]), item.loss_mask[:]
    spans = tuple([(span.end, span.policy_version) for span in item.version_spans])
    num_tokens, reason = len(token_ids), item.finish_reason
    if not num_tokens or len(logprobs) != num_tokens:
        raise MalformedReply(f"{place}, completion {index} has {num_tokens} tokens and {len(logprobs)} log-probs")
    if mask:
        _check_mask(mask, num_tokens, f"{place}, completion {index}")
    if reason not in _KNOWN_REASONS:
        raise MalformedReply(f"{place}, completion {index} has no finish reason")
    if not spans or spans[-1][0] != num_tokens:
        raise MalformedReply(f"{place}, completion {index}: its version spans do not cover its {num_tokens} tokens")
    return Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        truncated=reason == rollout_pb2.FINISH_REASON_LENGTH,
        oldest_version=spans[0][1] if len(spans) == 1 else min([version for _, version in spans]),
        version_spans=spans,
        loss_mask=None if all(mask) else array("B", mask),
    )


def _check_mask(mask: Sequence[int], num_tokens: int, place: str) -> None:
    if len(mask) != num_tokens:
        raise MalformedReply(f"{place} has {num_tokens} tokens and a loss mask of {len(mask)}")
    if not any(mask):
        raise MalformedReply(
            f"{place}: its loss mask leaves none of its {num_tokens} tokens to the policy; "
            "a completion needs one that the policy has sampled"
        )
