"""NCCL's choice of a transport between containers of one machine, by what docker-compose.yml and manifests say.

By NCCL 2.30: src/misc/utils.cc (the host's hash), src/graph/paths.cc (ncclTopoCheckP2p), src/transport/p2p.cc, shm.cc.
GPUs are taken to be linked by NVLink, as of an HGX: where they are not, NCCL uses shared memory where this says P2P.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

EVERY = frozenset({"all"})


@dataclass(frozen=True, kw_only=True)
class GpuContainer:
    """A container with GPUs, or a pod: its containers share all of this.

    Attributes:
        devices: that are in it; EVERY: the machine's.
        uses: those of its ranks, among `devices`; what the device plugin chooses has names of its own.
        ipc, pids, network: its namespaces; "host", or a name of its own. /dev/shm goes with `ipc`.
    """

    name: str
    devices: frozenset[str]
    uses: frozenset[str]
    ipc: str
    pids: str
    network: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def has(self, devices: frozenset[str]) -> bool:
        """Whether all of these devices are in it."""
        return self.devices == EVERY or devices <= self.devices


def transport(one: GpuContainer, other: GpuContainer) -> str:
    """Return what NCCL chooses: P2P, SHM or NET."""
    hosts = [each.environment.get("NCCL_HOSTID", each.name) for each in (one, other)]
    if hosts[0] != hosts[1] or one.ipc != other.ipc:
        return "NET"
    if not any(each.environment.get("NCCL_P2P_DISABLE") == "1" for each in (one, other)):
        return "P2P"
    return "NET" if any(each.environment.get("NCCL_SHM_DISABLE") == "1" for each in (one, other)) else "SHM"


def faults(one: GpuContainer, other: GpuContainer) -> list[str]:
    """Return why the transport that NCCL chooses fails; it tries no other. Two ranks on one GPU are refused before."""
    found = [f"both use {device}" for device in sorted(one.uses & other.uses)]
    if one == other or transport(one, other) != "P2P":
        return found
    # NVIDIA/nccl#324: a handle of CUDA IPC is of a device, and opens only where that is
    found += [
        f"P2P with {peer.name}, whose devices {sorted(peer.uses)} are not in {each.name}"
        for each, peer in ((one, other), (other, one))
        if not each.has(peer.uses)
    ]
    if one.environment.get("NCCL_CUMEM_ENABLE", "0") == "1":
        return found + (["cuMem's file descriptors cross no networks"] if one.network != other.network else [])
    # openucx/ucx#11514, vllm-project/vllm#55906 (measured on H100): the driver finds the owner by its process id
    return found + (["CUDA IPC between namespaces of process ids"] if one.pids != other.pids else [])
