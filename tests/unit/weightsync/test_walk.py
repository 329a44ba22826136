"""The walk of a rank: each hop once, in order, within the limits, and never two ranks that wait for each other."""

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.stores import tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.plans.limits import RECEIVES, SENDS
from weightsync.plans.messages import Hop, Message
from weightsync.plans.participants import Participants, trainer_slot
from weightsync.plans.round_plan import plan_round
from weightsync.plans.walk import Step, walk

STARTS = {Step.SEND, Step.RELAY, Step.RECEIVE}


def needs_buffer(message: Message) -> bool:
    return message.sequence % 3 != 1


def walks(trainer: Parallel, rollouts: list[Parallel], elements: int, buffers: int) -> list[list[tuple[Step, Hop]]]:
    """The steps of every rank of a round."""
    slots = [trainer_slot(rank) for rank in range(trainer.world_size)]
    replicas, first = {}, {}
    for index, parallel in enumerate(rollouts):
        replicas[name := f"rollout-{index}"] = parallel
        first[name] = len(slots)
        slots += [f"{name}/{rank}" for rank in range(parallel.world_size)]
    participants = Participants(trainer=trainer, replicas=replicas, slots=tuple(slots), first_rank=first)
    plan = plan_round(tiny_spec(), trainer, tuple(participants.chains()), elements)
    hops = [plan.hops_of(rank, participants) for rank in range(len(slots))]
    return [list(walk(rank, mine, buffers, needs_buffer)) for rank, mine in enumerate(hops)]


rounds = given(
    trainer=st.sampled_from([Parallel(), Parallel(tensor=2), Parallel(pipeline=2), Parallel(tensor=2, data=2)]),
    rollouts=st.lists(st.sampled_from([Parallel(), Parallel(tensor=2)]), min_size=1, max_size=5),
    elements=st.sampled_from([50, 200, 1000, 100_000]),
    buffers=st.integers(2, 6),
)


@settings(max_examples=40, deadline=None)
@rounds
def test_a_rank_s_steps_are_each_hop_s_in_their_order_within_the_limits(
    trainer: Parallel, rollouts: list[Parallel], elements: int, buffers: int
) -> None:
    for steps in walks(trainer, rollouts, elements, buffers):
        sending, receiving, held = deque[int](), deque[int](), Counter[int]()
        passed_on: set[int] = set()
        for step, hop in steps:
            sequence = hop.message.sequence
            if step in (Step.SEND, Step.RECEIVE):
                held[sequence] += needs_buffer(hop.message)
            match step:
                case Step.SEND | Step.RELAY:
                    sending.append(sequence)
                    assert step is Step.SEND or sequence in passed_on  # what is passed on has been verified
                case Step.RECEIVE:
                    receiving.append(sequence)
                case Step.RECEIVED | Step.VERIFIED:
                    assert receiving.popleft() == sequence  # it waits for the oldest
                    passed_on |= {sequence} if step is Step.VERIFIED else set()
                case Step.SENT:
                    assert sending.popleft() == sequence
            if step in (Step.SENT, Step.UNPACKED):
                held[sequence] -= needs_buffer(hop.message)
            assert len(sending) <= SENDS
            assert len(receiving) <= RECEIVES
            assert held.total() <= buffers
        assert not sending
        assert not receiving
        assert held.total() == 0
        assert passed_on == {hop.message.sequence for step, hop in steps if step is Step.RELAY}


@settings(max_examples=40, deadline=None)
@rounds
def test_all_ranks_finish_where_a_message_moves_only_when_both_ends_are_ready(
    trainer: Parallel, rollouts: list[Parallel], elements: int, buffers: int
) -> None:
    left = [deque(steps) for steps in walks(trainer, rollouts, elements, buffers)]
    started = Counter[tuple[int, int]]()  # ends that are ready, by message and receiver
    moved = True
    while moved:
        moved = False
        for steps in left:
            while steps:
                step, hop = steps[0]
                key = (hop.message.sequence, hop.receiver)
                if step in (Step.SENT, Step.RECEIVED, Step.VERIFIED) and started[key] < 2:
                    break
                started[key] += step in STARTS
                steps.popleft()
                moved = True
    assert not any(left)
    assert set(started.values()) == {2}
