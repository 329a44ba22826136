"""The memory budget against figures that real Megatron gave under fake tensors, and what `tandem check` says of it."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from launcher.check import memory as preflight_memory
from launcher.check.memory import check_memory, gpu_memory_gib, host_memory, host_problems
from launcher.check.memory_budget import DTYPE_BYTES, rollout_memory, trainer_memory
from launcher.cli import app
from servicekit.cuda import Gpus
from tandem_config.loading import load_config
from tandem_config.schema import RunConfig
from tests.house.repository import REPO
from tests.kit.folders import write_config
from tests.unit.trainer.test_shared_prompts import grouped
from trainer_service.micro_batches.chunks import CHUNK_BYTES
from trainer_service.micro_batches.packed import context_share, pack
from trainer_service.micro_batches.plan import RankShare, plan_step
from trainer_service.step.token_loss import TokenState
from weightsync.layouts.layout import Parallel
from weightsync.layouts.megatron import padded_vocabulary
from weightsync.model.spec import ModelSpec, preset

GB = 1e9
# The model of each overlay with GPUs; the folder that it names is the cluster's.
OVERLAYS = {"single-node-gpu": "qwen2.5-1.5b", "cluster": "qwen2.5-7b"}


def overlay(name: str, *overrides: str) -> RunConfig:
    return load_config(REPO / "deploy" / "overlays" / name / "run.yaml", overrides)


def with_all_logits(config: RunConfig, spec: ModelSpec, share: float) -> int:
    """Bytes at the peak of a forward pass with all logits together, and four float32 copies of the completions' part.

    The figures below were taken of such a one, whose rows were padded and shared their cosines and sines, which each
    layer kept; what is kept besides has not changed.
    """
    (memory,) = trainer_memory(config, spec, completion_share=share)
    trainer = config.trainer
    tokens = trainer.max_tokens_per_micro_batch // trainer.context_parallel
    columns = padded_vocabulary(spec, trainer.tensor_parallel) // trainer.tensor_parallel
    longest = config.data.max_prompt_tokens + config.grpo.max_new_tokens
    width = DTYPE_BYTES[config.model.dtype]
    cosines = spec.num_layers * spec.head_dim * (4 * width * tokens - 8 * (tokens - longest))
    cosines -= tokens * spec.head_dim * 4  # of all layers together, as they are now
    return memory.resident + memory.activations + cosines + 4 * columns * (tokens + 4 * int(tokens * share))


# GB at the forward's peak by the accounting of a review: storages of fake CUDA tensors of the real engine, in which
# 7 of 8 tokens had a loss.
@pytest.mark.parametrize(
    ("name", "tokens", "peak"), [("cluster", 16384, 73.6), ("cluster", 8192, 54.0), ("single-node-gpu", 16384, 62.0)]
)
def test_the_arithmetic_gives_what_fake_tensors_gave(name: str, tokens: int, peak: float) -> None:
    config = overlay(name, f"trainer.max_tokens_per_micro_batch={tokens}")
    assert with_all_logits(config, preset(OVERLAYS[name]), 7 / 8) / GB == pytest.approx(peak, rel=0.01)


# Bytes when the engine is made and at the forward's peak, of three layers, 8,192 tokens and rows of 1,024 on the real
# engine's fake CUDA tensors (tests/cuda/test_memory_budget.py): prompts, an eighth, are all on the first rank.
@pytest.mark.parametrize(
    ("model", "settings", "resident", "peak"),
    [
        ("qwen2.5-7b", {"trainer.sequence_parallel": "true"}, 16_102_771_460, 18_574_001_156),
        (
            "qwen3-8b",
            {"trainer.sequence_parallel": "false", "model.dtype": "float32"},
            14_489_637_124,
            20_082_960_924,
        ),
    ],
)
def test_context_parallel_attention_keeps_all_ranks_keys_and_without_a_kernel_scores(
    model: str, settings: dict[str, str], resident: int, peak: int
) -> None:
    sizes = {"trainer.tensor_parallel": 2, "trainer.data_parallel": 1, "trainer.context_parallel": 2}
    sizes |= {"trainer.max_tokens_per_micro_batch": 8192, "data.max_prompt_tokens": 128, "grpo.max_new_tokens": 896}
    config = overlay("cluster", *(f"{name}={value}" for name, value in (sizes | settings).items()))
    spec = replace(preset("qwen2.5-7b"), num_layers=3)
    if model == "qwen3-8b":
        # of its attention; the rest is the other's
        spec = replace(spec, qk_norm=True, qkv_bias=False, num_heads=32, num_kv_heads=8, head_dim=128)
    (memory,) = trainer_memory(config, spec, completion_share=3 / 4)
    assert memory.resident == pytest.approx(resident, rel=1e-6)
    assert memory.forward == pytest.approx(peak, rel=1e-3)


@pytest.mark.parametrize(("context", "share"), [(1, False), (1, True), (2, False), (2, True)])
def test_copies_are_of_the_keys_that_a_row_attends_to(context: int, share: bool) -> None:
    multiple = 2 * context if context > 1 else 1
    whole = pack(grouped(3, [201] * 4, 160), np.arange(12), share_prompts=share, sequence_multiple=multiple)
    row = context_share(whole, 0, context) if context > 1 else whole
    tokens = whole.input_ids.size
    config = overlay(
        "cluster", "data.max_prompt_tokens=160", "grpo.max_new_tokens=200", "grpo.group_size=4",
        f"trainer.max_tokens_per_micro_batch={tokens}", f"trainer.share_prompts={str(share).lower()}",
        f"trainer.context_parallel={context}",
    )  # fmt: skip
    (memory,) = trainer_memory(config, preset("qwen2.5-7b"))
    # keys and values, and gradients of the copies and of the row; tensor_parallel: 4
    expected = 0 if row.keys is None else 2 * (2 * row.keys.size + tokens) * 512 // 4 * 2
    assert memory.copies == pytest.approx(expected, rel=1e-3)


def test_two_layers_are_right_to_a_thousandth() -> None:
    """RESIDENT and PEAK of the same accounting, run on two layers of the cluster's model."""
    spec = preset("qwen2.5-7b")
    two = type(spec)(**{**vars(spec), "num_layers": 2})
    (memory,) = trainer_memory(overlay("cluster"), two, completion_share=7 / 8)
    assert memory.resident == pytest.approx(7_002_754_820, rel=1e-6)
    assert with_all_logits(overlay("cluster"), two, 7 / 8) == pytest.approx(20_392_781_668, rel=1e-3)


def test_the_output_layer_holds_two_chunks_and_then_the_gradient_of_its_weight() -> None:
    few, many = (overlay("cluster", f"trainer.max_tokens_per_micro_batch={tokens}") for tokens in (16384, 32768))
    (small,), (large,) = (trainer_memory(config, preset("qwen2.5-7b")) for config in (few, many))
    hidden = 16384 * 3584 * 2
    assert small.logits - hidden == pytest.approx(2 * CHUNK_BYTES, rel=0.1)
    assert large.logits - small.logits == pytest.approx(hidden, rel=0.1)  # not with the vocabulary
    wide = overlay("cluster", "model.dtype=float32", "trainer.tensor_parallel=1", "trainer.sequence_parallel=false")
    (alone,) = trainer_memory(wide, preset("qwen2.5-7b"))
    assert alone.head_backward > 152064 * 3584 * 4 > alone.logits
    assert alone.head_backward - 4 * hidden == pytest.approx(152064 * 3584 * 4 + CHUNK_BYTES, rel=0.01)


@pytest.mark.parametrize(("name", "trainer", "rollout"), [("single-node-gpu", 38.3, 66.0), ("cluster", 59.7, 65.5)])
def test_each_overlay_fits_gpus_of_80_gib(name: str, trainer: float, rollout: float) -> None:
    report = check_memory(overlay(name), preset(OVERLAYS[name]), 80)
    assert report.problems == ()
    assert f"trainer rank: {trainer} GiB of 80 in the output layer's backward pass" in report.lines[0]
    assert f"rollout rank: {rollout} GiB of 80" in report.lines[1]
    assert "GiB CUDA graphs" in report.lines[1]


def test_every_overlay_with_gpus_has_a_figure() -> None:
    folders = {path.parent.name for path in (REPO / "deploy" / "overlays").glob("*/run.yaml")}
    assert folders - set(OVERLAYS) == {"dev-cpu"}


PROBLEMS: list[tuple[dict[str, Any], str, str, str]] = [
    (
        {"trainer.tensor_parallel": 1, "trainer.sequence_parallel": "false"},
        "trainer.tensor_parallel",
        "error",
        "raise trainer.tensor_parallel",
    ),
    (
        {"trainer.max_tokens_per_micro_batch": 32768},
        "trainer.max_tokens_per_micro_batch",
        "error",
        "set trainer.max_tokens_per_micro_batch: 16384",
    ),
    ({"trainer.max_tokens_per_micro_batch": 24576}, "trainer.max_tokens_per_micro_batch", "warning", "12288"),
    ({"rollout.mem_fraction_static": 0.1}, "rollout.tensor_parallel", "error", "rollout.mem_fraction_static"),
    (
        {"rollout.mem_fraction_static": 0.4, "rollout.max_total_tokens": 524288},
        "rollout.max_total_tokens",
        "warning",
        "lower it",
    ),
    (
        {"rollout.mem_fraction_static": 0.19, "grpo.max_new_tokens": 31000},
        "rollout.max_total_tokens",
        "warning",
        "lengths",
    ),
    ({"rollout.mem_fraction_static": 0.92}, "rollout.mem_fraction_static", "warning", "max_total_tokens"),
    (
        {"sync.install": "staged", "rollout.mem_fraction_static": 0.9, "rollout.max_total_tokens": 1048576},
        "rollout.mem_fraction_static",
        "error",
        "sync.install: in_place",
    ),
]


@pytest.mark.parametrize(("changes", "key", "severity", "advice"), PROBLEMS)
def test_what_does_not_fit_is_named_with_what_to_change(
    changes: dict[str, Any], key: str, severity: str, advice: str
) -> None:
    config = overlay("cluster", *(f"{name}={value}" for name, value in changes.items()))
    (problem,) = check_memory(config, preset("qwen2.5-7b"), 80).problems
    assert (problem.key, problem.severity) == (key, severity)
    assert advice in problem.suggestion


def test_recompute_leaves_the_inputs_of_layers() -> None:
    spec, config = preset("qwen2.5-7b"), overlay("cluster")
    (kept,) = trainer_memory(config, spec)
    (full,) = trainer_memory(overlay("cluster", "trainer.recompute=full"), spec)
    (half,) = trainer_memory(overlay("cluster", "trainer.recompute=full", "trainer.recompute_layers=14"), spec)
    modules = ("trainer.recompute=selective", "trainer.recompute_modules=[core_attn, mlp]")
    (parts,) = trainer_memory(overlay("cluster", *modules), spec)
    tokens, hidden, ffn = 16384, 3584, 18944
    # tensor_parallel: 4; rotated queries and keys, and a log-sum per head
    of_mlp, of_core = 5 * tokens * ffn // 4 * 2, tokens * ((28 + 4) // 4 * 128 * 2 + 28 // 4 * 4)
    assert kept.activations - parts.activations == 28 * parts.recomputed == 28 * (of_mlp + of_core)
    shared = tokens * hidden * 2 + 2 * tokens // 4 * hidden * 2  # beside the layers: gathered, and the final norm's
    shared += tokens * 128 * 4  # cosines and sines
    assert full.activations - shared == 28 * tokens // 4 * hidden * 2  # sequence_parallel
    assert half.activations - full.activations == (kept.activations - full.activations) // 2
    assert full.recomputed == (kept.activations - shared) // 28
    assert kept.recomputed == 0
    assert full.peak < kept.peak


def test_zero_divides_the_optimizer_s_state() -> None:
    spec = preset("qwen2.5-7b")
    copies = ("trainer.data_parallel=2", "trainer.context_parallel=2")
    (whole,) = trainer_memory(overlay("cluster", *copies), spec)
    (part,) = trainer_memory(overlay("cluster", *copies, "trainer.distributed_optimizer=true"), spec)
    elements = whole.resident // (2 + 4 + 12)
    assert part.resident == pytest.approx(elements * (2 + 4 + 12 / 4), rel=1e-9)
    assert (part.activations, part.reference) == (whole.activations, whole.reference)
    # experts are on eight of the sixteen ranks each, so two have the same ones
    sizes = ("trainer.tensor_parallel=4", "trainer.data_parallel=4", "trainer.expert_parallel=8")
    moe = preset("qwen3-30b-a3b")
    (of_all,) = trainer_memory(overlay("cluster", *sizes), moe)
    (of_parts,) = trainer_memory(overlay("cluster", *sizes, "trainer.distributed_optimizer=true"), moe)
    masters_and_moments = [stage.resident - sum(stage.saved) // 14 * 6 for stage in (of_all, of_parts)]
    assert masters_and_moments[0] / 4 < masters_and_moments[1] < masters_and_moments[0] / 2


def test_zero_is_the_advice_where_the_optimizer_does_not_fit() -> None:
    changes = ("trainer.tensor_parallel=1", "trainer.sequence_parallel=false", "trainer.data_parallel=16")
    config = overlay("cluster", *changes, "trainer.max_tokens_per_micro_batch=1024")
    (problem,) = check_memory(config, preset("qwen2.5-7b"), 80).problems
    assert problem.key == "trainer.tensor_parallel"
    assert "set trainer.distributed_optimizer: true, or raise trainer.tensor_parallel" in problem.suggestion


def test_recompute_is_the_advice_where_activations_do_not_fit() -> None:
    config = overlay("cluster", "trainer.max_tokens_per_micro_batch=49152")
    (problem,) = check_memory(config, preset("qwen2.5-7b"), 80).problems
    assert "trainer.recompute: full" in problem.suggestion
    recomputing = overlay("cluster", "trainer.max_tokens_per_micro_batch=49152", "trainer.recompute=full")
    assert check_memory(recomputing, preset("qwen2.5-7b"), 80).problems == ()


def test_pipeline_stages_hold_their_share() -> None:
    config = overlay("cluster", "trainer.pipeline_parallel=4", "trainer.tensor_parallel=2")
    stages = trainer_memory(config, preset("qwen2.5-7b"))
    assert [stage.logits > 0 for stage in stages] == [False, False, False, True]
    # the first has four micro-batches under way, the last one
    assert stages[0].activations > 3.5 * stages[3].activations
    assert stages[1].resident < stages[0].resident


def test_experts_and_the_spare_copy_count() -> None:
    spec = preset("qwen3-30b-a3b")
    alone = trainer_memory(overlay("cluster"), spec)[0]
    shared = trainer_memory(overlay("cluster", "trainer.expert_parallel=8"), spec)[0]
    assert shared.resident < alone.resident / 4
    rollout = rollout_memory(overlay("cluster", "sync.install=staged"), spec)
    assert rollout.spare == rollout.weights > 2 * 30e9


def invoke(file: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["check", "-c", str(file), *options])
    return result.exit_code, result.output


def test_check_prints_it_when_asked(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    assert "GiB" not in invoke(file)[1]
    code, output = invoke(file, "--gpu-memory-gib", "80")
    assert code == 0
    assert "trainer rank: " in output
    assert "rollout rank: " in output


def test_check_refuses_what_does_not_fit(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    tokens = "trainer.max_tokens_per_micro_batch=100000000"
    code, output = invoke(file, "--gpu-memory-gib", "4", "--set", tokens)
    assert code == 2
    assert "trainer.max_tokens_per_micro_batch = 100000000" in output
    assert "--set" in output


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-3", "much"])
def test_absurd_sizes_are_usage_errors(tmp_path: Path, value: str) -> None:
    assert invoke(write_config(tmp_path), f"--gpu-memory-gib={value}")[0] == 2


@pytest.mark.parametrize(("answer", "found"), [("81559\n81559\n40960\n", 40.0), ("[N/A]\n", None), ("", None)])
def test_the_smallest_gpu_counts(monkeypatch: pytest.MonkeyPatch, answer: str, found: float | None) -> None:
    gpus = Gpus(usable=tuple(str(index) for index in range(32)), present=32)
    monkeypatch.setattr(preflight_memory, "find_gpus", lambda: gpus)
    done = subprocess.CompletedProcess(["nvidia-smi"], 0, stdout=answer, stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    assert gpu_memory_gib(overlay("cluster")) == found


def test_no_gpus_no_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_memory, "find_gpus", lambda: Gpus(usable=("0",), present=1))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked nvidia-smi"))
    assert gpu_memory_gib(overlay("cluster")) is None


@pytest.mark.parametrize(
    ("states", "idle", "host"),
    [
        ((), 18, 12),
        (("parameters",), 16, 14),
        (("gradients",), 14, 12),
        (("optimizer",), 6, 24),
        (("parameters", "gradients", "optimizer"), 0, 26),
    ],
)
def test_offloaded_bytes_of_a_parameter(states: tuple[str, ...], idle: int, host: int) -> None:
    """Of 2 bytes of weight, 4 of gradient, 4 of master, 8 of moments; a step of several updates remembers 12."""
    offload = ", ".join(f"{name}: true" for name in states)
    config = overlay("single-node-gpu", f"trainer.offload={{{offload}}}")
    (found,) = trainer_memory(config, preset("qwen2.5-1.5b"))
    parameters = found.resident / 18
    assert (found.idle, found.host) == (idle * parameters, host * parameters)
    (once,) = trainer_memory(config.model_copy(update={"grpo": one_update(config)}), preset("qwen2.5-1.5b"))
    assert once.host == (host - 12) * parameters


def one_update(config: RunConfig) -> Any:
    return config.grpo.model_copy(update={"updates_per_iteration": 1})


def test_the_check_says_what_is_left_and_what_the_host_holds() -> None:
    spec = preset("qwen2.5-1.5b")
    plain, offloaded = (
        check_memory(overlay("single-node-gpu", f"trainer.offload={offload}"), spec, 80).lines
        for offload in ("{}", "{optimizer: true}")
    )
    assert "between uses" not in plain[0]
    assert offloaded[0].endswith("; between uses 4.3 GiB")
    # 12 bytes per parameter to undo a step, and 14 of each in a checkpoint; 4 GiB of a process, and an export of 2
    assert plain[2] == (
        "trainer host: 48.3 GiB of host memory for 2 ranks (8.6 GiB of each page-locked, 10.1 GiB for a checkpoint of "
        "each that writes)"
    )
    assert offloaded[2].startswith("trainer host: 65.5 GiB of host memory for 2 ranks (17.3 GiB of each page-locked")


def test_the_fullest_host_is_the_one_whose_ranks_write() -> None:
    spec, config = preset("qwen2.5-7b"), overlay("cluster")
    (stage,) = trainer_memory(config, spec)
    process, export = 4 * 2**30, spec.num_elements * 2
    whole, of_data_rank_0 = host_memory(config, spec, 8), host_memory(config, spec, 4)
    assert whole == 8 * (process + stage.host) + 4 * sum(stage.saved) + export
    assert of_data_rank_0 == 4 * (process + stage.host + sum(stage.saved)) + export
    # of a mixture, other ranks write the experts than the rest
    moe = preset("qwen3-30b-a3b")
    config = overlay("cluster", "trainer.tensor_parallel=2", "trainer.data_parallel=4", "trainer.expert_parallel=8")
    (stage,) = trainer_memory(config, moe)
    saved = 8 * stage.saved[0] + 2 * stage.saved[1]
    assert saved == pytest.approx(14 * moe.num_elements, rel=0.01)
    assert host_memory(config, moe, 8) == 8 * (process + stage.host) + saved + moe.num_elements * 2


@pytest.mark.parametrize(
    ("refresh", "optimizer", "width"), [(None, True, 14), (8, True, 16), (8, False, 4), (None, False, 2)]
)
def test_the_copy_of_a_checkpoint_is_what_is_written(refresh: int | None, optimizer: bool, width: int) -> None:
    settings = [f"trainer.checkpoint_optimizer={str(optimizer).lower()}", "grpo.kl_coefficient=0.1"]
    settings += [f"grpo.reference_refresh_every={refresh}"] if refresh else []
    (stage,) = trainer_memory(overlay("cluster", *settings), preset("qwen2.5-7b"))
    assert sum(stage.saved) == stage.resident // 18 * width


@pytest.mark.parametrize(("gib", "severity"), [(200.0, ["error"]), (320.0, ["warning"]), (512.0, [])])
def test_a_host_with_too_little_memory_is_named(gib: float, severity: list[str]) -> None:
    found = list(host_problems(overlay("cluster"), preset("qwen2.5-7b"), 8, gib, "this machine"))
    assert [problem.severity for problem in found] == severity
    for problem in found:
        assert f"8 ranks on a host take 315.7 GiB of host memory, this machine has {gib:g}" in problem.message
        assert problem.suggestion.startswith("trainer.distributed_optimizer: true, or grpo.updates_per_iteration: 1")


@pytest.mark.parametrize(
    ("updates", "epochs", "advice"),
    [
        (4, 2, "grpo.updates_per_iteration: 1 and grpo.epochs: 1, or more memory"),
        (1, 2, "grpo.epochs: 1, or more memory"),
        (1, 1, "more memory"),
    ],
)
def test_what_undoes_a_step_is_avoided_with_one_update(updates: int, epochs: int, advice: str) -> None:
    settings = (f"grpo.updates_per_iteration={updates}", f"grpo.epochs={epochs}", "trainer.data_parallel=1")
    (problem,) = host_problems(overlay("cluster", *settings), preset("qwen2.5-7b"), 4, 100, "this machine")
    assert problem.suggestion == advice


def test_the_check_compares_with_the_host_that_has_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_config(tmp_path)
    monkeypatch.setattr(preflight_memory, "host_gib", lambda: 1.0)
    assert "of host memory, this machine has 1" not in invoke(file, "--gpu-memory-gib", "80")[1]  # of another machine
    monkeypatch.setattr(preflight_memory, "gpu_memory_gib", lambda _: 80.0)
    code, output = invoke(file)
    assert code == 2
    assert "of host memory, this machine has 1" in " ".join(output.split())


@pytest.mark.parametrize(
    ("data", "context", "share", "tolerance"),
    [(1, 1, False, 0.01), (2, 1, False, 0.01), (1, 2, False, 0.05), (1, 1, True, 0.15), (1, 2, True, 0.15)],
)
def test_indices_are_those_of_all_micro_batches(data: int, context: int, share: bool, tolerance: float) -> None:
    """Of real plans; prompts that are shared are fewer tokens, which is not counted."""
    prompts, group, prompt, completion = 8, 4, 40, 400
    samples = grouped(prompts, [completion] * group, prompt)
    samples = replace(samples, update_index=np.arange(len(samples)) % 4, advantages=np.ones(len(samples), np.float32))
    config = overlay(
        "cluster", f"trainer.data_parallel={data}", f"trainer.context_parallel={context}",
        f"trainer.share_prompts={str(share).lower()}", f"data.max_prompt_tokens={prompt}",
        f"grpo.max_new_tokens={completion}", f"grpo.prompts_per_iteration={prompts}", f"grpo.group_size={group}",
        "grpo.old_logprobs=recompute", "grpo.updates_per_iteration=4",
    )  # fmt: skip
    spec = preset("qwen2.5-7b")
    ranks = RankShare.of(
        Parallel(**config.trainer.parallel_sizes), spec, sequence_parallel=False, max_tokens=8 * (prompt + completion),
        data_rank=0, context_rank=0, share_prompts=share,
    )  # fmt: skip
    plan = plan_step(samples, 4, config.grpo, ranks)
    rows = sum(
        array.nbytes
        for batch in [*plan.measured, *(batch for update in plan.updates for batch in update)]
        for array in (
            batch.input_ids, batch.position_ids, batch.positions, batch.targets, batch.token_index, batch.keys
        )
        if array is not None
    )  # fmt: skip
    state = TokenState.of(samples, config.grpo, torch.device("cpu"))
    of_tokens = [
        each for each in vars(state).values() if isinstance(each, torch.Tensor) and each.numel() > len(samples)
    ]
    (memory,) = trainer_memory(config, spec)
    assert memory.indices == pytest.approx(rows + sum(each.nbytes for each in of_tokens), rel=tolerance)
    assert memory.peak == memory.resident + memory.indices + max(
        memory.optimizer, memory.activations + memory.head_backward, memory.activations + memory.copies
    )


def test_long_completions_fill_gigabytes_with_indices() -> None:
    """1,024 samples of 512 and 32,768 tokens on one copy of the model."""
    sizes = ("grpo.prompts_per_iteration=64", "data.max_prompt_tokens=512", "grpo.max_new_tokens=32768")
    (memory,) = trainer_memory(overlay("cluster", "trainer.data_parallel=1", *sizes), preset("qwen2.5-7b"))
    assert memory.indices / 2**30 == pytest.approx(2.25 + 31 / 32, abs=0.05)
