"""A rank that is killed in TRANSFER holds nobody: the survivors' own TRANSFER ends, though its deadline is a minute.

Real members as processes, gloo, messages of the default size, and nobody who tells the survivors: no coordinator, no
ABORT. tests/chaos/test_deaths.py has the same with services and a coordinator, up to the round that is committed.
"""

import random
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.fleet import MemberProcess, ProcessFleet
from tests.kit.round import run_phase
from tests.kit.stores import tiny_spec
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TRAINER, ROLLOUT = Parallel(tensor=2), Parallel()
REPLICAS = ("rollout-0", "rollout-1", "rollout-2")
# sync.transfer_timeout_s and sync.formation_timeout_s where the run does not say.
DEADLINE_S = 60.0
# gloo tells some of those who wait at once, and a look at the connections every fraction of a second the others; the
# rest is for a machine that others use, too.
NOTICED_S = 5.0


def medium_spec() -> ModelSpec:
    """50 million parameters: 200 MB in float32, a transfer of about a second."""
    return tiny_spec(
        num_hidden_layers=8,
        hidden_size=640,
        intermediate_size=1920,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=80,
        vocab_size=9000,
    )


@pytest.fixture(scope="module")
def members(module_redis: str) -> Iterator[ProcessFleet]:
    """A trainer of two ranks and a chain of three replicas."""
    with ProcessFleet(module_redis, medium_spec(), TRAINER, dict.fromkeys(REPLICAS, ROLLOUT)) as them:
        yield them


def new_round_of(members: ProcessFleet) -> pb.Round:
    """A round over everybody, with messages of the default size."""
    return members.round(
        1,
        round_id=uuid.uuid4().hex,
        wait_s=DEADLINE_S,
        transport=pb.SYNC_TRANSPORT_COLLECTIVE,
        bucket_bytes=0,
        formation_timeout_s=DEADLINE_S,
        transfer_timeout_s=DEADLINE_S,
    )


def run(members: ProcessFleet, phase: pb.RoundPhase.ValueType, round_: pb.Round) -> None:
    run_phase(members.participants, phase, round_)


@pytest.fixture(scope="module")
def transfer_s(members: ProcessFleet) -> float:
    """Seconds of a transfer that nobody harms."""
    round_ = new_round_of(members)
    run(members, pb.ROUND_PHASE_PREPARE, round_)
    start_s = time.monotonic()
    run(members, pb.ROUND_PHASE_TRANSFER, round_)
    duration_s = time.monotonic() - start_s
    run(members, pb.ROUND_PHASE_ABORT, round_)
    return duration_s


def end_of(member: MemberProcess) -> tuple[float, str]:
    """When its phase ended, and with which error."""
    try:
        member.end()
    except (RuntimeError, EOFError) as error:
        return time.monotonic(), str(error)
    return time.monotonic(), "done"


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("victim", ["rollout-0/0", "rollout-1/0", "rollout-2/0", "trainer/1"])
def test_the_survivors_notice_a_death_by_themselves(
    members: ProcessFleet, transfer_s: float, victim: str, seed: int
) -> None:
    round_ = new_round_of(members)
    run(members, pb.ROUND_PHASE_PREPARE, round_)
    survivors = {slot: member for slot, member in members.members.items() if slot != victim}
    for member in members.members.values():
        member.begin(pb.ROUND_PHASE_TRANSFER, round_)
    time.sleep(transfer_s * random.Random(seed).uniform(0.1, 0.7))  # the moment is what is drawn: there is no condition
    members.members[victim].kill()
    killed_s = time.monotonic()
    with ThreadPoolExecutor(len(survivors)) as pool:
        ends = dict(zip(survivors, pool.map(end_of, survivors.values()), strict=True))
    waited_s = {slot: round(at_s - killed_s, 2) for slot, (at_s, _) in ends.items()}
    members.renew(victim)
    run_phase({slot: member.run_phase for slot, member in survivors.items()}, pb.ROUND_PHASE_ABORT, round_)
    print(f"transfer {transfer_s:.2f} s, {victim} killed; survivors' waits {waited_s}")
    assert max(waited_s.values()) < NOTICED_S, ends
    again = new_round_of(members)
    for phase in (pb.ROUND_PHASE_PREPARE, pb.ROUND_PHASE_TRANSFER, pb.ROUND_PHASE_VERIFY, pb.ROUND_PHASE_COMMIT):
        run(members, phase, again)
