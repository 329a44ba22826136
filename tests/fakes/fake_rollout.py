"""A rollout service without an engine: a real gRPC server whose "policy" adds better with every version.

Deterministic: whether completion k of a prompt is right depends on (prompt, k, version) alone.
"""

import asyncio
import zlib
from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from servicekit.errors import InvalidRequest, NotReady, PhaseOrder, StaleVersion, TandemError, Unavailable, WrongVersion
from servicekit.rpc.arrays import packed, read_array
from servicekit.rpc.fence import FenceGuard
from tandem_api.common.v1 import common_pb2
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_api.rollout.v1 import rollout_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from tests.fakes.fake_sync import FakeSync
from tests.fakes.refusal import refuse
from tests.kit.folders import EOS, NUM_PARAMETERS, answer_of, encode
from weightsync.layouts.layout import Parallel
from weightsync.layouts.registry import ROLLOUT_ENGINE
from weightsync.round.client import run_in_turn
from weightsync.round.phases import ABORT, COMMIT, PREPARE, TRANSFER, VERIFY, Phase, Role


@dataclass
class GenerateFault:
    """Fail after some of a message's groups; abort=True ends the others with FINISH_REASON_ABORT instead.

    Attributes:
        partial: tokens of each completion of the others that come before.
    """

    after_groups: int
    error: TandemError | None = None
    abort: bool = False
    partial: int = 0


@dataclass
class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer, weights_pb2_grpc.RoundServiceServicer):
    """One replica.

    Attributes:
        first_skill, skill_per_version: share of right completions at version 0, and what a version adds.
        faults: one per message that submits groups, None for a good one; empty: all good.
        hold: while cleared, messages wait before they are answered: those with a group whose id begins with `holds`.
        asked: set by the first message that submits groups.
        stuck: phases that wait for `moves`.
        kv_tokens: room that is reported; 0: none is.
    """

    name: str
    tensor_parallel: int = 1
    first_skill: float = 0.3
    skill_per_version: float = 0.05
    engine_s: float = 0.001
    faults: deque[GenerateFault | None] = field(default_factory=deque)
    requests: list[pb.GenerateRequest] = field(default_factory=list)
    loads: list[pb.LoadPublishedWeightsRequest] = field(default_factory=list)
    state: weights_pb2.ReplicaState.ValueType = weights_pb2.REPLICA_STATE_UNSEEDED
    policy_version: int = 0
    settings_digest: str = ""
    groups_per_response: int = 4
    kv_tokens: int = 0
    running_groups: int = 0
    # After a fault in a round it answers nothing any more, as a process that was killed.
    gone_after_fault: bool = False
    holds: str = ""
    stuck: set[weights_pb2.RoundPhase.ValueType] = field(default_factory=set)
    # Applied to every group before it is sent.
    damage: Callable[[pb.GroupResult], None] = lambda result: None

    def __post_init__(self) -> None:
        self._gone = False
        self.phase_calls: list[list[int]] = []
        self.fence = FenceGuard()
        self.hold = asyncio.Event()
        self.hold.set()
        self.moves = asyncio.Event()
        self.asked = asyncio.Event()
        shard = 4 * NUM_PARAMETERS // self.tensor_parallel
        self.sync = FakeSync(
            role=Role.REPLICA,
            name=self.name,
            num_ranks=self.tensor_parallel,
            received_bytes=shard,
            shard_bytes=shard,
        )

    async def TakeOver(self, request: pb.TakeOverRequest, context: Any) -> pb.TakeOverResponse:
        self._check_there()
        self.fence.admit(request.fence)
        return pb.TakeOverResponse(policy_version=self.policy_version)

    async def Generate(
        self, requests: AsyncIterator[pb.GenerateRequest], context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        sampling, num_done, num_taken = (await anext(requests)).sampling, 0, 0
        prompts: dict[str, bytes] = {}
        yield pb.GenerateResponse(load=pb.ReplicaLoad(kv_tokens=self.kv_tokens))
        async for request in requests:
            _keep_prompts(request, prompts)
            if not request.groups:
                continue
            num_taken += len(request.groups)
            request.sampling.CopyFrom(sampling)
            self.requests.append(request)
            self.asked.set()
            fault = self.faults.popleft() if self.faults else None
            if any(group.group_id.startswith(self.holds) for group in request.groups):
                await self.hold.wait()
            self._check_serves(request)
            good = len(request.groups) if fault is None else fault.after_groups
            for start in range(0, good, self.groups_per_response):
                groups = request.groups[start : min(good, start + self.groups_per_response)]
                num_done += len(groups)
                results = [self._group(group, sampling) for group in groups]
                yield pb.GenerateResponse(groups=results, engine_s=self.engine_s * num_done, accepted=num_taken)
            if fault is not None:
                rest = request.groups[good:]
                if fault.partial:
                    results = [self._group(group, sampling, num_tokens=fault.partial) for group in rest]
                    yield pb.GenerateResponse(groups=results, accepted=num_taken)
                if fault.error is not None:
                    raise fault.error
                if fault.abort:
                    yield pb.GenerateResponse(groups=[self._aborted(one) for one in rest], accepted=num_taken)

    def _check_serves(self, request: pb.GenerateRequest) -> None:
        if self.state != weights_pb2.REPLICA_STATE_SERVING:
            raise NotReady("no verified weights")
        highest = request.max_policy_version if request.HasField("max_policy_version") else self.policy_version
        if not request.min_policy_version <= self.policy_version <= highest:
            asked = f"{request.min_policy_version} to {highest}"
            raise WrongVersion(f"version {asked} was asked for, {self.policy_version} is served")

    async def RunPhase(self, request: weights_pb2.RunPhaseRequest, context: Any) -> weights_pb2.RunPhaseResponse:
        sync_round = request.round
        self.fence.admit(sync_round.fence)
        if self.state == weights_pb2.REPLICA_STATE_SERVING and sync_round.policy_version < self.policy_version:
            raise StaleVersion(f"version {sync_round.policy_version} is older than {self.policy_version}")
        self.phase_calls.append([request.phase, *request.then])
        return weights_pb2.RunPhaseResponse(reports=await run_in_turn(self, request))

    async def run_phase(self, phase: Phase, round_: weights_pb2.Round) -> list[weights_pb2.PhaseReport]:
        self._check_there()
        sends = self.sync.sends(round_)
        if phase in self.stuck and not sends:
            await self.moves.wait()
        holds = self.state == weights_pb2.REPLICA_STATE_SERVING and self.policy_version == round_.policy_version
        if sends and phase == PREPARE and not holds:
            raise NotReady(f"{self.name} is no source of version {round_.policy_version}")
        try:
            return self.sync.run_phase(phase, round_)
        except TandemError:
            self._gone = self.gone_after_fault
            raise
        finally:
            if not sends:
                self._follow(phase)

    async def LoadPublishedWeights(
        self, request: pb.LoadPublishedWeightsRequest, context: Any
    ) -> pb.LoadPublishedWeightsResponse:
        self.fence.admit(request.fence)
        self.loads.append(request)
        if self.state == weights_pb2.REPLICA_STATE_SERVING:
            raise PhaseOrder(f"{self.name} serves already")
        self.state, self.policy_version = weights_pb2.REPLICA_STATE_SERVING, request.policy_version
        return pb.LoadPublishedWeightsResponse(state=self.state)

    def _check_there(self) -> None:
        if self._gone:
            raise Unavailable("connection refused")

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.GetStatusResponse:
        self._check_there()
        return pb.GetStatusResponse(
            name=self.name,
            state=self.state,
            policy_version=self.policy_version,
            running_groups=self.running_groups,
            parallel=Parallel(engine=ROLLOUT_ENGINE, tensor=self.tensor_parallel).to_proto(),
            versions=common_pb2.SoftwareVersions(packages={"sglang": "0.0", "torch": "0.0"}),
            settings_digest=self.settings_digest,
        )

    async def PauseGeneration(self, request: pb.PauseGenerationRequest, context: Any) -> pb.PauseGenerationResponse:
        await refuse(context)

    async def ResumeGeneration(self, request: pb.ResumeGenerationRequest, context: Any) -> pb.ResumeGenerationResponse:
        await refuse(context)

    async def GetChecksums(self, request: pb.GetChecksumsRequest, context: Any) -> pb.GetChecksumsResponse:
        await refuse(context)

    def _follow(self, phase: weights_pb2.RoundPhase.ValueType) -> None:
        """The replica's state follows the round's."""
        if phase == COMMIT and self.sync.committed is not None:
            self.state, self.policy_version = weights_pb2.REPLICA_STATE_SERVING, self.sync.committed
        if phase == ABORT and self.sync.aborted_after in (TRANSFER, VERIFY):
            self.state = weights_pb2.REPLICA_STATE_POISONED

    def _group(self, group: pb.PromptGroup, sampling: pb.SamplingParams, num_tokens: int = 0) -> pb.GroupResult:
        """Make the completions that are asked for; with num_tokens, only their next so many tokens."""
        held = {sample.index: array("I", sample.token_ids_u32) for sample in group.samples}
        # Behind a turn that has ended there is an answer, which ends with "=", and the next turn begins.
        prefixes = {index: len(ids) - 1 - _last(ids, *encode("=")) for index, ids in held.items()}
        prefixes = prefixes or dict.fromkeys(range(group.num_completions), 0)
        if max(prefixes.values()) >= sampling.max_new_tokens:
            raise InvalidRequest(f"group {group.group_id} has all of its tokens already")
        completions = [self._completion(group, k, sampling, first, num_tokens) for k, first in prefixes.items()]
        result = pb.GroupResult(group_id=group.group_id, completions=completions)
        self.damage(result)
        return result

    def _completion(
        self, group: pb.PromptGroup, k: int, sampling: pb.SamplingParams, first: int, num_tokens: int
    ) -> pb.Completion:
        own = {sample.index: array("I", sample.prompt_ids_u32).tolist() for sample in group.samples}
        prompt = own.get(k) or read_array(group, "prompt_ids_u32").tolist()
        # Greedy: the same draw at every version, so that a prompt once right stays right.
        salt = self.policy_version if sampling.temperature > 0 else -1
        draw = zlib.crc32(f"{prompt}/{k}/{salt}".encode()) / 2**32
        right = draw < self.first_skill + self.skill_per_version * self.policy_version
        text = answer_of(prompt) if right else str(int(answer_of(prompt)) - 1)
        whole = [*encode(text), EOS][: sampling.max_new_tokens]
        reason = pb.FINISH_REASON_STOP if whole[-1] == EOS else pb.FINISH_REASON_LENGTH
        ids = whole[first : first + num_tokens] if num_tokens else whole[first:]
        span = common_pb2.VersionSpan(start=0, end=len(ids), policy_version=self.policy_version)
        return pb.Completion(
            index=k,
            token_ids_u32=packed("token_ids_u32", ids),
            logprobs_f32=packed("logprobs_f32", [-0.125] * len(ids)),
            finish_reason=reason if first + len(ids) == len(whole) else pb.FINISH_REASON_UNSPECIFIED,
            version_spans=[span],
        )

    def _aborted(self, group: pb.PromptGroup) -> pb.GroupResult:
        indexes = [sample.index for sample in group.samples] or range(group.num_completions)
        aborted = [pb.Completion(index=index, finish_reason=pb.FINISH_REASON_ABORT) for index in indexes]
        return pb.GroupResult(group_id=group.group_id, completions=aborted)


def _keep_prompts(request: pb.GenerateRequest, prompts: dict[str, bytes]) -> None:
    """Fill in prompts that are kept, and keep those that shall be."""
    for name in request.cancel:
        prompts.pop(name, None)
    for group in request.groups:
        group.prompt_ids_u32 = group.prompt_ids_u32 or prompts[group.group_id]
        if group.keeps_prompt:
            prompts[group.group_id] = group.prompt_ids_u32


def _last(ids: "array[int]", token_id: int) -> int:
    """Return the place of the last such token; -1: there is none."""
    return max((place for place, found in enumerate(ids) if found == token_id), default=-1)
