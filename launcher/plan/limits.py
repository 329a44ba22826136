"""The limits of `tandem plan`: finite options, and plans that take about a minute and some GiB at most.

The effort is estimated from the sizes before anything is allocated; it is an upper bound, not a prediction.
"""

import math
from collections.abc import Iterator, Mapping

from tandem_config.problems import ConfigErrors, ConfigProblem, problem
from weightsync.layouts.layout import Parallel
from weightsync.model.spec import ModelSpec
from weightsync.plans.cost import Speeds

LEAST_MIB, LARGEST_MIB = 2.0**-8, 2.0**16  # as sync.bucket_mib
MOST_RANKS = 2**20
MOST_CHUNKS = 2**16
_MOST_SLICES = 12_000_000
_MOST_MESSAGES = 500_000
_MOST_HOPS = 3_000_000
_MOST_ELEMENTS = 2**52  # of a model; 64-bit sums of bytes hold more
_TENSORS_OF_A_LAYER = 16  # besides experts; at most
_TENSORS_OF_AN_EXPERT = 3
_FASTEST, _SLOWEST_S = 1e18, 3600.0
_SPEEDS = {
    "trainer_link": "--trainer-gbps",
    "rollout_link": "--rollout-gbps",
    "latency_s": "--latency-us",
    "rpc_s": "--rpc-ms",
    "copy": "--copy-gbps",
    "digest": "--digest-gbps",
}


def check_numbers(bucket_mib: float | None, speeds: Speeds) -> None:
    """Check the options that are numbers. Raises: ConfigErrors: an option is not finite, or above its limit."""
    problems = list(_bad_speeds(speeds))
    if bucket_mib is not None and not LEAST_MIB <= bucket_mib <= LARGEST_MIB:
        problems.append(
            problem("--bucket-mib", f"{bucket_mib:g}", f"must be a number from {LEAST_MIB} to {LARGEST_MIB:.0f}")
        )
    if problems:
        raise ConfigErrors(problems)


def _bad_speeds(speeds: Speeds) -> Iterator[ConfigProblem]:
    for name, option in _SPEEDS.items():
        value, is_time = getattr(speeds, name), name.endswith("_s")
        if not math.isfinite(value) or value > (_SLOWEST_S if is_time else _FASTEST):
            largest = f"{_SLOWEST_S:g} s" if is_time else f"{_FASTEST:g} bytes/s"
            yield problem(option, f"{value:g}", f"must be a finite number, and no more than {largest}")


def check_ranks(option: str, value: str, parallel: Parallel) -> None:
    """Check the number of ranks and pipeline chunks; call this before layers are split over them.

    Args:
        option: command line option that gave the sizes.
        value: its text.
    Raises: ConfigErrors: too many.
    """
    chunks = parallel.pipeline * parallel.virtual_pipeline
    for what, count, most in (("ranks", parallel.world_size, MOST_RANKS), ("pipeline chunks", chunks, MOST_CHUNKS)):
        if count > most:
            raise ConfigErrors([_too_much(option, value, f"{count:,} {what}", most)])


def check_effort(
    spec: ModelSpec,
    trainer: Parallel,
    rollout: Parallel,
    *,
    message_bytes: int,
    dtype_bytes: int,
    values: Mapping[str, str],
) -> None:
    """Estimate the effort of a plan before it is made.

    Args:
        message_bytes: size of the largest message.
        dtype_bytes: size of an element.
        values: the user's text of every option, by option.
    Raises: ConfigErrors: too many parameters, slices or messages; names the option.
    """
    if spec.num_elements > _MOST_ELEMENTS:
        what = f"{spec.num_elements:,} parameters"
        raise ConfigErrors([_too_much("--model", values["--model"], what, _MOST_ELEMENTS)])
    sides = {
        "--trainer": _slices(spec, trainer.stage_size, trainer.stage_size // trainer.expert),
        "--rollout": _slices(spec, rollout.tensor, rollout.tensor // rollout.expert),
    }
    for option, slices in sides.items():
        if slices > _MOST_SLICES:
            raise ConfigErrors([_too_much(option, values[option], f"{slices:,} slices of parameters", _MOST_SLICES)])
    sharers = trainer.expert_tensor * max(1, rollout.tensor // rollout.expert)
    crossings = _slices(spec, trainer.tensor * rollout.tensor, sharers)
    if crossings > _MOST_SLICES:
        raise ConfigErrors(
            [_too_much("--rollout", values["--rollout"], f"{crossings:,} pairs of slices", _MOST_SLICES)]
        )
    messages = spec.num_elements * dtype_bytes // message_bytes + trainer.world_size
    if messages > _MOST_MESSAGES:
        least = spec.num_elements * dtype_bytes / _MOST_MESSAGES / 2**20
        value, advice = values["--bucket-mib"], f"at least {math.ceil(least)} MiB"
        raise ConfigErrors([_too_much("--bucket-mib", value, f"{messages:,} messages", _MOST_MESSAGES, advice)])


def check_simulation(messages: int, replicas: int) -> None:
    """Check the number of hops to simulate. Raises: ConfigErrors: too many."""
    if messages * replicas > _MOST_HOPS:
        advice = "a larger --bucket-mib, fewer --replicas, or no --simulate"
        what = f"{messages * replicas:,} hops of {messages:,} messages"
        raise ConfigErrors([_too_much("--replicas", str(replicas), what, _MOST_HOPS, advice)])


def _slices(spec: ModelSpec, dense_ranks: int, expert_ranks: int) -> int:
    layers = spec.num_layers
    experts = _TENSORS_OF_AN_EXPERT * layers * spec.num_experts
    return (_TENSORS_OF_A_LAYER * layers + 4) * dense_ranks + experts * max(1, expert_ranks)


def _too_much(option: str, value: str, what: str, most: int, suggestion: str = "") -> ConfigProblem:
    return problem(
        option,
        value,
        f"needs {what}; `tandem plan` allows at most {most:,}",
        suggestion or "fewer ranks, or a smaller model",
    )
