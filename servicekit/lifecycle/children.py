"""A child process that must not outlive the process that started it. Linux; standard library only."""

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Loaded here: a child that is forked from several threads may not load anything.
_LIBC = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the *thread* that started it ends; the first call in a child.

    Args:
        parent: pid of the process that started it; if that has ended already, this process ends here.
    """
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died before the line above
