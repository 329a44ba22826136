"""A model that the engine holds otherwise than its config.json says is refused by name, before a byte moves.

SGLang 0.5.23 gives every layer of a Qwen3-MoE model experts, whatever mlp_only_layers says. `tandem run` refuses such a
model before it starts anything (launcher/check/model/folder.py); this is the gate behind it.
"""

from pathlib import Path

import grpc
import pytest

from tests.kit.models import make_model
from tests.kit.processes import Services
from tests.kit.replicas import Replicas
from weightsync.layouts.layout import Parallel

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.timeout(900)]


def test_dense_layers_of_a_mixture_are_refused_in_prepare(services: Services, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe", mlp_only_layers=[1])
    replicas = Replicas(services, model, {"rollout-0": Parallel()})
    replicas.wait_up()
    replicas.poison()
    before = replicas.checksums()
    refused = r"rollout-0/0: the mapping rules do not fit this engine: no rule for \['model\.layers\.1\.mlp\.experts"
    with pytest.raises(grpc.RpcError, match=refused):
        replicas.sync(model, Parallel(), 1, formation_timeout_s=2.0)
    assert replicas.checksums() == before
