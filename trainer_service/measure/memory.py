"""Peak memory of this process's step: what PyTorch has allocated on a GPU, else what the process had resident."""

from pathlib import Path

import torch

_PROCESS = Path("/proc/self")
_RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
_KIB = 1024


def restart_peak(device: torch.device) -> None:
    """Begin a new peak.

    Where a host does not let a process do that for its resident memory, the peak is that since the process started.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        (_PROCESS / "clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    except OSError:
        return


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes since `restart_peak`; 0 where the host does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = (_PROCESS / "status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * _KIB for line in lines if line.startswith("VmHWM:")), 0)
