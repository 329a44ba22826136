"""Derives SGLang's arguments and environment from the configuration."""

import json
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_service.engine import SamplingSettings
from rollout_service.hosts.host_ranks import HostRanks
from rollout_service.sglang_engine.kernels import FLOAT32_ATTENTION, MOE_RUNNER
from rollout_service.sglang_engine.processes import SERVICE_PID, ignore_launch_failure
from servicekit.addresses import split_address
from servicekit.cuda import compile_environment, compiled_environment, compilers_here
from tandem_config.schema import RunConfig
from tandem_config.sections.rollout import MAX_GRAPH_REQUESTS
from weightsync.model.spec import ModelSpec
from weightsync.transfer.communicators.interfaces import GLOO_INTERFACE, address_of, interface_of

# Below this length a prefix cache does not pay. Maintaining its tree costs more than computing prompts again: with
# 6-token prompts it is 30 % of the whole generation. And SGLang shares no prefix below 32 tokens within a batch.
SHORTEST_CACHED_PROMPT = 64
# Tokens of KV cache on CPUs: 64 concurrent completions of 1024 tokens. SGLang's own default would take most of a host's
# memory.
CPU_CACHE_TOKENS = 65536


def engine_arguments(config: RunConfig, name: str, share: HostRanks, cuda: bool) -> dict[str, Any]:
    """Make the keyword arguments of SGLang's Engine.

    Args:
        name: of the replica.
        share: ranks of this host.
        cuda: whether the ranks run on GPUs.
    """
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model_path": str(config.model.path),
        "dtype": config.model.dtype,
        # Dummy: the first sync writes the weights.
        "load_format": "auto" if rollout.serve_model else "dummy",
        "skip_tokenizer_init": True,
        "tp_size": rollout.tensor_parallel,
        "ep_size": rollout.expert_parallel,
        "context_length": rollout.context_length,
        "max_total_tokens": rollout.max_total_tokens,  # None: SGLang profiles the memory
        "max_running_requests": rollout.max_running_requests,
        "mem_fraction_static": rollout.mem_fraction_static,
        "disable_radix_cache": longest_prompt(config) <= SHORTEST_CACHED_PROMPT,
        "random_seed": zlib.crc32(f"{config.run.seed}/{name}".encode()),
        "sleep_on_idle": True,  # or the scheduler polls at 100 % of a core
        "batch_notify_size": 1 << 20,  # report all requests that finished in a step together
        "grammar_backend": "none",
        "weight_version": "0",
        "log_level": "error",
        "custom_sigquit_handler": ignore_launch_failure,
    }
    if share.nodes > 1:
        arguments |= {"nnodes": share.nodes, "node_rank": share.host, "dist_init_addr": share.store}
    return arguments | (_cuda_arguments(config) if cuda else _cpu_arguments(config))


def model_arguments(spec: ModelSpec) -> dict[str, Any]:
    """Make the arguments that depend on the model.

    SGLang's longest sequence is max_position_embeddings, which Qwen's cards leave at the length before YaRN; of the
    other scalings it multiplies it itself.
    """
    if spec.rope_scaling is None or spec.rope_scaling.kind != "yarn":
        return {}
    return {"json_model_override_args": json.dumps({"max_position_embeddings": spec.max_positions})}


def _cuda_arguments(config: RunConfig) -> dict[str, Any]:
    """Override choices that SGLang makes by the GPU's generation and that a weight sync or float32 cannot use.

    And logits as the trainer has them, in float32: a GPU multiplies the bfloat16 weight itself, which stays as it is.
    """
    # On 80 GB SGLang captures decode graphs of up to 256 requests, on 48 GB of 32, and decodes more without one.
    graphs = min(config.rollout.max_running_requests, MAX_GRAPH_REQUESTS)
    chosen: dict[str, Any] = {
        "moe_runner_backend": MOE_RUNNER,
        "cuda_graph_max_bs_decode": graphs,
        "enable_fp32_lm_head": True,
    }
    return chosen | ({"attention_backend": FLOAT32_ATTENTION} if config.model.dtype == "float32" else {})


def _cpu_arguments(config: RunConfig) -> dict[str, Any]:
    tokens = config.rollout.max_total_tokens
    sets = (asked.max_new_tokens or 0 for asked in config.evaluation_sets())
    longest = longest_prompt(config) + max(config.grpo.max_new_tokens, *sets, 0)
    return {
        "max_total_tokens": max(CPU_CACHE_TOKENS, 2 * longest) if tokens is None else tokens,
        "device": "cpu",
        "attention_backend": "torch_native",  # ours: sglang_cpu/attention.py
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,  # there is no device to overlap with
        "mem_fraction_static": 0.2,  # unused once max_total_tokens is set, but SGLang checks it against free memory
    }


def warm_up_sampling(config: RunConfig) -> list[SamplingSettings]:
    """List the ways in which the run samples, each once: SGLang compiles the sampler of top-p when it is first used.

    That takes a minute or two within the scheduler, which answers no control call meanwhile.
    """
    first = SamplingSettings(
        temperature=config.grpo.temperature, top_p=1.0, top_k=-1, max_new_tokens=2, stop_token_ids=()
    )
    sets = [
        replace(
            first,
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
        )
        for asked in config.evaluation_sets()
    ]
    return list(dict.fromkeys([first, *sets]))


def longest_prompt(config: RunConfig) -> int:
    """Return the length of the longest possible prompt, in tokens."""
    context = config.rollout.context_length
    return config.data.max_prompt_tokens if context is None else min(config.data.max_prompt_tokens, context)


def tokenizer_folder(config: RunConfig) -> Path:
    """Return the folder in which tokenizer.json should be."""
    return config.model.path if config.model.tokenizer_path is None else config.model.tokenizer_path


def engine_environment(
    config: RunConfig, share: HostRanks, host: str, socket_folder: Path, cuda: bool
) -> dict[str, str]:
    """Make the environment variables that SGLang reads in this process and in its ranks.

    Args:
        share: ranks of this host.
        host: address at which they are reached.
        socket_folder: for the file of their rendezvous, and for links to libraries.
        cuda: whether the ranks run on GPUs.
    """
    variables = {SERVICE_PID: str(os.getpid()), "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
    if share.nodes > 1:
        variables |= _hosts_environment(share, host, os.environ)
    else:
        # A rendezvous through a file needs no port, which another replica could take in between.
        variables["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] = f"file://{socket_folder}/ranks"
    if cuda:
        variables |= compile_environment(compilers_here(), socket_folder / "lib")
        variables |= compiled_environment(socket_folder / "jit")
    else:
        # SGLang compiles its vocabulary mask and its experts' gate with a C++ compiler: seconds, for microseconds here.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if not cuda and config.rollout.tensor_parallel > 1:
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = cpu_binding(share.ranks)
    return variables


def _hosts_environment(share: HostRanks, host: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Make the variables for a rendezvous at the leader's store, which ranks join as under torchrun."""
    address = address_of(host)
    store_host, store_port = split_address(share.store)
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "env://",
        "MASTER_ADDR": store_host,
        "MASTER_PORT": str(store_port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0",  # or a worker's Engine() would wait for its ranks' end
        "SGLANG_HOST_IP": address,
        GLOO_INTERFACE: environ.get(GLOO_INTERFACE) or interface_of(address),
    }


def cpu_binding(ranks: Sequence[int], environ: Mapping[str, str] = os.environ) -> str:
    """Make SGLang's list of CPU cores per rank of this host ("0|1"), needed for more ranks than NUMA nodes.

    Several hosts of an engine on one machine get different cores if there are enough.
    """
    given = environ.get("SGLANG_CPU_OMP_THREADS_BIND")
    if given is not None:
        return given
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in ranks)
