"""gpu-check: what it chooses to run, what it says it skips, and its reference values."""

import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from servicekit.cuda import Compilers, Gpus
from tests.kit.stores import tiny_spec
from tools.gpu_check import attention
from tools.gpu_check.__main__ import check_services, main, summary, with_copy_share
from tools.gpu_check.cases import cases
from tools.gpu_check.services.findings import Findings
from tools.gpu_check.weights import numbered
from trainer_service.megatron_engine.attention import core
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import megatron_layout
from weightsync.layouts.sglang import sglang_layout


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
    assert [case.num_gpus for case in chosen if case.transport == "collective"] == [2, 2, 2, 3, 3]
    assert len(skipped) == 2
    assert "TP2 -> TP2" in skipped[0]
    assert "colocated between GPUs" in skipped[1]


def test_every_way_runs_in_both_install_modes() -> None:
    chosen, _ = cases(4, (2, 31), multi_rank=False)
    assert {(case.transport, case.install) for case in chosen} == {
        (transport, install) for transport in ("collective", "colocated") for install in ("in_place", "staged")
    }


@pytest.mark.parametrize(("gpus", "share"), [(1, 0.5), (2, 0.8)])
def test_speeds_stand_beside_the_devices_own_copy(gpus: int, share: float) -> None:
    measured = {"exact": True, "gb_per_s": 40.0, "gpus": gpus, "seconds": {"total": 0.0101}, "segments_per_s": 5.0}
    result = with_copy_share(measured, {"same_device": 80.0, "between_devices": 50.0})
    assert result["share_of_copy"] == share
    assert summary(result) == f"exact, 40.0 GB/s, {share:.2f} of the device's copy, 5 segments/s, round 10.1 ms"
    assert with_copy_share({"exact": False, "error": "no"}, {}) == {"exact": False, "error": "no"}


def test_reference_values_are_one_model_on_both_sides() -> None:
    spec = tiny_spec()
    trainer = numbered(megatron_layout(spec, Parallel()), 0)
    halves = [numbered(sglang_layout(spec, Parallel(tensor=2)), rank) for rank in range(2)]
    joined = torch.cat([half["model.layers.1.mlp.down_proj.weight"] for half in halves], dim=1)
    assert torch.equal(trainer["decoder.layers.1.mlp.linear_fc2.weight"], joined)
    assert not torch.equal(joined, trainer["decoder.layers.2.mlp.linear_fc2.weight"])
    flat = joined.flatten()
    assert bool((flat[1:] != flat[:-1]).all())  # a shift by one element would be seen


@pytest.mark.parametrize("case", attention.CASES, ids=lambda case: case.name)
def test_attention_is_compared_with_a_dense_mask(
    case: attention.AttentionCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, figures = attention.compare(case, "cpu")
    assert wrong == []
    assert figures["kernel"] is False
    # of fewer queries than keys the first query is that of the first key, as in another library's causal mask
    monkeypatch.setattr(core, "_causal_after", lambda queries, keys, _: torch.ones(queries, keys).tril().bool())
    wrong, _ = attention.compare(case, "cpu")
    assert len(wrong) == (0 if case.name == "whole sequences" else 4)


@pytest.mark.parametrize(("options", "status"), [([], 2), (["--allow-skip"], 0)])
def test_without_a_gpu_nothing_ran_and_that_is_no_success(
    options: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_check", *options])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main() == status
    assert "skipped everything" in capsys.readouterr().out


def test_what_was_found_before_an_interruption_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lease of a GPU ends, or a kernel does not run: the rest is found all the same."""

    def interrupted(options: Namespace, report: dict[str, Any]) -> None:
        report["cases"].append({"name": "first", "exact": True})
        raise KeyboardInterrupt

    def unloadable(case: attention.AttentionCase, device: str) -> None:
        raise RuntimeError("cuDNN version incompatibility")

    monkeypatch.setattr(
        "sys.argv", ["gpu_check", "--device", "cpu", "--parts", "attention", "speed", "--out", str(tmp_path)]
    )
    monkeypatch.setattr("tools.gpu_check.__main__.check_speed", interrupted)
    monkeypatch.setattr(attention, "compare", unloadable)
    monkeypatch.setattr(attention, "ProcessPoolExecutor", lambda workers, mp_context: ThreadPoolExecutor(workers))
    with pytest.raises(KeyboardInterrupt):
        main()
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert report["cases"] == [{"name": "first", "exact": True}]
    assert [check["wrong"] for check in report["attention"]] == [["RuntimeError: cuDNN version incompatibility"]] * 4


def test_real_services_fail_by_the_reason_for_which_no_run_uses_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Compilers(toolkit=None, missing=("nvcc", "ninja"))
    monkeypatch.setattr("tools.gpu_check.__main__.compilers_here", lambda: found)
    monkeypatch.setattr("tools.gpu_check.__main__.find_gpus", lambda: Gpus(present=4, why_not="no kernels"))
    findings = Findings()
    check_services(Namespace(device="cuda", fleets=None), [], findings)
    (check,) = findings.checks
    assert (check["name"], check["passed"], check["wrong"]) == (
        "environment",
        False,
        ["no kernels", "nvcc not found", "ninja not found"],
    )
