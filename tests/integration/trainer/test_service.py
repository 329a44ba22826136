"""The trainer service over real gRPC, two real ranks (TP 2), a real Redis."""

import asyncio
import math
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import numpy as np
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from safetensors.torch import load_file

from servicekit.errors import InvalidRequest, TandemError, TooLarge, WrongVersion, from_rpc_error
from servicekit.redis.records import AgreedSettings, ServiceRecord
from servicekit.rpc.arrays import read_array
from servicekit.rpc.channel import open_channel
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2, weights_pb2_grpc
from tandem_config.comparing.agreeing import agreed_settings
from tandem_files.exports import note_template
from tests.integration.trainer.processes import TrainerProcesses, chunk, one_by_one, step_requests
from tests.kit.models import TRAINED_VOCABULARY as VOCAB
from tests.kit.stores import same
from weightsync.layouts.layout import Parallel

pytestmark = pytest.mark.integration
TIMEOUT_S = 60.0
# Metrics of a step that differ from time to time.
OF_THE_MACHINE = {"train_tokens_per_s", "model_flops_utilization", "train_peak_memory_bytes"}
# What rank 0 serves of the last step's metrics.
GAUGES = {
    "train_tokens_per_s": "tandem_train_tokens_per_second",
    "model_flops_utilization": "tandem_train_model_flops_utilization_ratio",
    "train_peak_memory_bytes": "tandem_train_peak_memory_bytes",
    "packing_efficiency": "tandem_packing_efficiency_ratio",
    "prompt_sharing": "tandem_prompt_sharing_ratio",
}


def exact(metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics that depend on the samples and the policy alone."""
    return {name: value for name, value in metrics.items() if name not in OF_THE_MACHINE}


@pytest.fixture(scope="module")
def shared_trainer(
    module_redis: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerProcesses]:
    """TP 2, running; ends as `kill PID` ends it, which is a test too."""
    trainer = TrainerProcesses(module_redis, tmp_path_factory.mktemp("trainer"), tiny_model, tensor_parallel=2)
    with trainer.begin():
        yield trainer
        assert trainer.stop(trainer.ranks) == [0, 0]


@pytest.fixture(scope="module")
def record(shared_trainer: TrainerProcesses) -> ServiceRecord:
    return shared_trainer.ready()


@pytest.fixture
def folder(shared_trainer: TrainerProcesses) -> Path:
    """A folder of one test, below that of the trainer's run."""
    return Path(tempfile.mkdtemp(dir=shared_trainer.folder))


@pytest_asyncio.fixture
async def rounds(record: ServiceRecord) -> AsyncIterator[weights_pb2_grpc.RoundServiceStub]:
    async with open_channel(record.address) as channel:
        yield weights_pb2_grpc.RoundServiceStub(channel)


@pytest_asyncio.fixture
async def stub(record: ServiceRecord) -> AsyncIterator[trainer_pb2_grpc.TrainerServiceStub]:
    async with open_channel(record.address) as channel:
        yield trainer_pb2_grpc.TrainerServiceStub(channel)


async def version(stub: Any) -> int:
    return int((await stub.GetStatus(pb.GetStatusRequest(), timeout=10)).policy_version)


async def refusal(call: Any) -> TandemError:
    with pytest.raises(grpc.RpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def test_status_and_health(stub: Any, record: ServiceRecord, shared_trainer: TrainerProcesses) -> None:
    status = await stub.GetStatus(pb.GetStatusRequest(), timeout=10)
    digest = AgreedSettings(agreed_settings(shared_trainer.config)).digest
    assert status.settings_digest == record.settings == digest
    assert (status.world_size, status.parallel.tensor, status.activity) == (2, 2, "idle")
    assert status.versions.packages["megatron_core"] == "0.16.1"
    async with open_channel(record.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        reply = await health.Check(health_pb2.HealthCheckRequest(service="readiness"), timeout=10)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_train_step_makes_the_next_version_and_reports(stub: Any) -> None:
    before = await version(stub)
    batches = [chunk(0), chunk(1)]
    reply = await stub.TrainStep(iter(step_requests("reports", before, batches)), timeout=TIMEOUT_S)
    assert reply.policy_version == before + 1 == await version(stub)
    assert {"loss", "grad_norm", "entropy", "clip_fraction_low", "clip_fraction_high", "ratio_mean", "kl_old"} <= set(
        reply.metrics
    )
    assert reply.metrics["samples"] == 8
    assert 0 < reply.metrics["model_flops_utilization"] < 1
    tokens = sum(len(read_array(batch, "token_ids_u32")) for batch in batches)
    assert tokens / reply.metrics["train_tokens_per_s"] <= reply.seconds["total"]
    assert reply.metrics["train_peak_memory_bytes"] > 2**20
    assert 0.9 < reply.metrics["packing_efficiency"] <= 1
    assert reply.metrics["tokens"] == sum(sum(batch.completion_lengths) for batch in batches)
    assert {"receive", "pack", "old_logprobs", "forward_backward", "optimizer", "total"} == set(reply.seconds)


async def test_repeated_step_id_gets_the_first_reply(stub: Any) -> None:
    before = await version(stub)
    requests = step_requests("repeated", before, [chunk(0)])
    first = await stub.TrainStep(iter(requests), timeout=TIMEOUT_S)
    again = await stub.TrainStep(iter(requests), timeout=TIMEOUT_S)
    assert again == first
    assert await version(stub) == before + 1
    assert (await stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)).step_id == "repeated"


async def test_wrong_version_is_refused(stub: Any) -> None:
    now = await version(stub)
    error = await refusal(stub.TrainStep(iter(step_requests("late", now + 7, [chunk(0)])), timeout=TIMEOUT_S))
    assert isinstance(error, WrongVersion)
    assert str(now + 7) in str(error)


async def test_token_beyond_the_vocabulary_is_named(stub: Any) -> None:
    bad = chunk(0)
    token_ids = read_array(bad, "token_ids_u32")
    token_ids[bad.prompt_lengths[0] + bad.completion_lengths[0]] = VOCAB
    bad.token_ids_u32 = token_ids.tobytes()
    error = await refusal(stub.TrainStep(iter(step_requests("bad-id", await version(stub), [bad])), timeout=TIMEOUT_S))
    assert isinstance(error, InvalidRequest)
    assert "'u0-s1'" in str(error)
    assert str(VOCAB) in str(error)


async def test_step_of_more_samples_than_an_iteration_is_refused(stub: Any) -> None:
    many = chunk(0, num_samples=17)
    error = await refusal(stub.TrainStep(iter(step_requests("many", await version(stub), [many])), timeout=TIMEOUT_S))
    assert isinstance(error, TooLarge)


async def test_cut_off_stream_is_refused(stub: Any) -> None:
    requests = step_requests("cut", await version(stub), [chunk(0), chunk(1)])
    error = await refusal(stub.TrainStep(iter(requests[:-1]), timeout=TIMEOUT_S))
    assert isinstance(error, InvalidRequest)
    assert "8" in str(error)


async def test_not_finite_step_names_samples_and_changes_nothing(stub: Any) -> None:
    now = await version(stub)
    before = await logprobs(stub)
    bad = chunk(1, advantages=[0.5, 3e38, 0.1, 0.2])
    error = await refusal(stub.TrainStep(iter(step_requests("nan", now, [chunk(0), bad])), timeout=TIMEOUT_S))
    assert error.reason == "NOT_FINITE"
    assert "u1-s1" in str(error)
    assert await version(stub) == now
    assert np.array_equal(await logprobs(stub), before)


async def logprobs(stub: Any) -> np.ndarray:
    call = stub.ComputeLogprobs(iter([pb.ComputeLogprobsRequest(chunk=chunk(0))]), timeout=TIMEOUT_S)
    return np.concatenate([np.array(read_array(reply, "logprobs_f32")) async for reply in call])


async def test_compute_logprobs_replies_in_order(stub: Any) -> None:
    batches = [chunk(i) for i in range(3)]
    call = stub.ComputeLogprobs(iter([pb.ComputeLogprobsRequest(chunk=b) for b in batches]), timeout=TIMEOUT_S)
    replies = [reply async for reply in call]
    lengths = [len(read_array(reply, "logprobs_f32")) for reply in replies]
    assert lengths == [sum(batch.completion_lengths) for batch in batches]
    assert all(0 <= value <= np.log(VOCAB) for reply in replies for value in read_array(reply, "entropies_f32"))


async def test_masked_tokens_are_not_measured_and_count_nowhere(stub: Any) -> None:
    batches = [chunk(0), chunk(1)]
    for batch in batches:  # the first token of each completion is the policy's
        batch.loss_mask_u8 = bytes(place == 0 for length in batch.completion_lengths for place in range(length))
    asked = [pb.ComputeLogprobsRequest(chunk=each) for each in (chunk(0), batches[0])]
    call = stub.ComputeLogprobs(iter(asked), timeout=TIMEOUT_S)
    whole, masked = [np.array(read_array(reply, "logprobs_f32")) async for reply in call]
    np.testing.assert_allclose(masked, whole * np.array(read_array(batches[0], "loss_mask_u8")), rtol=0, atol=1e-6)
    reply = await stub.TrainStep(iter(step_requests("masked", await version(stub), batches)), timeout=TIMEOUT_S)
    assert reply.metrics["tokens"] == reply.metrics["samples"] == 8
    nothing = chunk(0, loss_mask=[False] * sum(chunk(0).completion_lengths))
    error = await refusal(
        stub.TrainStep(iter(step_requests("none", await version(stub), [nothing])), timeout=TIMEOUT_S)
    )
    assert isinstance(error, InvalidRequest)
    assert "'u0-s0': loss_mask masks all of its" in str(error)


async def test_export_then_export_again(stub: Any, folder: Path) -> None:
    out = folder / "hf"
    for _ in range(2):
        reply = await stub.ExportModel(pb.ExportModelRequest(path=str(out)), timeout=TIMEOUT_S)
    assert reply.bytes == sum(file.stat().st_size for file in out.iterdir())
    # model.tokenizer_path's
    assert (out / "tokenizer.json").read_bytes() == (folder.parent / "tokenizer" / "tokenizer.json").read_bytes()
    assert "model.embed_tokens.weight" in load_file(out / "model.safetensors")


async def test_an_export_has_the_chat_template_of_the_run(
    stub: Any, folder: Path, shared_trainer: TrainerProcesses
) -> None:
    note_template(shared_trainer.run_dir, "mine")
    try:
        await write(stub, str(folder / "hf"), "ExportModel")
    finally:
        note_template(shared_trainer.run_dir, None)
    assert (folder / "hf" / "chat_template.jinja").read_text() == "mine"


async def test_an_export_that_cannot_be_written_is_an_error_of_the_call_only(
    stub: Any, folder: Path, tiny_model: Path
) -> None:
    """Only the rank that writes sees the model's files: the other one must not wait for it."""
    out, config = folder / "hf", tiny_model / "config.json"
    await write(stub, str(out), "ExportModel")
    kept, content = (out / "model.safetensors").read_bytes(), config.read_bytes()
    for damaged, says in {b"[]": "JSON list", b"{": "not valid JSON", b"": "not valid JSON"}.items():
        config.write_bytes(damaged)
        try:
            error = await refusal(write(stub, str(out), "ExportModel"))
        finally:
            config.write_bytes(content)
        assert error.reason == "INTERNAL"
        assert f"cannot write {out}: " in str(error)
        assert says in str(error)
    assert (out / "model.safetensors").read_bytes() == kept
    assert [path.name for path in folder.iterdir()] == ["hf"]
    await write(stub, str(out), "ExportModel")


def victim(folder: Path) -> Path:
    """What nobody may replace."""
    kept = folder / "sub" / "thesis.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("years of work")
    return kept


async def write(stub: Any, path: str, what: str) -> None:
    """Asks for a checkpoint or an export there."""
    request = getattr(pb, f"{what}Request")(path=path)
    await getattr(stub, what)(request, timeout=TIMEOUT_S)


@pytest.mark.parametrize("what", ["SaveCheckpoint", "ExportModel"])
async def test_only_what_we_have_written_below_the_runs_folder_is_replaced(
    stub: Any, folder: Path, tmp_path: Path, what: str
) -> None:
    outside, below, run = victim(tmp_path / "home"), victim(folder / "mine"), folder.parent
    (folder / "link").symlink_to(tmp_path)
    flat = folder / "flat"
    flat.mkdir()
    (flat / "data.txt").write_text("x")
    wrong = {
        str(tmp_path / "home"): "is not below",
        str(tmp_path / "new"): "is not below",
        str(folder / "link" / "new"): "is not below",
        f"{run}/../{tmp_path.name}-x": "is not below",
        str(run): "is not below",
        "/": "is not below",
        "here": "is not absolute",
        "": "is not absolute",
        str(folder / "mine"): "something else",
        str(flat): "something else",
        str(below / "x"): "is a file",
        str(folder / ("n" * 300)): "name",
    }
    for path, why in wrong.items():
        error = await refusal(write(stub, path, what))
        assert isinstance(error, InvalidRequest), path
        assert why in str(error), path
    assert outside.read_text() == below.read_text() == "years of work"
    assert (flat / "data.txt").exists()
    assert await version(stub) >= 0


async def test_what_is_no_checkpoint_of_this_run_is_refused_before_a_weight_changes(stub: Any, folder: Path) -> None:
    now, before, good = await version(stub), await logprobs(stub), folder / "good"
    await write(stub, str(good), "SaveCheckpoint")
    cut, lacking = shutil.copytree(good, folder / "cut"), shutil.copytree(good, folder / "lacking")
    shard = cut / "shard-tp01-pp00.safetensors"  # the rank that is not asked itself
    shard.write_bytes(shard.read_bytes()[:100])
    (lacking / "shard-tp01-pp00.safetensors").unlink()
    (folder / "empty").mkdir()
    for path in ("/nonexistent", folder / "none", folder / "empty", cut, lacking):
        request = pb.RestorePolicyRequest(path=str(path), policy_version=now + 1)
        error = await refusal(stub.RestorePolicy(request, timeout=TIMEOUT_S))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT, path
        assert str(path) in str(error)
    assert await version(stub) == now
    assert np.array_equal(await logprobs(stub), before)


async def test_a_restored_policy_is_the_saved_one_under_a_new_version(
    stub: Any, shared_trainer: TrainerProcesses, folder: Path
) -> None:
    saved_at, saved = await version(stub), folder / "checkpoint"
    await stub.SaveCheckpoint(pb.SaveCheckpointRequest(path=str(saved)), timeout=TIMEOUT_S)
    before = await shared_trainer.exported(stub, folder / "before")
    first = await stub.TrainStep(iter(step_requests("old", saved_at, [chunk(0)])), timeout=TIMEOUT_S)
    restore = pb.RestorePolicyRequest(path=str(saved), policy_version=saved_at + 5)
    for _ in range(2):
        assert (await stub.RestorePolicy(restore, timeout=TIMEOUT_S)).policy_version == saved_at + 5
    assert (
        await stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)
    ).step_id == ""  # of none that it stands after
    assert same(before, await shared_trainer.exported(stub, folder / "restored")) == []
    again = await stub.TrainStep(iter(step_requests("new", saved_at + 5, [chunk(0)])), timeout=TIMEOUT_S)
    assert again.policy_version == saved_at + 6
    assert exact(again.metrics) == exact(first.metrics)  # optimizer and step size too
    older = pb.RestorePolicyRequest(path=str(saved), policy_version=saved_at)
    assert isinstance(await refusal(stub.RestorePolicy(older, timeout=TIMEOUT_S)), InvalidRequest)


async def test_a_restored_initial_model_has_a_fresh_optimizer(stub: Any, tiny_model: Path, folder: Path) -> None:
    losses = []
    for attempt in range(2):
        at = await version(stub) + 2
        await stub.RestorePolicy(pb.RestorePolicyRequest(policy_version=at), timeout=TIMEOUT_S)
        assert same(load_file(tiny_model / "model.safetensors"), await initial(stub, folder / str(attempt))) == []
        for step in range(2):
            requests = step_requests(f"fresh-{attempt}-{step}", at + step, [chunk(0)])
            reply = await stub.TrainStep(iter(requests), timeout=TIMEOUT_S)
        losses.append(exact(reply.metrics))
    assert losses[0] == losses[1]


async def test_how_a_step_is_cut_into_chunks_changes_no_bit_of_it(stub: Any, tiny_model: Path, folder: Path) -> None:
    whole = [chunk(update, num_samples=8) for update in range(2)]
    done = []
    for name, chunks in {"whole": whole, "one-by-one": [one for each in whole for one in one_by_one(each)]}.items():
        at = await version(stub) + 2
        await stub.RestorePolicy(pb.RestorePolicyRequest(policy_version=at), timeout=TIMEOUT_S)
        reply = await stub.TrainStep(iter(step_requests(name, at, chunks)), timeout=TIMEOUT_S)
        done.append((dict(reply.metrics), await initial(stub, folder / name)))
    (metrics, weights), (again, other) = done
    assert metrics["samples"] == 16
    assert exact(metrics) == exact(again)
    assert same(weights, other) == []
    assert same(load_file(tiny_model / "model.safetensors"), weights) != []


async def initial(stub: Any, folder: Path) -> dict[str, Any]:
    """What the trainer exports, by Hugging Face name."""
    await stub.ExportModel(pb.ExportModelRequest(path=str(folder)), timeout=TIMEOUT_S)
    return dict(load_file(folder / "model.safetensors"))


async def test_published_weights_are_the_exported_ones(
    stub: Any, shared_trainer: TrainerProcesses, folder: Path
) -> None:
    tensors, reports = await asyncio.to_thread(shared_trainer.receive, Parallel(tensor=2))
    assert len(reports) == 2
    assert same(tensors, await shared_trainer.exported(stub, folder / "hf")) == []


async def test_round_of_another_version_is_refused(stub: Any, rounds: Any) -> None:
    round_ = a_round(policy_version=await version(stub) + 1)
    request = weights_pb2.RunPhaseRequest(phase=weights_pb2.ROUND_PHASE_PREPARE, round=round_)
    assert isinstance(await refusal(rounds.RunPhase(request, timeout=TIMEOUT_S)), WrongVersion)


def a_round(**fields: Any) -> weights_pb2.Round:
    """Of no members."""
    return weights_pb2.Round(
        **{"round_id": "other", "formation_timeout_s": 1, "transfer_timeout_s": 1} | fields  # type: ignore[arg-type]
    )


async def test_values_that_ended_the_trainer_are_refused_at_once(stub: Any, rounds: Any) -> None:
    now = await version(stub)
    many = weights_pb2.ReplicaSpec(name="rollout-0", parallel=weights_pb2.ParallelSizes(tensor=30_000_000))
    described = {
        "formation_timeout_s is inf": a_round(formation_timeout_s=math.inf),
        "transfer_timeout_s is nan": a_round(transfer_timeout_s=math.nan),
        "tensor is 30000000": a_round(policy_version=now, replicas=[many]),
        "round_id is ": a_round(round_id="../../x"),
    }
    for says, round_ in described.items():
        for phase in (weights_pb2.ROUND_PHASE_ABORT, weights_pb2.ROUND_PHASE_PREPARE):
            request = weights_pb2.RunPhaseRequest(phase=phase, round=round_)
            error = await refusal(rounds.RunPhase(request, timeout=5))
            assert isinstance(error, InvalidRequest)
            assert says in str(error)
    for number in (2**63, 2**64 - 1):
        restore = pb.RestorePolicyRequest(policy_version=number)
        assert isinstance(await refusal(stub.RestorePolicy(restore, timeout=5)), InvalidRequest)
    assert await version(stub) == now


def samples_at(address: str) -> dict[str, float]:
    """What is served to Prometheus, by name and labels."""
    with urlopen(f"http://{address}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))}


async def test_metrics_are_served(stub: Any, record: ServiceRecord) -> None:
    requests = step_requests("served", await version(stub), [chunk(0)])
    step = await stub.TrainStep(iter(requests), timeout=TIMEOUT_S)
    served = await asyncio.to_thread(samples_at, record.metrics_address)
    assert {name: served[series] for name, series in GAUGES.items()} == {name: step.metrics[name] for name in GAUGES}
    assert served["tandem_policy_version"] == step.policy_version
    for part, seconds in step.seconds.items():
        assert served[f'tandem_train_step_seconds_sum{{part="{part}"}}'] >= seconds
