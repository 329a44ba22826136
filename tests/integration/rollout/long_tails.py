"""A rollout service whose completions have lengths of a long tail: `python -m tests.integration.rollout.long_tails`.

Lognormal, median 30, 99th percentile 323 tokens, drawn from a completion's seed; those of up to 8 tokens (its warm-up)
are let be.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

from rollout_service.__main__ import main
from rollout_service.sglang_engine import dispatch

MEDIAN, SIGMA = 30.0, 1.02


def watch_for(params: Any, stop: Sequence[str]) -> None:
    """In the place of dispatch's own, which is called with each request's SamplingParams."""
    params.stop_strs, params.stop_str_max_len = list(stop), 0
    if params.max_new_tokens > 8:
        drawn = int(MEDIAN * math.exp(random.Random(params.sampling_seed).gauss(0.0, SIGMA)))
        params.max_new_tokens = max(1, min(params.max_new_tokens, drawn))
        params.ignore_eos = True


if __name__ == "__main__":
    dispatch.watch_for = watch_for  # type: ignore[attr-defined]
    main()
