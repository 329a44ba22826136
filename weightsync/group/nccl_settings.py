"""NCCL's environment variables that both ends of a connection act by, and what NCCL does not promise; no imports."""

import os
from collections.abc import MutableMapping

# Not here: what is of one host (NCCL_SOCKET_IFNAME, NCCL_IB_HCA) or changes no behaviour (NCCL_DEBUG).
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
# NCCL's kernels wait for their peers, and two communicators of a GPU go on side by side only if their kernels fit on it
# and share no hardware queue; else all ranks must launch their operations in one order, with NCCL_LAUNCH_ORDER_IMPLICIT
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
    """Gives a trainer rank what SGLang gives the ranks of its engines; before NCCL starts.

    What is set stays, in trainers and rollouts alike: SGLang respects it too, and ranks that differ in the end are
    named when they meet.

    Args:
        gpu_name: as CUDA says it; "" without one, which needs no settings.
        engine_hosts: over which an engine spans (rollout.nodes): SGLang uses a fabric for more than one.

    >>> settle_nccl_settings(environ := {"NCCL_CUMEM_ENABLE": "1"}, gpu_name="NVIDIA H100 80GB HBM3")
    >>> environ
    {'NCCL_CUMEM_ENABLE': '1', 'NCCL_NVLS_ENABLE': '0'}
    """
    if not gpu_name:
        return
    on_fabric = engine_hosts > 1 and any(each in gpu_name.upper() for each in _FABRIC_GPUS)
    if on_fabric:
        environ.setdefault("NCCL_MNNVL_ENABLE", "1")
    environ.setdefault("NCCL_CUMEM_ENABLE", str(int(on_fabric)))
    environ.setdefault("NCCL_NVLS_ENABLE", "0")
    settle_containers(environ)


def settle_containers(environ: MutableMapping[str, str] = os.environ) -> None:
    """For every rank on a GPU, of trainer and rollouts, before NCCL starts.

    NCCL_HOSTID makes one host of several containers. Their host memory is shared by files in /dev/shm then: what cuMem
    allocates would be shared by file descriptors over a socket, which needs one network namespace, too.

    >>> settle_containers(environ := {"NCCL_HOSTID": "compose"})
    >>> environ["NCCL_CUMEM_HOST_ENABLE"]
    '0'
    """
    if environ.get("NCCL_HOSTID"):
        environ.setdefault("NCCL_CUMEM_HOST_ENABLE", "0")
