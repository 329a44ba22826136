"""Weight-sync rounds on a real replica: what they leave in the engine, and what a failed one does."""

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from servicekit.errors import REASON_KEY
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2 as pb
from tests.kit.models import logprobs, make_model
from tests.kit.replicas import Replica, Trainer
from tests.kit.round import CALL_S
from tests.kit.waiting import until
from tools.bench_sync.whole_groups import Sampled, prompt_group, submission
from weightsync.round.phases import PHASES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

PROMPT = [7, 8, 9, 10] * 12
NUM_TOKENS = 400


def reason_of(error: grpc.RpcError) -> str:
    return str(dict(error.trailing_metadata())[REASON_KEY])


def greedy(replica: Replica, version: int) -> Sampled:
    return replica.greedy([PROMPT], version, 12)[0]


def argmax_of(model: Path, completion: Sampled) -> bool:
    ids = list(completion.token_ids)
    return bool(logprobs(model, PROMPT, ids, 1.0).argmax(-1).tolist() == ids)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "b", seed=1)


def test_an_unseeded_replica_refuses_to_generate(replica: Replica) -> None:
    assert replica.status().state == pb.REPLICA_STATE_UNSEEDED
    with pytest.raises(grpc.RpcError) as refused:
        replica.generate([PROMPT])
    assert (refused.value.code(), reason_of(refused.value)) == (grpc.StatusCode.FAILED_PRECONDITION, "NOT_READY")


def test_each_sync_changes_what_is_generated_and_forgets_the_old_prefixes(
    replica: Replica, trainer: Trainer, model: Path, other_model: Path
) -> None:
    replies = trainer.publish(1)
    (rank,) = replies[pb.ROUND_PHASE_TRANSFER].reports
    assert rank.bytes_received == rank.shard_bytes > 0
    assert replies[pb.ROUND_PHASE_COMMIT].reports[0].state == pb.REPLICA_STATE_SERVING
    first = greedy(replica, 1)
    assert argmax_of(model, first)
    trainer.load(other_model)
    trainer.publish(2)
    second = greedy(replica, 2)
    assert argmax_of(other_model, second)
    assert second.cached_tokens == 0
    assert second.token_ids != first.token_ids


def test_a_phase_asked_for_again_gives_the_same_reply(replica: Replica, trainer: Trainer) -> None:
    round_ = trainer.round(3)
    for phase in PHASES:
        assert trainer.both(phase, round_) == replica.phase(phase, round_)
    assert replica.status().policy_version == 3


def test_an_older_version_is_refused(replica: Replica, trainer: Trainer) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        replica.phase(pb.ROUND_PHASE_PREPARE, trainer.round(2))
    assert reason_of(refused.value) == "STALE_VERSION"
    assert "version 3" in refused.value.details()


def test_a_phase_out_of_order_is_refused(replica: Replica, trainer: Trainer) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        replica.phase(pb.ROUND_PHASE_TRANSFER, trainer.round(4))
    assert reason_of(refused.value) == "PHASE_ORDER"


def test_a_round_given_up_before_its_transfer_leaves_the_old_version_serving(
    replica: Replica, trainer: Trainer, other_model: Path
) -> None:
    round_ = trainer.round(5)
    for phase in PHASES[:2]:
        trainer.both(phase, round_)
    assert replica.status().state == pb.REPLICA_STATE_PAUSED
    assert trainer.both(pb.ROUND_PHASE_ABORT, round_).reports[0].state == pb.REPLICA_STATE_SERVING
    assert argmax_of(other_model, greedy(replica, 3))


def test_a_round_given_up_after_its_transfer_poisons_until_the_next_sync(replica: Replica, trainer: Trainer) -> None:
    round_ = trainer.round(6)
    for phase in PHASES[:3]:
        trainer.both(phase, round_)
    assert trainer.both(pb.ROUND_PHASE_ABORT, round_).reports[0].state == pb.REPLICA_STATE_POISONED
    with pytest.raises(grpc.RpcError) as refused:
        replica.generate([PROMPT], version=3)
    assert reason_of(refused.value) == "POISONED"
    trainer.publish(7)
    assert greedy(replica, 7).token_ids


class LongCall:
    """400 tokens for each of four completions, under way; more completions take longer."""

    def __init__(self, replica: Replica, num_completions: int = 4) -> None:
        self._replica = replica
        self.version = replica.status().policy_version
        self._pool = ThreadPoolExecutor(1)
        self._groups = self._pool.submit(
            replica.generate, [PROMPT], n=num_completions, max_new_tokens=NUM_TOKENS, version=self.version
        )
        until(lambda: replica.status().running_groups == 1, 10.0, "a running group")

    def completions(self) -> list[Sampled]:
        (group,) = self._groups.result(timeout=CALL_S)
        self._pool.shutdown()
        return list(group.completions)


def spans_of(completion: Sampled) -> list[tuple[int, int, int]]:
    """(version, start, end); together they are all of the tokens."""
    spans = [(span.policy_version, span.start, span.end) for span in completion.version_spans]
    assert [span[1] for span in spans] == [0, *(span[2] for span in spans[:-1])]
    assert spans[-1][2] == len(completion.token_ids)
    return spans


INSTALL = pytest.mark.parametrize(
    "install", [pb.INSTALL_MODE_IN_PLACE, pb.INSTALL_MODE_STAGED], ids=["in_place", "staged"]
)


@INSTALL
def test_frozen_requests_go_on_with_the_new_version(
    replica: Replica, trainer: Trainer, install: pb.InstallMode.ValueType
) -> None:
    call = LongCall(replica)
    # Frozen at once, and not when the round comes to it: on a busy machine the call could have ended by then.
    pause = rollout_pb2.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP_KV)
    assert replica.stub.PauseGeneration(pause, timeout=CALL_S).state == pb.REPLICA_STATE_PAUSED
    trainer.publish(call.version + 1, pause_mode=pb.PAUSE_MODE_KEEP_KV, install_mode=install)
    for completion in call.completions():
        spans = spans_of(completion)
        assert [span[0] for span in spans] in ([call.version, call.version + 1], [call.version + 1])
        assert spans[-1][2] == NUM_TOKENS


@INSTALL
def test_drained_requests_end_with_the_version_that_they_began_with(
    replica: Replica, trainer: Trainer, install: pb.InstallMode.ValueType
) -> None:
    call = LongCall(replica)
    trainer.publish(call.version + 1, pause_mode=pb.PAUSE_MODE_DRAIN, install_mode=install)
    for completion in call.completions():
        assert spans_of(completion) == [(call.version, 0, NUM_TOKENS)]
        assert completion.finish_reason == rollout_pb2.FINISH_REASON_LENGTH


@INSTALL
def test_aborted_requests_are_of_the_old_version_and_can_be_asked_for_again(
    replica: Replica, trainer: Trainer, install: pb.InstallMode.ValueType
) -> None:
    call = LongCall(replica, num_completions=32)  # still under way when a round on a busy machine comes to its pause
    trainer.publish(call.version + 1, pause_mode=pb.PAUSE_MODE_ABORT_REQUEUE, install_mode=install)
    for completion in call.completions():
        assert completion.finish_reason == rollout_pb2.FINISH_REASON_ABORT
        assert len(completion.token_ids) < NUM_TOKENS
        assert {span.policy_version for span in completion.version_spans} <= {call.version}
    assert spans_of(greedy(replica, call.version + 1)) == [(call.version + 1, 0, 12)]


def test_staged_bytes_travel_while_the_old_version_generates(
    replica: Replica, trainer: Trainer, model: Path, other_model: Path
) -> None:
    version = replica.status().policy_version
    assert argmax_of(other_model, greedy(replica, version))
    trainer.load(model)
    round_ = trainer.round(version + 1, install_mode=pb.INSTALL_MODE_STAGED)
    trainer.both(pb.ROUND_PHASE_PREPARE, round_)
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(replica.phase, pb.ROUND_PHASE_TRANSFER, round_)  # the trainer does not send yet
        assert argmax_of(other_model, greedy(replica, version))
        assert not receiving.done()
        trainer.members["trainer/0"].run_phase(pb.ROUND_PHASE_TRANSFER, round_)
        assert receiving.result(timeout=CALL_S).reports[0].state == pb.REPLICA_STATE_SERVING
    assert argmax_of(other_model, greedy(replica, version))  # all bytes are there, and none is in use
    trainer.both(pb.ROUND_PHASE_VERIFY, round_)
    trainer.both(pb.ROUND_PHASE_COMMIT, round_)
    assert argmax_of(model, greedy(replica, version + 1))


def test_a_call_that_is_given_up_stops_its_requests(replica: Replica) -> None:
    version = replica.status().policy_version
    request = submission([prompt_group("g", PROMPT, 4)], version, max_new_tokens=400)
    call = replica.stub.Generate(iter([request]), timeout=CALL_S)
    until(lambda: replica.status().running_groups == 1, 10.0, "a running group")
    call.cancel()
    until(lambda: replica.status().running_groups == 0, 10.0, "the end of the call")
    # Draining proves that the engine holds no request any more.
    pause = rollout_pb2.PauseGenerationRequest(mode=pb.PAUSE_MODE_DRAIN)
    assert replica.stub.PauseGeneration(pause, timeout=CALL_S).state == pb.REPLICA_STATE_PAUSED
    replica.stub.ResumeGeneration(rollout_pb2.ResumeGenerationRequest(), timeout=CALL_S)


def test_metrics_tell_the_sync_stages(replica: Replica) -> None:
    with urllib.request.urlopen(f"http://{replica.metrics_address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    for stage in ("prepare", "pause", "transfer", "verify", "commit"):
        assert f'tandem_weight_sync_seconds_count{{stage="{stage}"}}' in text
    assert 'tandem_replica_state{state="serving"} 1.0' in text
    assert 'tandem_weight_sync_outcomes_total{outcome="committed"}' in text
    assert "tandem_weight_sync_redundancy_ratio 1.0" in text
    assert "tandem_generated_tokens_total" in text
