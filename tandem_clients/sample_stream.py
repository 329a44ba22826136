"""A stream of samples from one replica: completions are asked for, what is new of them comes in and is kept.

It checks what the replica streams, and turns protobuf into the types of flow.py.
"""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from servicekit.errors import DeadlineExceeded, Internal, rpc_errors
from servicekit.rpc.arrays import packed
from servicekit.rpc.limits import SAMPLE_CHUNK_BYTES, STREAM_SILENCE_S, chunk_starts
from tandem_api.rollout.v1 import rollout_pb2 as pb
from tandem_clients.flow import Completion, Group, Order, Prompt, Sampling
from tandem_clients.probing import ProbedService

# The service ends a stream that is silent for longer.
RENEW_S = STREAM_SILENCE_S / 5
# Whether a completion with this reason has ended. That of an aborted one continues elsewhere.
_ENDS = dict.fromkeys((pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH), True)
_ENDS |= dict.fromkeys((pb.FINISH_REASON_ABORT, pb.FINISH_REASON_UNSPECIFIED), False)


class MalformedReply(Internal):
    """A service's reply contradicts its contract."""


@dataclass(kw_only=True, slots=True, eq=False)
class OpenGroup:
    """A group whose completions are under way, on whichever replica.

    Attributes:
        found: what has come of each completion, by its index.
        waiting: completions that nothing samples and that have not ended.
        running: completions that a stream samples now.
        acting: completions whose turn has ended, before an environment has answered.
        takes_turns: whether an environment answers.
        num_aborted: how many of them came back unfinished, again and again.
    """

    group_id: str
    prompt: Prompt
    num_completions: int
    found: dict[int, Completion] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    acting: set[int] = field(default_factory=set)
    takes_turns: bool = False
    num_aborted: int = 0

    def __post_init__(self) -> None:
        self.waiting = self.waiting or list(range(self.num_completions))

    def take(self, most: int) -> list[int]:
        """Return completions that wait: they run from now on."""
        taken, self.waiting = self.waiting[:most], self.waiting[most:]
        self.running.update(taken)
        return taken

    def stop(self, indices: Iterable[int], sampling: Sampling | None) -> None:
        """Let completions that run wait, before the others: after their tokens, if these may continue.

        One that has its last token has ended: only word of that was lost.

        Args:
            sampling: how they are sampled; None: from their start.
        """
        stopped = sorted(indices)
        self.running.difference_update(stopped)
        if sampling is None or not sampling.can_continue:
            for index in stopped:
                self.found.pop(index, None)
        else:
            ended = [index for index in stopped if self._has_ended(index, sampling)]
            stopped = [index for index in stopped if index not in ended]
            self.end_turn(ended)
        self.waiting[:0] = stopped

    def end_turn(self, indices: Iterable[int]) -> None:
        """Note completions that have their last token, or that of a turn."""
        if self.takes_turns:
            self.acting.update(indices)

    def answer(self, index: int, context_ids: "array[int]") -> None:
        """Let a completion continue after ids that the policy has not sampled; none: it has ended."""
        self.acting.discard(index)
        if context_ids:
            begun, num = self.found[index], len(context_ids)
            context = Completion(
                token_ids=context_ids,
                logprobs=array("f", bytes(4 * num)),
                truncated=False,
                oldest_version=begun.oldest_version,
                version_spans=((num, begun.version_spans[-1][1]),),
                loss_mask=array("B", bytes(num)),
            )
            _extend(begun, context)
            self.waiting.append(index)

    def held(self, index: int) -> "tuple[array[int], array[int]]":
        """Return what a completion follows in place of the prompt, empty if it is that, and its tokens behind it.

        What a branch follows is as long as the prompt, if it has as many tokens before the first sampled one: so no
        sequence is longer than prompt and completion may be.
        """
        if index not in self.found:
            return array("I"), array("I")
        completion = self.found[index]
        if not completion.branches or completion.loss_mask is None:
            return array("I"), completion.token_ids
        begin = completion.branches[-1]
        sampled = completion.loss_mask.tobytes().find(1, begin)
        cut = begin + len(self.prompt.token_ids)
        cut = min(cut, len(completion.token_ids) if sampled < 0 else sampled)
        return completion.token_ids[begin:cut], completion.token_ids[cut:]

    def _has_ended(self, index: int, sampling: Sampling) -> bool:
        """Whether a completion has its last token; it says then how it has ended."""
        completion = self.found.get(index)
        if completion is None or not completion.num_sampled or (completion.loss_mask and not completion.loss_mask[-1]):
            return False
        stops = completion.token_ids[-1] in sampling.stop_token_ids
        completion.truncated = not stops and len(self.held(index)[1]) >= sampling.max_new_tokens
        return stops or completion.truncated

    def is_whole(self) -> bool:
        """Whether every completion has ended."""
        return not (self.running or self.waiting or self.acting)

    def sample_id(self, index: int) -> str:
        """Return the name of a completion's sample."""
        return f"{self.group_id}#{index}"

    def num_begun(self) -> int:
        """Count the tokens of completions that have not ended."""
        return sum(
            [len(self.found[index].token_ids) for index in (*self.running, *self.waiting) if index in self.found]
        )

    def num_resumed(self, indices: Iterable[int]) -> int:
        """Count the tokens of completions that were interrupted; behind an answer the next turn begins by itself."""
        cut = [index for index in indices if index in self.found and (self.found[index].loss_mask or [1])[-1]]
        return sum([len(self.held(index)[1]) for index in cut])

    def group(self) -> Group:
        """Return the whole group."""
        completions = tuple([self.found[index] for index in range(self.num_completions)])
        return Group(group_id=self.group_id, prompt=self.prompt, completions=completions)


@dataclass(kw_only=True, slots=True)
class News:
    """What a response brings.

    Attributes:
        whole: groups of which everything has come.
        aborted: groups of which completions came back unfinished (a pause, a shutdown) and wait again.
        num_ended: completions that run no more.
        engine_s: seconds of the engine's work for this stream so far.
        load: None: not reported this time.
        ended: groups of which turns have ended, before an environment has answered.
    """

    whole: list[OpenGroup]
    aborted: list[OpenGroup]
    num_ended: int
    engine_s: float
    load: pb.ReplicaLoad | None
    ended: list[OpenGroup] = field(default_factory=list)


class SampleStream:
    """The stream of one Generate call.

    Args:
        call: of grpc.aio.
        timeout_s: the replica is given up if it brings no token for so long.
        newer: the policy may be newer than the order's version, and change within a completion.
    Attributes:
        read_s: the loop's time of the last news. num_tokens: that have come.
    """

    def __init__(self, name: str, call: Any, order: Order, timeout_s: float, *, newer: bool = False) -> None:
        self._name, self._call, self._order, self._timeout_s = name, call, order, timeout_s
        self._highest = None if newer else order.policy_version
        self._open: dict[str, OpenGroup] = {}
        # Groups whose prompts the replica keeps, from that submission on; and how many of all these it has accepted.
        self._kept: dict[str, tuple[OpenGroup, int]] = {}
        self._num_submitted = self._num_accepted = self.num_tokens = 0
        self._renewed_s = self.read_s = 0.0
        self._writes = asyncio.Lock()

    async def begin(self) -> None:
        """Open the stream: the replica answers with its load."""
        self._renewed_s = asyncio.get_running_loop().time()
        await self._write(pb.GenerateRequest(sampling=pb.SamplingParams(**asdict(self._order.sampling))))

    async def submit(self, parts: Sequence[tuple[OpenGroup, Sequence[int]]]) -> None:
        """Ask for completions of groups, by their index; each continues after what has come of it."""
        messages = [self._message(group, indices) for group, indices in parts]
        starts = [0, *chunk_starts([message.ByteSize() for message in messages], SAMPLE_CHUNK_BYTES), len(parts)]
        lowest, highest = self._order.policy_version, self._highest
        for first, last in pairwise(starts):
            await self._write(
                pb.GenerateRequest(groups=messages[first:last], min_policy_version=lowest, max_policy_version=highest)
            )

    async def hand_over(self) -> None:
        """Ask for what runs to come back as it is."""
        self._kept = {name: kept for name, kept in self._kept.items() if name not in self._open}
        await self._write(pb.GenerateRequest(cancel=list(self._open)))

    async def _renew(self) -> None:
        """Show that we are there, and name groups whose prompts need not be kept any more."""
        self._renewed_s = self.read_s
        whole = [name for name, (group, _) in self._kept.items() if group.is_whole()]
        self._kept = {name: kept for name, kept in self._kept.items() if not kept[0].is_whole()}
        await self._write(pb.GenerateRequest(cancel=whole))

    def _message(self, group: OpenGroup, indices: Sequence[int]) -> pb.PromptGroup:
        self._open[group.group_id] = group
        self._num_submitted += 1
        keeps = bool(group.waiting) or group.takes_turns
        is_kept = self._kept.get(group.group_id, (group, self._num_submitted))[1] <= self._num_accepted
        message = pb.PromptGroup(
            group_id=group.group_id,
            prompt_ids_u32=b"" if is_kept else packed("prompt_ids_u32", group.prompt.token_ids),
            num_completions=group.num_completions,
            seed=self._order.group_seed(group.group_id),
            keeps_prompt=keeps,
        )
        if keeps:
            self._kept.setdefault(group.group_id, (group, self._num_submitted))
        if group.found or len(indices) < group.num_completions:
            for index in indices:
                prompt_ids, token_ids = group.held(index)
                message.samples.add(index=index, token_ids_u32=token_ids.tobytes(), prompt_ids_u32=prompt_ids.tobytes())
        return message

    @property
    def _is_idle(self) -> bool:
        """Whether everything that was asked for has come: environments may take their time to answer it."""
        return self._num_submitted > 0 and not self._open

    async def _write(self, request: pb.GenerateRequest) -> None:
        # A call that has ended says why to its reader.
        async with self._writes:
            with contextlib.suppress(asyncio.InvalidStateError), rpc_errors(self._name):
                await self._call.write(request)

    async def news(self) -> AsyncIterator[News]:
        """Yield what comes until the call ends; what is new of a completion is added to its group.

        Raises: TandemError: of the service, or MalformedReply: names the replica, the group and the completion.
        """
        clock = asyncio.get_running_loop().time
        due_s = clock() + self._timeout_s
        while True:
            try:
                async with asyncio.timeout_at(None if self._is_idle else due_s):
                    with rpc_errors(self._name):
                        response = await self._call.read()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"{self._name}: no token came for {self._timeout_s:g} s (rollout.generate_timeout_s)"
                ) from None
            if not isinstance(response, pb.GenerateResponse):  # the end
                return
            self.read_s = clock()
            if response.groups or self._is_idle:
                due_s = self.read_s + self._timeout_s
            yield self._read(response)
            if self.read_s - self._renewed_s > RENEW_S:
                await self._renew()

    def _read(self, response: pb.GenerateResponse) -> News:
        load = response.load if response.HasField("load") else None
        self._num_accepted = response.accepted
        news = News(whole=[], aborted=[], num_ended=0, engine_s=response.engine_s, load=load)
        for result in response.groups:
            group = self._open.get(result.group_id)
            if group is None:
                raise MalformedReply(f"{self._name}: sent group {result.group_id!r}, which was not asked for")
            before = len(group.running)
            try:
                aborted = self._add(group, result)
            except MalformedReply:
                group.stop(group.running, None)  # what came with the error counts for nothing
                raise
            if aborted:
                group.stop(aborted, self._order.sampling)
                if group.waiting:
                    group.num_aborted += len(aborted)
                    news.aborted.append(group)
            news.num_ended += before - len(group.running)
            if group.acting:
                news.ended.append(group)
            if not group.running:
                del self._open[result.group_id]
            if group.is_whole():
                news.whole.append(group)
        return news

    def _add(self, group: OpenGroup, result: pb.GroupResult) -> list[int]:
        """Add what is new to a group; return the completions that were aborted."""
        place, items = f"{self._name}: group {group.group_id}", result.completions
        if len({item.index for item in items}) < len(items):
            raise MalformedReply(f"{place} has the same completion twice in a response")
        found, ended, aborted = group.found, list[int](), list[int]()
        for item in items:
            index, reason = item.index, item.finish_reason
            if index not in group.running or reason not in _ENDS:
                raise MalformedReply(f"{place}, completion {index} was not asked for, or has finish reason {reason}")
            ends = _ENDS[reason]
            if item.token_ids_u32 or (ends and index not in found):
                _add_part(found, item, place)
                self.num_tokens += len(item.token_ids_u32) // 4
            if ends:
                completion = found[index]
                completion.truncated = reason == pb.FINISH_REASON_LENGTH
                if not completion.num_sampled:
                    raise MalformedReply(
                        f"{place}, completion {index}: its loss mask leaves none of its {len(completion.token_ids)} "
                        "tokens to the policy; a completion needs one that the policy has sampled"
                    )
                ended.append(index)
            elif reason == pb.FINISH_REASON_ABORT:
                aborted.append(index)
        group.running.difference_update(ended)
        group.end_turn(ended)
        return aborted


class Sampler(ProbedService, Protocol):
    """What samples: a replica's client (replica.py)."""

    cut: tuple[float | None, int]

    def sampling(
        self, order: Order, *, timeout_s: float, newer: bool = False
    ) -> AbstractAsyncContextManager[SampleStream]:
        """Open a stream of samples for a block."""
        ...


class ServingFleet(Protocol):
    """The replicas that get work."""

    def serving(self) -> Sequence[Sampler]:
        """Return them, by name."""
        ...


def _add_part(found: dict[int, Completion], item: pb.Completion, place: str) -> None:
    """Append an item's tokens to its completion, which may begin with them."""
    place = f"{place}, completion {item.index}"
    try:
        token_ids, logprobs = array("I", item.token_ids_u32), array("f", item.logprobs_f32)
        mask = array("B", item.loss_mask_u8) if item.loss_mask_u8 else None
    except ValueError:
        raise MalformedReply(f"{place} has a part of a number") from None
    spans = tuple([(span.end, span.policy_version) for span in item.version_spans])
    num_tokens = len(token_ids)
    if not num_tokens or len(logprobs) != num_tokens:
        raise MalformedReply(f"{place} has {num_tokens} tokens and {len(logprobs)} log-probs")
    if mask is not None and len(mask) != num_tokens:
        raise MalformedReply(f"{place} has {num_tokens} tokens and a loss mask of {len(mask)}")
    if not spans or spans[-1][0] != num_tokens:
        raise MalformedReply(f"{place}: its version spans do not cover its {num_tokens} tokens")
    part = Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        truncated=False,
        oldest_version=spans[0][1] if len(spans) == 1 else min([version for _, version in spans]),
        version_spans=spans,
        loss_mask=None if mask is None or all(mask) else mask,
    )
    begun = found.setdefault(item.index, part)
    if begun is not part:
        _extend(begun, part)


def _extend(begun: Completion, part: Completion) -> None:
    """Append tokens that were sampled after those of `begun`."""
    first = len(begun.token_ids)
    if begun.loss_mask is not None or part.loss_mask is not None:
        masks = [one.loss_mask or array("B", b"\1" * len(one.token_ids)) for one in (begun, part)]
        begun.loss_mask = masks[0] + masks[1]
    begun.token_ids.extend(part.token_ids)
    begun.logprobs.extend(part.logprobs)
    spans = [*begun.version_spans, *[(first + end, version) for end, version in part.version_spans]]
    # Neighbours of one version are one run.
    runs = [span for span, after in pairwise(spans) if span[1] != after[1]]
    begun.version_spans = (*runs, spans[-1])
    begun.oldest_version = min(begun.oldest_version, part.oldest_version)
