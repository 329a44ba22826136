"""Client of one rollout service: its errors name the replica, its calls always have a deadline.

It checks what the replica streams, and turns protobuf into the types of flow.py.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence

import grpc

from servicekit.errors import Internal, InvalidRequest, rpc_errors
from servicekit.rpc.arrays import array_of, packed
from servicekit.rpc.channel import open_channel
from servicekit.security.tls import Identity
from tandem_api.common.v1 import common_pb2
from tandem_api.rollout.v1 import rollout_pb2, rollout_pb2_grpc
from tandem_clients.flow import Completion, GenerationPart, Group, Order, Prompt
from weightsync.round.client import of_participant
from weightsync.round.deadlines import CALL_LOAD_S

# Maximum by the service's contract (protos/tandem_api/rollout/v1/rollout.proto).
STATUS_TIMEOUT_S = 10.0
TAKE_OVER_TIMEOUT_S = 3600.0
_KNOWN_REASONS = (rollout_pb2.FINISH_REASON_STOP, rollout_pb2.FINISH_REASON_LENGTH, rollout_pb2.FINISH_REASON_ABORT)


class MalformedReply(Internal):
    """A service's reply contradicts its contract."""


class Replica:
    """One rollout service. Every method raises the TandemError that the service raised, prefixed with the name.

    Attributes:
        rounds: runs the phases of a weight sync on it.
    """

    def __init__(self, name: str, address: str, identity: Identity | None = None) -> None:
        self.name = name
        self._channel = open_channel(address, identity=identity, peer="rollout")
        self._stub = rollout_pb2_grpc.RolloutServiceStub(self._channel)
        self.rounds = of_participant(name, self._channel)
        self._generating = 0

    @property
    def is_generating(self) -> bool:
        """Whether a generate call of ours is running."""
        return self._generating > 0

    async def generate(
        self, prompts: Mapping[str, Prompt], order: Order, *, timeout_s: float
    ) -> AsyncGenerator[GenerationPart, None]:
        """Stream groups; close the iterator to cancel the call.

        Groups that are aborted, by a pause or a shutdown, are left out.

        Args:
            prompts: by group id.
        Raises: MalformedReply: names the replica, the group and the completion.
        """
        call = self._stub.GenerateGroups(_request(prompts, order), timeout=timeout_s)
        self._generating += 1
        try:
            with rpc_errors(self.name):
                async for response in call:
                    read = (self._read(result, prompts, order) for result in response.groups)
                    groups = tuple(group for group in read if group is not None)
                    yield GenerationPart(groups=groups, engine_s=response.engine_s)
        finally:
            self._generating -= 1
            call.cancel()

    def _read(self, result: rollout_pb2.GroupResult, prompts: Mapping[str, Prompt], order: Order) -> Group | None:
        if result.group_id not in prompts:
            raise MalformedReply(f"{self.name}: sent group {result.group_id!r}, which was not asked for")
        return _read_group(result, prompts[result.group_id], order.num_completions, source=self.name)

    async def take_over(self, fence: common_pb2.CoordinatorFence) -> None:
        """Make it refuse coordinators older than `fence`; return when the work that they started is done."""
        with rpc_errors(self.name):
            await self._stub.TakeOver(rollout_pb2.TakeOverRequest(fence=fence), timeout=TAKE_OVER_TIMEOUT_S)

    async def load_published(
        self, folder: str, *, policy_version: int, round_id: str, fence: common_pb2.CoordinatorFence
    ) -> None:
        """Seed the replica, which has no weights, from the files that round `round_id` has published."""
        request = rollout_pb2.LoadPublishedWeightsRequest(
            folder=folder, policy_version=policy_version, round_id=round_id, fence=fence
        )
        with rpc_errors(self.name):
            await self._stub.LoadPublishedWeights(request, timeout=CALL_LOAD_S)

    async def status(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> rollout_pb2.GetStatusResponse:
        """Ask for its state, version, parallel sizes and software versions."""
        with rpc_errors(self.name):
            status: rollout_pb2.GetStatusResponse = await self._stub.GetStatus(
                rollout_pb2.GetStatusRequest(), timeout=timeout_s
            )
            return status

    @property
    def is_connected(self) -> bool:
        """Whether the channel's connection stands: that of a process that was killed does not."""
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        await self._channel.close()


def _request(prompts: Mapping[str, Prompt], order: Order) -> rollout_pb2.GenerateGroupsRequest:
    sampling = order.sampling
    return rollout_pb2.GenerateGroupsRequest(
        groups=[
            rollout_pb2.PromptGroup(
                group_id=group_id,
                prompt_ids_u32=packed("prompt_ids_u32", prompt.token_ids),
                num_completions=order.num_completions,
                seed=order.group_seed(group_id),
            )
            for group_id, prompt in prompts.items()
        ],
        sampling=rollout_pb2.SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
            stop=sampling.stop,
        ),
        policy_version=order.policy_version,
    )


def _read_group(result: rollout_pb2.GroupResult, prompt: Prompt, num_completions: int, *, source: str) -> Group | None:
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
    completions = tuple(_read_completion(item, place, k) for k, item in enumerate(result.completions))
    return Group(group_id=result.group_id, prompt=prompt, completions=completions)


def _read_completion(item: rollout_pb2.Completion, place: str, index: int) -> Completion:
    try:
        token_ids = array_of("token_ids_u32", item.token_ids_u32, item.token_ids)
        logprobs = array_of("logprobs_f32", item.logprobs_f32, item.logprobs)
        mask = array_of("loss_mask_u8", item.loss_mask_u8, item.loss_mask)
    except InvalidRequest as error:
        raise MalformedReply(f"{place}, completion {index}: {error}") from None
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
        loss_mask=None if all(mask) else mask,
    )


def _check_mask(mask: Sequence[int], num_tokens: int, place: str) -> None:
    if len(mask) != num_tokens:
        raise MalformedReply(f"{place} has {num_tokens} tokens and a loss mask of {len(mask)}")
    if not any(mask):
        raise MalformedReply(
            f"{place}: its loss mask leaves none of its {num_tokens} tokens to the policy; "
            "a completion needs one that the policy has sampled"
        )
