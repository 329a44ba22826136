"""NCCL's environment variables that both ends of a connection act by; imports nothing."""

import os
from collections.abc import MutableMapping

# Not here: what is of one host (NCCL_SOCKET_IFNAME, NCCL_IB_HCA) or changes no behaviour (NCCL_DEBUG).
NCCL_SETTINGS = (
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_CUMEM_ENABLE",
    "NCCL_IB_DISABLE",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NCHANNELS_PER_NET_PEER",
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_P2P_LEVEL",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
)
# SGLang sets these in its ranks unless somebody else has: the trainer must do as it does.
_SGLANG_DEFAULTS = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}


def settle_nccl_settings(environ: MutableMapping[str, str] = os.environ) -> None:
    """Gives trainer and rollouts the same settings where the user says nothing; before NCCL or SGLang start.

    >>> environ = {"NCCL_CUMEM_ENABLE": "1"}
    >>> settle_nccl_settings(environ)
    >>> environ
    {'NCCL_CUMEM_ENABLE': '1', 'NCCL_NVLS_ENABLE': '0'}
    """
    for name, value in _SGLANG_DEFAULTS.items():
        environ.setdefault(name, value)
