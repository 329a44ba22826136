"""Offloaded memory with real ranks: every layout computes the same bits, memory is free between uses."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from servicekit.rpc.channel import open_channel
from tandem_api.trainer.v1 import trainer_pb2 as pb
from tandem_api.trainer.v1 import trainer_pb2_grpc
from tandem_api.weights.v1 import weights_pb2
from tests.integration.trainer.groups import Groups, parametrized
from tests.integration.trainer.layouts import LAYOUTS
from tests.integration.trainer.offload_worker import ALL
from tests.integration.trainer.processes import TrainerProcesses, chunk, step_requests
from tests.integration.trainer.reference import TIMEOUT_S, launch
from tests.kit.models import TRAINED_VOCABULARY, make_model, save_model
from tests.kit.stores import same
from weightsync.layouts.layout import Parallel

pytestmark = [pytest.mark.integration, pytest.mark.timeout(2 * TIMEOUT_S)]


class Case(NamedTuple):
    """A layout, and the type of its parameters."""

    layout: str
    dtype: str

    @property
    def name(self) -> str:
        return f"{self.layout}-{self.dtype}"


CASES = [
    Case("tp2", "float32"),
    Case("dp2-zero", "bfloat16"),
    Case("dp2-overlap", "float32"),
]
SLOW = [
    Case("dp2", "bfloat16"),
    Case("pp2", "float32"),
    Case("tp2", "bfloat16"),
    Case("dp2", "float32"),
    Case("pp2", "bfloat16"),
    Case("dp2-zero", "float32"),
    Case("dp2-overlap", "bfloat16"),
    Case("cp2-zero", "float32"),
]


def report(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
    return found


def run(folder: Path, size: int, cases: list[dict[str, Any]]) -> None:
    (folder / f"cases-{size}.json").write_text(json.dumps(cases))
    launch(size, folder, "tests.integration.trainer.offload_worker")


class Results:
    """What ranks report: a group of cases, when one of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, seed in (("policy", 0), ("other", 1)):
            save_model("qwen3", folder / name, seed=seed)
        self._groups = Groups(self._compute, CASES, SLOW)

    def of(self, case: Case) -> Path:
        """The folder of a case's reports."""
        self._groups.need(case)
        return self._folder / case.name

    def _compute(self, cases: list[Case]) -> None:
        models = {"model": str(self._folder / "policy"), "reference": str(self._folder / "other")}
        common = models | {"offload": ["nothing", "all"]}
        run(
            self._folder,
            2,
            [{"name": each.name, "layout": LAYOUTS[each.layout], "dtype": each.dtype} | common for each in cases],
        )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return Results(tmp_path_factory.mktemp("offload"))


@parametrized("case", CASES, SLOW)
def test_every_layout_computes_the_same_bits(results: Results, case: Case) -> None:
    for rank in range(2):
        without, offloaded = (report(results.of(case) / way, rank) for way in ("nothing", "all"))
        assert offloaded["given"] == without["given"]
        assert offloaded["checksums"] == without["checksums"]
        assert offloaded["held"] == 0 < without["held"]
        assert offloaded["used"] == without["held"] == without["used"]


def test_the_host_s_memory_is_given_back(tmp_path: Path) -> None:
    """13 M parameters: 52 MB of weights, as many of gradients, twice as many of moments; as many of the reference."""
    sizes: dict[str, Any] = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "vocab_size": TRAINED_VOCABULARY,
    }
    model = make_model(tmp_path / "model", **sizes)
    case = {"name": "large", "layout": {}, "dtype": "float32", "offload": ["all"]}
    run(tmp_path, 1, [case | {"model": str(model), "reference": str(model)}])
    found = report(tmp_path / "large" / "all", 0)
    used, resident = found["used"], found["resident"]
    assert used > 200e6
    assert resident["in_use"] - resident["last"] > 0.95 * used
    # nor does what a step remembers stay (as much as moments and weights), nor the reference
    assert resident["after"] - resident["idle"] < 0.2 * used
    assert list((tmp_path / "large" / "all").glob("tmp*")) == []


@pytest.fixture(scope="module")
def trainer(
    module_redis: str, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TrainerProcesses]:
    settings = {"tensor_parallel": 2, "offload": ALL}
    with TrainerProcesses(module_redis, tmp_path_factory.mktemp("trainer"), tiny_model, **settings) as processes:
        yield processes.begin()


@pytest.mark.parametrize("transport", ["COLOCATED", "COLLECTIVE"])
async def test_offloaded_weights_are_published(trainer: TrainerProcesses, transport: str) -> None:
    """Two rounds of each transport, with steps between them: memory is elsewhere each time."""
    chosen = weights_pb2.SyncTransport.Value(f"SYNC_TRANSPORT_{transport}")
    async with open_channel(trainer.ready().address) as channel:
        stub = trainer_pb2_grpc.TrainerServiceStub(channel)
        for number in range(2):
            status = await stub.GetStatus(pb.GetStatusRequest(), timeout=10)
            step = step_requests(f"{transport}-{number}", status.policy_version, [chunk(seed=number)])
            reply = await stub.TrainStep(iter(step), timeout=60)
            assert {"onload", "offload"} <= set(reply.seconds)
            received, reports = await asyncio.to_thread(trainer.receive, Parallel(tensor=2), chosen)
            assert same(received, await trainer.exported(stub, trainer.folder / f"hf-{transport}-{number}")) == []
            assert all(each.transport == transport.lower() for each in reports)
