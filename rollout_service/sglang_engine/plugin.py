"""Tandem's hooks in SGLang's processes (entry point group `sglang.srt.plugins`); inactive outside of Tandem."""

import logging
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear, silu

from rollout_service.sglang_engine.processes import bind_to_service
from rollout_service.sglang_engine.rank_errors import remember_errors
from rollout_service.sglang_engine.receiver import ReceiverSettings
from rollout_service.sglang_engine.scheduler import seeds
from rollout_service.sglang_engine.scheduler.flips import begun_first, read_last_result, rekey_waiting, skip_stand_in
from rollout_service.sglang_engine.scheduler.stops import give_stop_text
from servicekit.lifecycle.garbage import collect_from_now_on

_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
# SGLang's CPU path pads FFN and KV heads for AMX kernels. Tandem uses plain torch, with the same shapes as on a GPU.
_CPU_PADDING = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"
_CPU_EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_SAMPLER = "sglang.srt.layers.sampler"
_SAMPLING_INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# A phase of a sync runs in a thread next to the scheduler's, for whose interpreter lock it waits as long as this; the
# default, 5 ms, is longer than most phases of a small model.
_SWITCH_S = 0.0005
_kept: list[tuple[Any, Any, Any]] = []  # (member, server, device) of this rank, for its lifetime


def register() -> None:
    """Register the hooks; SGLang calls this in the service and in each rank, before it builds anything."""
    settings = ReceiverSettings.from_env(os.environ)
    if settings is None or os.environ.get("TANDEM_SERVICE_PID") == str(os.getpid()):
        return
    bind_to_service()
    remember_errors(Path(settings.dir))
    # SGLang's debug dumper imports Megatron if it is installed, which would cost seconds of start-up.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_CPU_PADDING, _keep_config, HookType.REPLACE)
    HookRegistry.register(_CPU_EXPERTS, _leave_out_foreign_experts, HookType.AROUND)
    HookRegistry.register(f"{_MODEL_RUNNER}.load_model", _serve_shards, HookType.AFTER)
    HookRegistry.register(f"{_UPDATER}.begin_weight_update", _finish_reading, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.pause_generation", read_last_result, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.pause_generation", begun_first, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", skip_stand_in, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.record_weight_version_change", rekey_waiting, HookType.AFTER)
    HookRegistry.register(
        f"{_SCHEDULER}.init_tokenizer", partial(give_stop_text, folder=settings.tokenizer), HookType.AFTER
    )
    HookRegistry.register(f"{_SAMPLING_INFO}.from_schedule_batch", seeds.give_seeds, HookType.AFTER)
    HookRegistry.register(f"{_SAMPLING_INFO}.merge_batch", seeds.all_or_none, HookType.BEFORE)
    HookRegistry.register(f"{_SAMPLER}.sampling_from_probs_torch", seeds.draw_from_probs, HookType.AROUND)
    HookRegistry.register(f"{_SAMPLER}.multinomial_with_seed", seeds.draw_from_logprobs, HookType.REPLACE)
    HookRegistry.register(f"{_SCHEDULER}.run_event_loop", _freeze_start_up_objects, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.run_event_loop", _leave, HookType.AFTER)
    HookRegistry.register(
        f"{_SCHEDULER}._record_scheduler_state_for_paused_engine", _sleep_while_paused, HookType.AFTER
    )


def _serve_shards(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """Take the rank's slot and serve its receiver, after the rank has built its model."""
    if runner.is_draft_worker:
        return
    from sglang.srt.runtime_context import get_parallel

    from rollout_service.sglang_engine.kernels import refuse_other_forms
    from rollout_service.sglang_engine.receiver import ShardReceiver, add_receiver, load_with_sglang, receivable_tensors
    from servicekit.logs import configure_logging
    from servicekit.rpc.sync_server import start_sync_server
    from weightsync.layouts.layout import Parallel
    from weightsync.layouts.registry import ROLLOUT_ENGINE
    from weightsync.model.spec import ModelSpec
    from weightsync.transfer.session import SyncMember

    settings = ReceiverSettings.from_env(os.environ)
    if settings is None:
        raise RuntimeError("the hook ran without its environment")
    refuse_other_forms(runner.model)
    parallel = get_parallel()
    configure_logging("rollout-rank", replica=settings.replica, rank=parallel.tp_rank)
    logging.getLogger("sglang").setLevel(logging.WARNING)  # at INFO it writes a line per batch
    member = SyncMember(
        spec=ModelSpec.from_folder(settings.model),
        slot=f"{settings.replica}/{parallel.tp_rank}",
        parallel=Parallel(engine=ROLLOUT_ENGINE, tensor=parallel.tp_size, expert=parallel.moe_ep_size),
        tensors=receivable_tensors(runner.model),
        redis_url=settings.redis_url,
        group=settings.group,
        host=settings.host,
        lease_ttl_s=settings.lease_ttl_s,
        on_lost=_end,
        disk_folder=Path(settings.disk_folder),
    )
    member.start()
    sys.setswitchinterval(_SWITCH_S)
    server = start_sync_server(
        add_receiver,
        ShardReceiver(member, lambda folder: load_with_sglang(runner.model, folder)),
        settings.address(parallel.tp_rank),
    )
    _kept.append((member, server, next(runner.model.parameters()).device))


def _end(why: str) -> None:
    """End this rank, which can no longer take part in weight syncs; its replica ends too, and is restarted."""
    from servicekit.logs import get_logger

    get_logger(__name__).error("rollout rank lost its slot", error=why)
    os._exit(1)


def _leave(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Release the slot of a rank that ends, so that its lease need not expire."""
    for member, server, _ in _kept:
        server.stop(grace=0)
        member.close()


def _keep_config(model_config: Any, load_config: Any, tp_size: int) -> Any:
    return model_config


def _finish_reading(updater: Any, *args: Any, **kwargs: Any) -> None:
    """Wait until the GPU has computed the batch that a frozen scheduler has launched, which reads the weights."""
    from weightsync.transfer.devices import wait_for_device

    for _, _, device in _kept:
        wait_for_device(device)


def _freeze_start_up_objects(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Exclude objects of the start-up from garbage collection, which would stop generation for 0.3 s."""
    collect_from_now_on()


def _sleep_while_paused(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Let a paused scheduler sleep: it polls, and would take core and GIL from the weight receiver."""
    if threading.current_thread() is threading.main_thread():
        scheduler.maybe_sleep_on_idle()


def _leave_out_foreign_experts(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk_output: Any, runner_config: Any
) -> torch.Tensor:
    """Skip experts of other ranks, whose id is -1: SGLang's torch-native mixture of experts fails on them.

    Returns: [T, hidden] the sum over this rank's experts; SGLang adds up the ranks' sums.
    """
    if not (topk_output.topk_ids < 0).any():
        return original(layer, x, topk_output, runner_config)
    if runner_config.activation != "silu":
        raise NotImplementedError(f"expert parallelism on CPU with activation {runner_config.activation}")
    return local_experts(x, layer.w13_weight, layer.w2_weight, topk_output.topk_weights, topk_output.topk_ids)


def local_experts(
    x_TH: torch.Tensor, w13_EFH: torch.Tensor, w2_EHF: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor
) -> torch.Tensor:
    """Compute the gated SiLU experts of one rank (T tokens, K choices each, E experts).

    Args:
        ids_TK: experts of each token; -1 for those of other ranks.
    Returns: [T, hidden].
    """
    total_TH = torch.zeros(x_TH.shape, dtype=weights_TK.dtype)
    for expert in range(w13_EFH.shape[0]):
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        if len(token) > 0:
            gate, up = linear(x_TH[token], w13_EFH[expert]).chunk(2, dim=-1)
            out = linear(silu(gate) * up, w2_EHF[expert])
            total_TH.index_add_(0, token, out.to(total_TH.dtype) * weights_TK[token, choice, None])
    return total_TH.to(x_TH.dtype)
