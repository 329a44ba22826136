"""`rollout_service` on a CPU with SGLang's overlap scheduler, which is its default on GPUs.

With PREFILL_CHUNK it computes prompts in chunks of so many tokens, in its environment.
"""

import os
import sys

from rollout_service.__main__ import main


def overlap() -> None:
    """From here on this process starts engines with it."""
    from rollout_service.sglang_engine import options

    on_cpu = options._cpu_arguments
    chunk = {"chunked_prefill_size": int(tokens)} if (tokens := os.environ.get("PREFILL_CHUNK")) else {}
    options._cpu_arguments = lambda config: on_cpu(config) | {"disable_overlap_schedule": False} | chunk


if __name__ == "__main__":
    overlap()
    sys.exit(main())
