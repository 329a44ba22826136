"""Compiles what SGLang would compile when an engine starts; rollout.Dockerfile runs it while it builds, without a GPU.

    python compile_kernels.py FOLDER GENERATION

FOLDER is laid out as SGLANG_JIT_CACHE_DIR. Once for each generation of GPUs, as 9.0: SGLang keeps what it found out of
one. It takes a kernel from there only where sources, headers, compilers, flags and versions are the same; another one,
as for other sizes of a model, is compiled when it is first used. Raises what SGLang does if a kernel does not compile.
"""

import ctypes
import importlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from servicekit.cuda import compile_environment, compilers_here

# Functions below sglang.kernels.ops, and with which arguments the models that we have call them, in bfloat16.
KERNELS: Mapping[str, Sequence[tuple[Any, ...]]] = {
    "attention.rope._jit_fused_rope_module": [(True, size, torch.bfloat16, torch.bfloat16) for size in (64, 128)],
    "attention.clamp_position._jit_clamp_position_module": [(torch.int64,)],
    "attention.fused_qknorm_rope._jit_fused_qknorm_rope_module": [(128, True, False)],
    "layernorm.norm._jit_qknorm_module": [(128, torch.bfloat16)],
    "activation.activation.activation_module": [(torch.bfloat16,)],
    # Bytes of a token's keys in a layer on one rank.
    "kvcache.kvcache._jit_kvcache_module": [(size, size, 0) for size in (256, 512, 1024, 2048)],
    "moe.moe_topk_softmax._jit_moe_topk_softmax_module": [(torch.bfloat16,)],
    # With tensor parallelism.
    "communication.all_reduce._init_communicator": [()],
    "communication.all_reduce._init_ipc_manager": [()],
    "communication.all_reduce.get_all_reduce_module": [(torch.bfloat16, ranks) for ranks in (2, 4, 8)],
}


def pretend(generation: str) -> None:
    """Let torch show a GPU of that generation to SGLang, which asks when it is imported."""
    major, minor = map(int, generation.split("."))
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (major, minor)
    cuda.get_device_name = lambda device=None: "none"


def builders(kernels: Mapping[str, Sequence[tuple[Any, ...]]]) -> list[partial[Any]]:
    """Make a call for each kernel. Raises: ImportError, AttributeError: this SGLang does not have it."""
    found = []
    for name, variants in kernels.items():
        module, _, function = name.rpartition(".")
        build = getattr(importlib.import_module(f"sglang.kernels.ops.{module}"), function)
        found += [partial(build, *arguments) for arguments in variants]
    return found


def fill(folder: Path, generation: str, kernels: Mapping[str, Sequence[tuple[Any, ...]]] = KERNELS) -> None:
    """Compile with the compilers that an engine of this environment will find."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as links:
        os.environ |= {**compile_environment(compilers_here(), Path(links)), "SGLANG_JIT_CACHE_DIR": str(folder)}
        # SGLang loads what it compiled; a toolkit has a library of the driver to link with, under its name.
        stub = Path(os.environ.get("CUDA_HOME", "")) / "lib64" / "stubs" / "libcuda.so"
        if stub.is_file():
            ctypes.CDLL(str(stub), mode=ctypes.RTLD_GLOBAL)
        pretend(generation)
        from sglang.kernels.jit.utils.compile import parallel_compile

        parallel_compile(builders(kernels))
    for left in folder.rglob("*.o"):
        left.unlink()


if __name__ == "__main__":
    fill(Path(sys.argv[1]), sys.argv[2])
