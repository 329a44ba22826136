"""A reward of your own for code: the share of a row's tests that the completion's last code block passes."""

import asyncio
import contextlib
import json
import re
import secrets
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", flags=re.DOTALL)
# A test that passes makes a line of 20 bytes; whoever writes more than this does not report tests.
_MAX_OUTPUT_BYTES = 1 << 16


async def passed(
    completion: str, tests: list[str] | str, entry_point: str, cpu_s: float = 2.0, memory_mib: int = 256
) -> float:
    """Score the share of tests that pass.

    Args:
        tests: assert statements, or a JSON list of them (Parquet files often have that).
        entry_point: name of the function that the prompt asks for.
        cpu_s: CPU seconds for the code and all tests together; by the clock four times as many.
        memory_mib: address space of the process, 40 of them the interpreter's.
    Raises: ValueError: the row has no tests. RuntimeError: this machine cannot confine the code.
    """
    asserts = json.loads(tests) if isinstance(tests, str) else tests
    if not asserts:
        raise ValueError("the row has no tests")
    code = code_block(completion)
    if code is None:
        return 0.0
    mark = secrets.token_hex(8)
    job = {"code": code, "tests": asserts, "entry_point": entry_point, "mark": mark}
    lines = await _run(json.dumps(job | {"cpu_s": cpu_s, "memory_mib": memory_mib}))
    if not lines or lines[0] != "ready":
        raise RuntimeError(f"code cannot be run confined here: {''.join(lines[:1]) or 'the process ended'}")
    return len({f"{mark} {place}" for place in range(len(asserts))}.intersection(lines)) / len(asserts)


def code_block(completion: str) -> str | None:
    """Return the text of the last closed code block.

    >>> code_block("So:\\n```python\\nx = 1\\n```\\nDone."), code_block("```python\\nx = 1")
    ('x = 1\\n', None)
    """
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else None


async def _run(job: str) -> list[str]:
    """Run child.py without our environment, open files and site-packages. Returns: the lines that it writes."""
    child = str(Path(__file__).with_name("child.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", child, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env={}, cwd="/"
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        with contextlib.suppress(ConnectionError):  # it has ended, which its output shows
            process.stdin.write(job.encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()
        output = await process.stdout.readexactly(_MAX_OUTPUT_BYTES)
    except asyncio.IncompleteReadError as end:
        output = end.partial
        await process.wait()  # not killed: that would take its exit status away from asyncio
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode(errors="replace").splitlines()
