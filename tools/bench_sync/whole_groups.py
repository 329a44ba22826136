"""Whole groups of a Generate call, for what needs no stream: tools, and tests of a replica."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from servicekit.rpc.arrays import packed, read_array
from tandem_api.common.v1.common_pb2 import VersionSpan
from tandem_api.rollout.v1 import rollout_pb2 as pb


@dataclass(kw_only=True)
class Sampled:
    """A completion: what its parts have brought."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_spans: list[VersionSpan] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED

    def add(self, part: pb.Completion) -> None:
        """Add a part; its spans begin with 0."""
        for span in part.version_spans:
            start, end = (len(self.token_ids) + place for place in (span.start, span.end))
            last = self.version_spans[-1] if self.version_spans else None
            if last is not None and last.policy_version == span.policy_version:
                last.end = end
            else:
                self.version_spans.append(VersionSpan(start=start, end=end, policy_version=span.policy_version))
        self.token_ids += read_array(part, "token_ids_u32")
        self.logprobs += read_array(part, "logprobs_f32")
        self.cached_tokens = max(self.cached_tokens, part.cached_tokens)
        self.finish_reason = part.finish_reason


@dataclass(kw_only=True)
class SampledGroup:
    """The completions of a prompt, in order."""

    group_id: str
    completions: list[Sampled]


def prompt_group(group_id: str, prompt_ids: Sequence[int], num_completions: int = 1, **fields: Any) -> pb.PromptGroup:
    """Make a group of a request."""
    packed_ids = packed("prompt_ids_u32", prompt_ids)
    return pb.PromptGroup(group_id=group_id, prompt_ids_u32=packed_ids, num_completions=num_completions, **fields)


def submission(groups: Sequence[pb.PromptGroup], version: int, **sampling: Any) -> pb.GenerateRequest:
    """Ask for groups of exactly this policy version, at temperature 1 if `sampling` does not say otherwise."""
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1} | sampling
    return pb.GenerateRequest(
        groups=groups,
        sampling=pb.SamplingParams(**params),
        min_policy_version=version,
        max_policy_version=version,
    )


def whole_groups(request: pb.GenerateRequest, responses: Sequence[pb.GenerateResponse]) -> list[SampledGroup]:
    """Join what came of all groups of a request, in its order."""
    groups = {
        group.group_id: SampledGroup(
            group_id=group.group_id, completions=[Sampled() for _ in range(group.num_completions)]
        )
        for group in request.groups
    }
    for result in (result for response in responses for result in response.groups):
        for part in result.completions:
            groups[result.group_id].completions[part.index].add(part)
    return list(groups.values())
