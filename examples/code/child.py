"""Run in a process of its own by rewards.py: a completion's code and its tests, which may only compute.

One line of JSON comes in by stdin. Out by stdout: "ready", or why not; then a line for each test that passes.

Before the code runs, the kernel is asked to limit this process: CPU time, time, memory, and no system call but those
that computing needs, so that it opens no file or socket, and starts, reads and signals no process, not even as root.
What it prints is discarded.
"""

import ctypes
import errno
import importlib
import json
import math
import os
import resource
import signal
import sys
from typing import Any

# What the code may import, if its text has the name: afterwards no file can be opened.
MODULES = """
    __future__ abc array ast base64 bisect calendar cmath collections collections.abc contextlib copy dataclasses
    datetime decimal enum fractions functools hashlib heapq io itertools json math numbers operator pprint queue random
    re secrets statistics string struct textwrap time types typing unicodedata zlib
"""
# All others fail with EPERM: open, clone, execve, socket, kill, and those that would undo a limit (prlimit64,
# rt_sigaction, alarm).
SYSTEM_CALLS = """
    brk clock_getres clock_gettime clock_nanosleep close exit exit_group fstat futex getpid getrandom gettid
    gettimeofday lseek madvise mmap mprotect mremap munmap nanosleep read restart_syscall rt_sigreturn sched_yield write
"""
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM


def main() -> None:
    """Serve one job, and end without running what the code has registered for the end."""
    job = json.loads(sys.stdin.readline())
    results = _take_streams()
    try:
        text = "\n".join([job["code"], *job["tests"]])
        for module in MODULES.split():
            if module in text:
                importlib.import_module(module)
        _limit(job["cpu_s"], job["memory_mib"])
        _refuse_system_calls()
    except Exception as error:  # noqa: BLE001 - the boundary: the parent says it
        os.write(results, f"{type(error).__name__}: {error}\n".encode())
        return
    os.write(results, b"ready\n")
    _run(job, results)
    os._exit(0)


def _take_streams() -> int:
    """Keep stdout for the results; the code gets streams that lead nowhere."""
    results = os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    return results


def _limit(cpu_s: float, memory_mib: int) -> None:
    used_s = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    most_s = math.ceil(used_s + cpu_s)
    for what, most in (
        (resource.RLIMIT_CPU, most_s),
        (resource.RLIMIT_AS, memory_mib << 20),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        resource.setrlimit(what, (most, most))
    # By the clock, for code that sleeps, also if the parent has gone; a busy machine gets a multiple of the CPU time.
    signal.alarm(math.ceil(4 * cpu_s))


def _refuse_system_calls() -> None:
    """Install a seccomp filter, for ever. Raises: OSError: the library is missing, or the kernel does not take it."""
    library = ctypes.CDLL("libseccomp.so.2", use_errno=True)
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_REFUSE)))
    for name in SYSTEM_CALLS.split():
        number = library.seccomp_syscall_resolve_name(name.encode())
        library.seccomp_rule_add(context, ctypes.c_uint32(_ALLOW), number, ctypes.c_uint(0))
    if status := library.seccomp_load(context):
        raise OSError(-status, f"seccomp: {os.strerror(-status)}")


def _run(job: dict[str, Any], results: int) -> None:
    """Run the code, then each test; a test passes by its end without an exception, `sys.exit` included."""
    write, names = os.write, {"__name__": "solution"}
    try:
        exec(compile(job["code"], "<completion>", "exec"), names)
    except BaseException:  # noqa: BLE001 - the boundary of the code
        return
    if not callable(names.get(job["entry_point"])):
        return
    for place, test in enumerate(job["tests"]):
        try:
            exec(compile(test, "<test>", "exec"), names)
        except BaseException:  # noqa: BLE001 - the boundary of the code
            continue
        write(results, f"{job['mark']} {place}\n".encode())


if __name__ == "__main__":
    main()
