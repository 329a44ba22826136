"""A replica without a service, for virtual time: the coordinator's own SampleStream over messages in this process.

The tokens of a completion are a function of its group, index and place, so that what was kept or lost is seen.
"""

import asyncio
import random
import zlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from servicekit.errors import Internal, Unavailable
from servicekit.lifecycle.tasks import cancel
from servicekit.rpc.arrays import packed
from tandem_api.common.v1 import common_pb2
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_clients.flow import Order
from tandem_clients.sample_stream import SampleStream

STOP = 50_000
GRACE_S = 20.0


def length_of(group: str, index: int, most: int) -> int:
    """Of a completion: of a long tail, cut at `most`."""
    drawn = random.Random(f"{group}/{index}").lognormvariate(3.0, 1.0)
    return max(1, min(most, int(drawn)))


def token_of(group: str, index: int, place: int, turn: int = 0) -> int:
    """A token of a completion; STOP at the end of a turn."""
    return tokens_of(group, index, range(place, place + 1), turn)[0]


def tokens_of(group: str, index: int, places: range, turn: int = 0) -> list[int]:
    """Tokens of a completion."""
    begun = zlib.crc32(f"{group}/{index}/".encode())  # the others continue it
    found = [zlib.crc32(b"%d" % place, begun) % STOP for place in places]
    return [STOP if turn and place % turn == turn - 1 else one for place, one in zip(places, found, strict=True)]


@dataclass(eq=False)
class FakeSampler:
    """Samples `tokens_per_s` of each completion, however many run.

    Attributes:
        sampled: tokens, also those that nobody got.
        running: completions now, and the most there were.
        turn_tokens: each token at such a distance ends a turn; 0: none does.
        leaves_abruptly: what is written to it once it leaves fails the call, as gRPC does in a race.
        submitted: groups, with their prompt (True) and without it.
        most_kept: prompts.
    """

    name: str
    random: random.Random
    tokens_per_s: float = 10.0
    kv_tokens: int = 0
    policy_version: int = 0
    logprob: float = -0.5
    is_dead: bool = False
    is_leaving: bool = False
    leaves_abruptly: bool = False
    turn_tokens: int = 0
    cut: tuple[float | None, int] = (None, 0)
    sampled: int = 0
    submitted: Counter[bool] = field(default_factory=Counter)
    most_kept: int = 0
    running: int = 0
    most: int = 0
    calls: list["_Call"] = field(default_factory=list)

    @asynccontextmanager
    async def sampling(self, order: Order, *, timeout_s: float, newer: bool = False) -> AsyncIterator[SampleStream]:
        call = _Call(self, order)
        self.calls.append(call)
        try:
            stream = SampleStream(self.name, call, order, timeout_s, newer=newer)
            await stream.begin()
            yield stream
        finally:
            self.calls.remove(call)
            await call.close()

    async def status(self, *, timeout_s: float) -> object:
        self.check()
        return object()

    def check(self) -> None:
        """As a connection would."""
        if self.is_dead:
            raise Unavailable(f"{self.name}: connection refused")

    def die(self) -> None:
        """As a process that is killed."""
        self.is_dead = True
        for call in self.calls:
            call.responses.put_nowait(None)

    def leave(self) -> None:
        """As a process that is asked to end: what runs has a grace period, then it comes back as it is."""
        if not self.is_leaving:
            self.is_leaving = True
            for call in self.calls:
                call.say_load()
            asyncio.get_running_loop().call_later(GRACE_S, self.abort)
            asyncio.get_running_loop().call_later(GRACE_S + 1.0, self.die)

    def abort(self) -> None:
        """As a pause that aborts does."""
        for call in self.calls:
            call.abort(*call.aborts)


class _Call:
    def __init__(self, sampler: FakeSampler, order: Order) -> None:
        self.sampler, self.order = sampler, order
        self.responses: asyncio.Queue[pb.GenerateResponse | None] = asyncio.Queue()
        self.aborts: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.tasks: set[asyncio.Task[None]] = set()
        self.kept: set[str] = set()
        self.num_taken = 0

    async def write(self, request: pb.GenerateRequest) -> None:
        if self.sampler.is_leaving and self.sampler.leaves_abruptly:
            raise Internal("Internal error from Core")
        if request.HasField("sampling"):
            self.say_load()
        self.kept.difference_update(request.cancel)
        self.abort(*request.cancel)
        if request.groups:
            served = self.sampler.policy_version
            highest = request.max_policy_version if request.HasField("max_policy_version") else served
            assert request.min_policy_version <= served <= highest, "another version is served"
        for group in request.groups:
            assert group.prompt_ids_u32 or group.group_id in self.kept, "its prompt is not kept"
            self.num_taken += 1
            self.sampler.submitted[bool(group.prompt_ids_u32)] += 1
            if group.keeps_prompt:
                self.kept.add(group.group_id)
                self.sampler.most_kept = max(self.sampler.most_kept, len(self.kept))
            prefixes = {sample.index: len(sample.token_ids_u32) // 4 for sample in group.samples}
            for index, first in (prefixes or dict.fromkeys(range(group.num_completions), 0)).items():
                task = asyncio.create_task(self._sample(group.group_id, index, first))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)

    async def read(self) -> pb.GenerateResponse:
        self.sampler.check()
        response = await self.responses.get()
        self.sampler.check()
        assert response is not None
        return response

    async def _sample(self, group: str, index: int, at: int) -> None:
        sampler, aborts = self.sampler, self.aborts[group]
        length = length_of(group, index, self.order.sampling.max_new_tokens)
        sampler.running += 1
        sampler.most = max(sampler.most, sampler.running)
        try:
            if turn := sampler.turn_tokens:
                length = min(length, at - at % turn + turn)
            ends = pb.FINISH_REASON_STOP if turn and length % turn == 0 else pb.FINISH_REASON_LENGTH
            while at < length:
                number = min(sampler.random.randint(1, 20), length - at)
                try:
                    async with asyncio.timeout(number / sampler.tokens_per_s):
                        await aborts.wait()
                except TimeoutError:
                    sampler.sampled += number
                    self._say(group, index, at, number, ends if at + number == length else _UNDER_WAY)
                    at += number
                else:
                    self._say(group, index, at, 0, pb.FINISH_REASON_ABORT)
                    return
        finally:
            sampler.running -= 1

    def _say(self, group: str, index: int, first: int, number: int, reason: pb.FinishReason.ValueType) -> None:
        turn = self.sampler.turn_tokens
        ids = tokens_of(group, index, range(first, first + number), turn)
        span = common_pb2.VersionSpan(start=0, end=number, policy_version=self.sampler.policy_version)
        completion = pb.Completion(
            index=index,
            token_ids_u32=packed("token_ids_u32", ids),
            logprobs_f32=packed("logprobs_f32", [self.sampler.logprob] * number),
            finish_reason=reason,
            version_spans=[span],
        )
        result = pb.GroupResult(group_id=group, completions=[completion])
        self.responses.put_nowait(pb.GenerateResponse(groups=[result], accepted=self.num_taken))
        if self.sampler.random.random() < 0.1:
            self.say_load()

    def abort(self, *groups: str) -> None:
        for group in groups:
            self.aborts.pop(group, asyncio.Event()).set()

    def say_load(self) -> None:
        load = pb.ReplicaLoad(kv_tokens=self.sampler.kv_tokens, leaving=self.sampler.is_leaving)
        self.responses.put_nowait(pb.GenerateResponse(load=load, accepted=self.num_taken))

    async def close(self) -> None:
        await cancel(*self.tasks)


_UNDER_WAY = pb.FINISH_REASON_UNSPECIFIED
