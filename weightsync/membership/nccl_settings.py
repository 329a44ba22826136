"""NCCL's environment variables that must be equal at both ends of a connection, and limits of NCCL."""

import os
from collections.abc import MutableMapping

# Without variables of one host (NCCL_SOCKET_IFNAME, NCCL_IB_HCA) and those that change no behaviour (NCCL_DEBUG).
NCCL_SETTINGS = (
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MNNVL_ENABLE",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
)
# NCCL's kernels wait for their peers. Two communicators of a GPU progress together only if their kernels fit on it and
# share no hardware queue; else all ranks must launch their operations in one order, with NCCL_LAUNCH_ORDER_IMPLICIT
# (2.26) too. A weight sync and SGLang's scheduler launch from two threads, in an order of each rank's own. (NCCL's user
# guide, "Using multiple NCCL communicators concurrently"; NVIDIA/nccl issues 195, 783, 1347.)
STAGED_MAY_HANG = "moves weights over NCCL beside an engine's own collectives, and NCCL promises no progress to both"
STAGED_ADVICE = (
    "set sync.install: in_place (its transfer pauses generation), rollout.tensor_parallel: 1, or "
    "sync.allow_staged_nccl: true if a hang until sync.transfer_timeout_s can be borne"
)
# GPUs that SGLang takes for parts of a fabric of NVLinks between hosts, by name.
_FABRIC_GPUS = ("GB200", "GB300")


def settle_nccl_settings(
    environ: MutableMapping[str, str] = os.environ, *, gpu_name: str, engine_hosts: int = 1
) -> None:
    """Set, on a trainer rank, the variables that SGLang sets on the ranks of its engines; call it before NCCL starts.

    Variables that are set already stay, as in SGLang; ranks that differ are reported at their rendezvous.

    Args:
        gpu_name: CUDA's name of the GPU; "": there is none, and nothing is set.
        engine_hosts: hosts of an engine (rollout.nodes); SGLang uses a fabric for more than one.

    >>> settle_nccl_settings(environ := {"NCCL_CUMEM_ENABLE": "1"}, gpu_name="NVIDIA H100 80GB HBM3")
    >>> environ
    {'NCCL_CUMEM_ENABLE': '1', 'NCCL_NVLS_ENABLE': '0'}
    """
    if not gpu_name:
        return
    on_fabric = engine_hosts > 1 and any(name in gpu_name.upper() for name in _FABRIC_GPUS)
    if on_fabric:
        environ.setdefault("NCCL_MNNVL_ENABLE", "1")
    environ.setdefault("NCCL_CUMEM_ENABLE", str(int(on_fabric)))
    environ.setdefault("NCCL_NVLS_ENABLE", "0")
    settle_containers(environ)


def settle_containers(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables that containers with a common NCCL_HOSTID need, on any rank with a GPU, before NCCL starts.

    NCCL_HOSTID makes several containers one host for NCCL. Then they must share host memory by files in /dev/shm:
    cuMem's allocations are shared by file descriptors over a socket, which needs a common network namespace. Memory of
    GPUs needs all GPUs in each of them, and one namespace of process ids (docs/docker.md).

    >>> settle_containers(environ := {"NCCL_HOSTID": "compose"})
    >>> environ["NCCL_CUMEM_HOST_ENABLE"]
    '0'
    """
    if environ.get("NCCL_HOSTID"):
        environ.setdefault("NCCL_CUMEM_HOST_ENABLE", "0")
