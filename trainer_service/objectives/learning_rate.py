"""The step size of an iteration, which depends on the number of steps only: a resumed run needs no other state."""

import math

from tandem_config.schema import TrainerSection


def learning_rate_at(steps_done: int, iterations: int, settings: TrainerSection) -> float:
    """Compute AdamW's step size for the step after `steps_done` steps.

    Args:
        iterations: run.iterations, at which a decay ends; later steps keep the last value.

    >>> settings = TrainerSection(learning_rate=1.0, learning_rate_decay="linear", warmup_iterations=2)
    >>> [round(learning_rate_at(steps, 6, settings), 3) for steps in range(8)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.25, 0.25]
    """
    warmup = settings.warmup_iterations
    if steps_done < warmup:
        return settings.learning_rate * (steps_done + 1) / warmup
    steps = max(1, iterations - warmup)
    done = min(steps_done - warmup, steps - 1) / steps
    share = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}
    return settings.learning_rate * share[settings.learning_rate_decay]
