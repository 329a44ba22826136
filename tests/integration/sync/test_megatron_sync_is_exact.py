"""As test_sync_is_exact.py, with the real Megatron trainer.

The exported folder is also compared with the one that was imported: HF -> Megatron -> HF is the identity.
"""

from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file

from tandem_api.trainer.v1 import trainer_pb2, trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from tests.kit.models import save_model
from tests.kit.processes import Services
from tests.kit.replicas import Replicas, configuration
from tests.kit.round import CALL_S, run_round, service_at
from tests.kit.stores import same
from weightsync.layouts.layout import Parallel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2-pp2": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp4": {"tensor_parallel": 4},  # twice as many ranks as KV heads
    "pp2": {"pipeline_parallel": 2},
    "pp2-vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "dp2": {"data_parallel": 2},
    "tp2-ep2": {"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True},
    "dp2-ep2": {"data_parallel": 2, "expert_parallel": 2},
}
DENSE = ["tp2-pp2", "tp1", "tp2", "pp2", "pp2-vpp2", "dp2"]
EXPERTS = ["tp2-ep2", "dp2-ep2", "pp2-vpp2"]
FRESH_VERSION = 0  # every trainer here has just been started
BOTH = {"rollout-0": Parallel(), "rollout-1": Parallel(tensor=2)}
SLOW_KINDS = dict.fromkeys(("qwen2-tied", "qwen3", "llama-tied"), DENSE) | {
    "qwen3-moe": EXPERTS,
    "qwen2-kv1": ["tp2"],
    "qwen2": [*DENSE, "tp4"],
}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        pytest.param("qwen3", ["tp2-pp2"], id="qwen3-tp2-pp2"),
        *[pytest.param(kind, layouts, marks=pytest.mark.slow, id=kind) for kind, layouts in SLOW_KINDS.items()],
    ],
)
def test_sync_writes_what_sglang_would_load(kind: str, layouts: list[str], services: Services, tmp_path: Path) -> None:
    model = tmp_path / "model"
    save_model(kind, model)
    replicas = Replicas(services, model, BOTH)
    for name in layouts:
        sync_from(name, services, replicas, "float32", services.folder / "run" / f"hf-{name}")


@pytest.mark.slow
def test_a_bfloat16_trainer_sends_the_bytes_that_it_trains_with(services: Services, tmp_path: Path) -> None:
    """And not those of its optimizer's float32 masters."""
    model = tmp_path / "model"
    save_model("qwen3", model)
    replicas = Replicas(services, model, BOTH, "bfloat16")
    received = sync_from("tp2-pp2", services, replicas, "bfloat16", services.folder / "run" / "hf")
    assert {checksum.partition(":")[0] for each in replicas.checksums().values() for checksum in each.values()} == {
        "bfloat16"
    }
    weights = load_file(model / "model.safetensors").values()
    assert received[0].shard_bytes == 2 * sum(tensor.numel() for tensor in weights)


def sync_from(
    layout: str, services: Services, replicas: Replicas, dtype: str, exported: Path
) -> list[weights_pb2.PhaseReport]:
    """A trainer of this layout from its start to its end, and a round that is compared with SGLang's own loader.

    Returns: TRANSFER's reports of the receivers.
    """
    processes = services.start_trainer(configuration(replicas.model, services.run_id, dtype, trainer=LAYOUTS[layout]))
    replicas.wait_up()
    with grpc.insecure_channel(services.address_of("trainer", "trainer")) as channel:
        trainer = trainer_pb2_grpc.TrainerServiceStub(channel)
        trainer.ExportModel(trainer_pb2.ExportModelRequest(path=str(exported)), timeout=CALL_S)
        imported = load_file(replicas.model / "model.safetensors")
        cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in imported.items()}
        assert same(load_file(exported / "model.safetensors"), cast) == []
        truth = replicas.truth(exported)
        replicas.poison()
        round_ = replicas.round(FRESH_VERSION, sizes(LAYOUTS[layout]))
        received = replicas.received(run_round({"trainer": service_at(channel), **replicas.participants}, round_))
    assert replicas.checksums() == truth
    assert [report.bytes_received for report in received] == [report.shard_bytes for report in received]
    assert services.stop(processes) == [0] * len(processes)
    return received


def sizes(trainer: dict[str, int]) -> Parallel:
    """The layout that a trainer section asks for; sequence parallelism splits no weights."""
    kept: dict[str, Any] = {
        key.removesuffix("_parallel"): n for key, n in trainer.items() if key != "sequence_parallel"
    }
    return Parallel(**kept)
