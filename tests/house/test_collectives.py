"""Collectives of the trainer: a device's are for its work; what ranks do alone they agree on over gloo (agreement.py).

NCCL counts trainer.collective_timeout_s from when the first rank calls a collective, so none may wait for a rank that
reads, writes, measures or takes memory: `RankAgreement.meet` comes between.
"""

import ast
from collections import Counter

import pytest

from tests.house.repository import calls, name_of, parse, python_files

COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("all_gather_coalesced", "all_gather_object", "all_reduce_coalesced", "batch_isend_irecv", "gather_object"),
    *("broadcast_object_list", "recv_object_list", "reduce_scatter_tensor", "scatter_object_list", "send_object_list"),
    *("gather", "irecv", "isend", "monitored_barrier", "recv", "reduce", "reduce_scatter", "scatter", "send"),
}
NAMES = {f"{module}.{name}" for module in ("dist", "distributed") for name in COLLECTIVES}
# All of whose collectives are over a group that they are given, of gloo.
OVER_GLOO = {
    "trainer_service/measure/meter.py",
    "trainer_service/step/agreement.py",
    "trainer_service/ranks/commands.py",
    "trainer_service/worker.py",
    "weightsync/transfer/hf_files.py",
}
# Collectives of the device's work, by file: after a step's `meet` each rank does what the others do.
OF_DEVICES = {
    "trainer_service/megatron_engine/cpu_shim.py": 2,
    "trainer_service/megatron_engine/head/logprobs.py": 2,
    "trainer_service/megatron_engine/zero.py": 2,
    "trainer_service/step/runner.py": 5,
    "trainer_service/step/token_loss.py": 2,
}


def collectives(tree: ast.Module) -> list[ast.Call]:
    """torch.distributed's, called or passed on to be called."""
    found = []
    for _, call in calls(tree):
        named = [call.func, *call.args]
        if any(ast.unparse(each).removeprefix("torch.") in NAMES for each in named):
            found.append(call)
    return found


def test_every_collective_is_known() -> None:
    files = {name_of(path): parse(path) for path in python_files("trainer_service", "weightsync")}
    found = Counter({name: len(collectives(tree)) for name, tree in files.items() if name not in OVER_GLOO})
    assert +found == Counter(OF_DEVICES), "after work of each rank's own use RankAgreement; else count it here"


@pytest.mark.parametrize("name", sorted(OVER_GLOO))
def test_what_ranks_agree_on_is_over_gloo(name: str) -> None:
    (path,) = [path for path in python_files(name.partition("/")[0]) if name_of(path) == name]
    found = [call for call in collectives(parse(path)) if not ast.unparse(call).startswith("self._begin(")]
    assert found
    groups = {ast.unparse(each.value) for call in found for each in call.keywords if each.arg == "group"}
    assert groups <= {"self.group", "self._group", "group"}
    assert [call.lineno for call in found if "group" not in {each.arg for each in call.keywords}] == []


def test_a_collective_is_recognised() -> None:
    lines = ["dist.all_reduce(x)", "begin(dist.isend, x)", "dist.get_rank()", "send(x)"]
    lines += ["torch.distributed.all_reduce(x)", "dist.all_gather_object(found, x)"]
    assert [call.lineno for call in collectives(ast.parse("\n".join(lines)))] == [1, 2, 5, 6]
