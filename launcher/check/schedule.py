"""Foresees what a schedule does with a configuration: who idles, how old samples are, how long a sync stops generation.

The schedule itself runs in virtual time, with a smaller batch on as many slots fewer: a second or two.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.schedule.choice import bounds_of
from coordinator.sync.forecast import Forecast, RoundForecast
from launcher.simulate.command import read_lengths
from launcher.simulate.world import Figures, ServiceSpeeds, simulate
from servicekit.errors import TandemError
from tandem_config.loading import Draft
from tandem_config.problems import ConfigProblem, errors_only, problem
from tandem_config.schema import RunConfig
from weightsync.layouts.layout import Parallel
from weightsync.plans.participants import Participants

# What is simulated at most: completions of a batch, of a group, tokens of a completion, completions in all.
_BATCH, _GROUP, _TOKENS, _ALL = 512, 32, 1200, 10_000
_FEWEST_GROUPS, _FEWEST_SLOTS, _ITERATIONS = 8, 8, 20
# Assumed lengths: median and 99th percentile, as shares of the longest. Those of docs/scheduling.md.
_MEDIAN, _P99 = 1 / 12, 10 / 12
# Seconds of an engine's step, and of each row in it, as `tandem simulate` guesses them.
_STEP_S, _ROW_S = 0.01, 1e-4
# Virtual seconds of a train step and the slowest completion: a replica reports its load each half of a second.
_BUSY_S = 20.0
# Completions of a batch for each slot with which `async` keeps both sides busy (docs/scheduling.md); and the idle share
# above which a side is worth a warning.
BATCH_PER_SLOT = 4
_IDLE = 0.2
# Longest completion with which a long tail is expected: the slowest of a batch takes half a minute of steps of 15 ms.
LONG_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class ScheduleForecast:
    """What is expected of a configuration's schedule.

    Attributes:
        completions: of a batch.
        slots: completions that all replicas run at a time.
        bound: versions that no trained group is older than.
        lengths: of completions, as assumed: median, 99th percentile and longest, in tokens.
        sync: of a weight sync between GPUs; None: not over their links, or the model is not known.
    """

    completions: int
    slots: int
    bound: int
    lengths: tuple[int, int, int]
    figures: Figures
    sync: RoundForecast | None


def schedule_report(draft: Draft) -> tuple[list[str], list[ConfigProblem]]:
    """Return lines about a schedule in which the sides do not take turns, and warnings.

    Nothing where the configuration is invalid: what that would do is not known.
    """
    config = draft.config
    if config is None or errors_only(draft.problems) or config.schedule.kind == "sync":
        return [], []
    try:
        found = forecast(config)
    except OSError as error:  # the simulated ledger needs a folder
        return [f"schedule {config.schedule.kind}: not simulated: {error}"], []
    return list(_lines(config, found)), draft.placed(_problems(config, found))


def forecast(config: RunConfig) -> ScheduleForecast:
    """Foresee what the schedule does with completions of a long tail, and train steps as long as their generation.

    Raises: OSError: no temporary folder can be written to.
    """
    grpo, rollout = config.grpo, config.rollout
    longest = grpo.max_new_tokens
    median, p99 = max(1, round(longest * _MEDIAN)), max(1, round(longest * _P99))
    # What a running completion has on average, of such lengths: E[L^2] / 2 E[L], a sixth of the longest.
    held = (rollout.max_total_tokens or 2**62) // (config.data.max_prompt_tokens + longest // 6)
    slots = rollout.replicas * max(1, min(rollout.max_running_requests, held))
    sync = predicted_sync(config)
    return ScheduleForecast(
        completions=grpo.prompts_per_iteration * grpo.group_size,
        slots=slots,
        bound=bounds_of(config)[0],
        lengths=(median, p99, longest),
        figures=_simulated(config, slots, 0.0 if sync is None else sync.seconds),
        sync=sync,
    )


def predicted_sync(config: RunConfig) -> RoundForecast | None:
    """Predict a weight sync over sync.link_gbit; None: it goes another way, or its plan cannot be made."""
    if config.sync.transport not in ("auto", "collective"):
        return None
    rollout = config.rollout
    sizes = Parallel(tensor=rollout.tensor_parallel, expert=rollout.expert_parallel)
    replicas = {f"rollout-{index}": sizes for index in range(rollout.replicas)}
    trainer = Parallel(**config.trainer.parallel_sizes)
    fleet = Participants(trainer=trainer, replicas=replicas, slots=(), first_rank={})
    try:
        return Forecast(str(config.model.path), config.model.dtype, config.sync).predict(fleet)
    except (TandemError, ValueError, KeyError, OSError):
        return None  # check_model says why


def _lines(config: RunConfig, found: ScheduleForecast) -> Iterator[str]:
    figures, (median, p99, longest) = found.figures, found.lengths
    left_out = f"; {figures.wasted:.0%} of their tokens are not trained" if figures.wasted >= 0.005 else ""
    yield (
        f"schedule {config.schedule.kind}: idle {_idle(figures)} expected; samples are {figures.age_mean:.1f} versions "
        f"old on average, {found.bound} at most (the bound){left_out}"
    )
    yield (
        f"    for batches of {found.completions} completions on {found.slots} slots. Assumed: lengths with median "
        f"{median}, 99th percentile {p99} and at most {longest}; a train step as long as the engines' full work. "
        "`tandem simulate --run` takes both from a run"
    )
    is_short = config.grpo.max_new_tokens < LONG_TOKENS
    if config.schedule.kind == "async" and config.schedule.max_staleness > 1 and is_short:
        yield (
            "    Short completions often have even lengths: then schedule.max_staleness: 1 with window: 0 keeps both "
            "sides nearly as busy, and a step learns more from its younger samples (docs/scheduling.md)"
        )
    if config.schedule.kind == "async" and found.sync is not None:
        sync, size = config.sync, f"{found.sync.received_bytes / 1e9:.3g} GB"
        pause = "for all of it" if sync.install == "in_place" else "for a step only"
        yield (
            f"weight sync: {found.sync.seconds:.2g} s predicted, {size} over links of {sync.link_gbit:g} Gbit/s; "
            f"generation pauses {pause} (sync.install: {sync.install})"
        )


def _idle(figures: Figures) -> str:
    return f"trainer {abs(figures.trainer_idle):.2f}, slots {abs(figures.slots_idle):.2f}"


def _problems(config: RunConfig, found: ScheduleForecast) -> Iterator[ConfigProblem]:
    """Name what lets a side of `async` wait; the other schedules wait for slow completions by design."""
    schedule, grpo, figures = config.schedule, config.grpo, found.figures
    if schedule.kind != "async" or max(figures.trainer_idle, figures.slots_idle) <= _IDLE:
        return
    of_slots, expected = found.completions / found.slots, f"expected idle: {_idle(figures)}"
    if of_slots < BATCH_PER_SLOT:
        prompts = -(-BATCH_PER_SLOT * found.slots // grpo.group_size)
        fewer = found.completions // (BATCH_PER_SLOT * config.rollout.replicas)
        older = ", or schedule.max_staleness: 4 with schedule.depth: 2" if schedule.max_staleness < 4 else ""
        yield problem(
            "grpo.prompts_per_iteration",
            grpo.prompts_per_iteration,
            f"{found.completions} completions are {of_slots:.2g} x the {found.slots} slots of all replicas, too few to "
            f"keep both sides busy; {expected}",
            f"{prompts} ({BATCH_PER_SLOT} x the slots)"
            + (f", or rollout.max_running_requests: {fewer}" * bool(fewer))
            + older,
            severity="warning",
        )
    elif schedule.max_staleness < 2 or schedule.window < 1:
        key, value = ("max_staleness", 2) if schedule.max_staleness < 2 else ("window", 1.0)
        why = f"is small for lengths with a tail as assumed here: steps wait for slow completions; {expected}"
        yield problem(f"schedule.{key}", getattr(schedule, key), why, f"set it to {value}", severity="warning")


def _simulated(config: RunConfig, slots: int, sync_s: float) -> Figures:
    """Run the schedule on less of everything, in proportion, and in less time."""
    grpo, around = config.grpo, config.schedule.max_staleness + 2
    size, tokens = min(grpo.group_size, _GROUP), min(grpo.max_new_tokens, _TOKENS)
    prompts = max(_FEWEST_GROUPS, min(_BATCH, _ALL // (4 * around)) // size)
    prompts = min(prompts, grpo.prompts_per_iteration)
    fewer = slots * prompts * size / (grpo.prompts_per_iteration * grpo.group_size)
    replicas = max(1, min(config.rollout.replicas, int(fewer) // _FEWEST_SLOTS))
    fewer_slots = max(1, round(fewer / replicas))
    small = config.changed("grpo", prompts_per_iteration=prompts, group_size=size, max_new_tokens=tokens)
    small = small.changed("rollout", replicas=replicas)
    lengths = read_lengths(f"lognormal:{max(1.0, tokens * _MEDIAN)},{max(1.0, tokens * _P99)},{tokens}")
    steps = prompts * size * float(lengths.mean()) / (fewer_slots * replicas)
    step_s = _BUSY_S / (steps + tokens)
    rows_s = slots / config.rollout.replicas * _ROW_S
    real_s = (_STEP_S + rows_s) * grpo.max_new_tokens / tokens
    speeds = ServiceSpeeds(
        slots=fewer_slots,
        step_s=step_s * _STEP_S / (_STEP_S + rows_s),
        row_s=step_s * rows_s / (_STEP_S + rows_s) / fewer_slots,
        train_s=steps * step_s,
        sync_s=sync_s * step_s / real_s,
        reward_s=0.0,
        lengths=lengths,
    )
    iterations = max(2 * around, min(_ITERATIONS, _ALL // (prompts * size) - 2 * around))
    return simulate(small, speeds, iterations, config.schedule.kind)
