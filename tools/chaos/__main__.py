"""Run faults, one after the other, on runs of several kinds; say what each cost, and what cannot be true.

    python -m tools.chaos [--faults 88] [--seed 0] [--runs sync,async,standby,environment] [--out FOLDER]

run           what it is
sync, async   `tandem run` of the demo with that schedule, and a reward in worker processes
standby       the demo without the launcher, with two coordinators (composed.py)
environment   `tandem run` of the calculator, whose tool is in worker processes

After each fault the run must continue by itself within a bound. At the end it must have learned, all samples must be
trained once, versions must only grow, memory and descriptors must not, and nothing may be left. Exit code: 0; 1:
something was not so, and the report says what.
"""

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import psutil

from tandem_files.ledger.reading import read_ledger
from tools.chaos.arena import EXAMPLE, Arena, passed
from tools.chaos.faults import KINDS, Fault, drawn
from tools.chaos.report import Measured, written

# Most seconds from a fault to the next iteration: then the run hangs.
WATCHDOG_S = 240.0
# Held-out accuracy, which both examples reach without faults, after at most so many iterations.
TARGET, LEARNED_AFTER = 0.95, 40
# The second half of the run may take so much more at most than the first: memory, descriptors, threads.
GROWTH, NOISE = 1.1, 24.0
SETTINGS = [
    "run.iterations=100000",
    "run.evaluate_every=10",
    "run.target_accuracy=null",
    "trainer.learning_rate_decay=constant",
]
REWARD = f"reward=[{{kind: exact_match}}, {{function: '{EXAMPLE.parent}/closeness.py:closeness', weight: 0.2}}]"
ASYNC = ["schedule.kind=async", "grpo.preset=decoupled"]
# At the demo's rate, 3e-4 and not decaying, a run without faults reaches 0.92 under async; at half of it 0.98.
SLOWER = "trainer.learning_rate=0.00015"
# A few kinds of which each is over in seconds.
SHORT = ("kill scheduler", "freeze redis", "reset rollout", "slow disk", "move clock")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A kind of run.

    Attributes:
        spares: kinds of victims that it has not.
    """

    settings: list[str]
    file: Path = EXAMPLE
    runs: str = "launcher run"
    spares: tuple[str, ...] = ("environment",)


SETUPS = {
    "sync": Setup(settings=[REWARD]),
    "async": Setup(settings=[REWARD, *ASYNC, SLOWER]),
    "standby": Setup(settings=[REWARD, *ASYNC, SLOWER], runs="tools.chaos.composed"),
    "environment": Setup(
        settings=ASYNC, file=EXAMPLE.parents[1] / "calculator" / "calculator.yaml", spares=("reward",)
    ),
}


@dataclass(kw_only=True)
class Story:
    """What came of a run: its faults, and what was wrong."""

    name: str
    measured: list[Measured] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    sizes: list[dict[str, float]] = field(default_factory=list)
    accuracy: float | None = None
    iterations: int = 0
    samples: dict[str, int] = field(default_factory=dict)


@contextlib.contextmanager
def done(arena: Arena, fault: Fault) -> Iterator[None]:
    """Do what the fault is, for as long as it lasts."""
    kind = fault.kind
    if kind.victim == "redis":
        if kind.action == "kill":
            arena.lose_redis()
            yield
        else:
            with arena.frozen(arena.redis_pid()):
                yield
        return
    if kind.victim == "disk":
        with arena.full_disk() if kind.action == "fill" else arena.saying("disk", 0.5):
            yield
        return
    if kind.victim == "clock":
        with arena.saying("clock", 86_400.0 if fault.choice < 0.5 else -3_600.0):
            yield
        return
    victims = arena.named(kind.victim)
    if not victims:
        raise LookupError(f"there is no {kind.victim}")
    victim = victims[int(fault.choice * len(victims))]
    if kind.action == "kill":
        victim.kill()
        yield
    elif kind.action == "freeze":
        with arena.frozen(victim.pid):
            yield
    else:
        cuts = arena.cut_in_sync if kind.action == "part" else partial(arena.cut, how=kind.action)
        with cuts(victim.pid):
            yield


def harmed(arena: Arena, story: Story, fault: Fault, logs: Path) -> bool:
    """Do harm, and measure how long the run takes to continue; keep the logs of one that is late.

    Returns: whether it does.
    """
    passed(fault.waits_s)
    before, begun_s = arena.iteration(), time.monotonic()
    try:
        with done(arena, fault):
            passed(fault.lasts_s)
            lasted = arena.iteration()
        # An iteration may have been under way that needed nothing of the victim: the second one does.
        arena.wait_beyond(max(before, lasted) + 1, WATCHDOG_S)
    except psutil.NoSuchProcess:
        return True
    except (TimeoutError, RuntimeError, LookupError) as error:
        story.wrong.append(f"{fault.kind.name}, {fault.lasts_s:.0f} s, in iteration {before + 1}: {error}")
        arena.keep_logs(logs)
        return not isinstance(error, RuntimeError)
    seconds = time.monotonic() - begun_s
    measured = Measured(
        kind=fault.kind.name,
        lasts_s=fault.lasts_s,
        seconds=seconds,
        usual_s=2 * median(float(row["iteration_s"] or 0.0) for row in arena.rows()[1:]),
        promise_s=fault.kind.promise_s,
    )
    story.measured.append(measured)
    if measured.is_late:
        arena.keep_logs(logs)
    print(
        f"{arena.name}: {fault.kind.name} for {fault.lasts_s:.1f} s in iteration {before + 1}: {seconds:.1f} s",
        flush=True,
    )
    return True


def judged(arena: Arena, story: Story) -> None:
    """End the run, and look at what it leaves."""
    code = arena.stop()
    if code not in (0, 130):
        story.wrong.append(f"the launcher has ended with {code}: {arena.output[-500:]}")
    ledger, rows = read_ledger(arena.run_dir), [row for row in arena.rows() if row["iteration"]]
    numbers = [int(row["iteration"] or 0) for row in rows]
    versions = [int(row["policy_version"] or 0) for row in rows]
    account = ledger.account
    story.iterations = max(numbers, default=0)
    story.samples = {fate: account.total(fate) for fate in ("begun", "trained", "filtered", "dropped", "returned")}
    story.samples["under way"] = account.under_way
    if numbers != list(range(1, len(numbers) + 1)):
        story.wrong.append("the rows have gaps")
    if any(later < earlier for earlier, later in itertools.pairwise(versions)):
        story.wrong.append(f"versions fall: {versions}")
    story.wrong += [f"ledger: {problem}" for problem in ledger.problems if "replaced" not in problem]
    if account.total("dropped"):
        story.wrong.append(f"samples were lost: {story.samples}")
    if account.counts["returned"] and a_policy_was_given_up(versions):
        story.wrong.append(f"samples were trained for nothing: {story.samples}, versions {versions}")
    scores = [float(row["heldout_accuracy"]) for row in rows if row.get("heldout_accuracy") is not None]
    story.accuracy = max(scores, default=None)
    if story.iterations > LEARNED_AFTER and (story.accuracy or 0.0) < TARGET:
        story.wrong.append(f"it has learned to {story.accuracy} only: {scores}")
    story.wrong += list(grown(story.sizes))
    if left := arena.processes():
        story.wrong.append(f"processes are left: {[process.pid for process in left]}")


def a_policy_was_given_up(versions: list[int]) -> bool:
    """Whether a policy had been trained that is not of the run: its version is one that no row has (take_over.py).

    A leader that ends between the note of a step and the step leaves samples that return and were not trained.

    >>> a_policy_was_given_up([1, 2, 3]), a_policy_was_given_up([1, 2, 4])
    (False, True)
    """
    return versions != list(range(1, len(versions) + 1))


def grown(sizes: list[dict[str, float]]) -> Iterator[str]:
    """Yield what has a higher peak in the second half of a run than in the first; nothing of a short one.

    Peaks, because processes that are started again begin small, and grow until they have seen their largest batch.

    >>> list(grown([{"keys": 10.0}] * 4 + [{"keys": 90.0}] * 2))
    ['keys has grown from 10 to 90']
    """
    half = len(sizes) // 2
    for name in sizes[0] if half > 2 else ():
        first, last = (max(one.get(name, 0.0) for one in part) for part in (sizes[:half], sizes[half:]))
        if last > first * GROWTH + NOISE:
            yield f"{name} has grown from {first:.0f} to {last:.0f}"


def story_of(name: str, faults: list[Fault], deadline_s: float, out: Path) -> Story:
    """Run one of SETUPS under these faults. Logs of what is late are kept in out/logs."""
    story, setup = Story(name=name), SETUPS[name]
    with Arena(name, [*SETTINGS, *setup.settings], setup.file, setup.runs) as arena:
        arena.start()
        for fault in faults:
            if time.monotonic() > deadline_s:
                break
            if not harmed(arena, story, fault, out / "logs" / f"{name}-{len(story.measured)}"):
                break
            story.sizes.append(arena.sizes())
        judged(arena, story)
        if story.wrong:
            arena.keep_logs(out / "logs" / name)
    segments = {path.name for path in Path("/dev/shm").iterdir()}
    if left := sorted(name for name in segments if any(f"_{pid}_" in name for pid in arena.pids)):
        story.wrong.append(f"segments of memory are left: {left}")
    return story


def main() -> int:
    """Run it. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--faults", type=int, default=88)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--runs", default=",".join(SETUPS), help=f"some of {', '.join(SETUPS)}")
    parser.add_argument("--short", action="store_true", help="some kinds that are over in seconds, once each")
    parser.add_argument("--kinds", default="", help="some kinds, by name, separated by commas")
    parser.add_argument("--out", type=Path, default=Path(".cache/chaos"))
    options = parser.parse_args()
    names = SHORT if options.short else tuple(filter(None, options.kinds.split(",")))
    kinds = tuple(kind for kind in KINDS if not names or kind.name in names)
    runs, begun_s = options.runs.split(","), time.monotonic()
    stories = []
    for place, name in enumerate(runs):
        end_s = begun_s + options.minutes * 60.0 * (place + 1) / len(runs)
        there = tuple(kind for kind in kinds if kind.victim not in SETUPS[name].spares)
        number = len(there) if options.short else -(-options.faults // len(runs))
        faults = drawn(options.seed + place, number, there, brief=options.short)
        stories.append(story_of(name, faults, end_s, options.out))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "chaos.json").write_text(json.dumps([asdict(story) for story in stories], indent=1))
    print(written(stories, options.out))
    return 1 if any(story.wrong for story in stories) else 0


if __name__ == "__main__":
    sys.exit(main())
