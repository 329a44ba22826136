"""`rollout_service` on a CPU with SGLang's overlap scheduler, which is its default on GPUs."""

import sys

from rollout_service.__main__ import main


def overlap() -> None:
    """From here on this process starts engines with it."""
    from rollout_service.sglang_engine import options

    on_cpu = options._cpu_arguments
    options._cpu_arguments = lambda config: on_cpu(config) | {"disable_overlap_schedule": False}


if __name__ == "__main__":
    overlap()
    sys.exit(main())
