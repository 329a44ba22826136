"""gpu-check: what it chooses to run, what it says it skips, and its reference values."""

import torch

from tests.weight_stores import tiny_spec
from tools.gpu_check import cases, main, numbered
from weightsync.layout import Parallel
from weightsync.megatron_layout import megatron_layout
from weightsync.sglang_layout import sglang_layout


def test_one_gpu_runs_ipc_and_says_why_not_nccl() -> None:
    chosen, skipped = cases(1, (2, 29, 7), multi_rank=False)
    assert {case.transport for case in chosen} == {"colocated"}
    assert len(skipped) == 3
    assert all("2.29.7" in line and "NCCL_MULTI_RANK_GPU_ENABLE" in line for line in skipped)


def test_one_gpu_with_several_ranks_runs_both() -> None:
    chosen, skipped = cases(1, (2, 31), multi_rank=True)
    assert {case.transport for case in chosen} == {"collective", "colocated"}
    assert skipped == []
    assert all(case.num_gpus == 1 for case in chosen)


def test_as_many_gpus_as_ranks_take_one_each() -> None:
    chosen, skipped = cases(3, (2, 20), multi_rank=False)
    assert [case.num_gpus for case in chosen if case.transport == "collective"] == [2, 2, 3, 3]
    assert len(skipped) == 1
    assert "TP2 -> TP2" in skipped[0]


def test_reference_values_are_one_model_on_both_sides() -> None:
    spec = tiny_spec()
    trainer = numbered(megatron_layout(spec, Parallel()), 0)
    halves = [numbered(sglang_layout(spec, Parallel(tensor=2)), rank) for rank in range(2)]
    joined = torch.cat([half["model.layers.1.mlp.down_proj.weight"] for half in halves], dim=1)
    assert torch.equal(trainer["decoder.layers.1.mlp.linear_fc2.weight"], joined)
    assert not torch.equal(joined, trainer["decoder.layers.2.mlp.linear_fc2.weight"]) or joined.unique().numel() > 8


def test_without_a_gpu_it_says_what_it_skipped(monkeypatch, capsys) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr("sys.argv", ["gpu_check"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == 0
    assert "skipped everything" in capsys.readouterr().out
