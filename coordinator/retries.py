"""A run's attempts and its end: repeats it from the newest checkpoint when a trainer was lost; records how it ended.

Failures in a row are counted in the run's folder, because a Kubernetes Job counts those of its whole life:

the attempt that failed                          failures in a row
has written a checkpoint                         0: the next attempt starts further ahead
has started from where the last one did          one more
has started from another checkpoint              1
was stopped by a signal, or has finished         as before; none
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from coordinator.build import App, build_run
from coordinator.fleet.services import find_services
from coordinator.inputs import read_inputs
from coordinator.leader_lease import LeaderCheck, check_lease, may_write
from coordinator.record.state import RunState
from coordinator.record.summary import build_summary
from coordinator.shutdown import Exits, TrainerLost, exit_code_of, follow
from coordinator.watch.control import State
from coordinator.watch.events import EventKind
from servicekit.errors import (
    AlreadyExists,
    ConfigError,
    Fenced,
    Internal,
    TandemError,
    Unavailable,
    describe,
    in_part,
    is_known,
)
from servicekit.lifecycle.exit_codes import EXIT_GIVEN_UP, EXIT_OK
from servicekit.lifecycle.tasks import cancel, end_of, first_of
from servicekit.logs import get_logger
from tandem_config.loading import dump_resolved
from tandem_files.atomic import no_check, remove_each, write_bytes_atomic, write_json_atomic
from tandem_files.checkpoints import newest_iteration
from tandem_files.leader import FAILURES_FILE, read_failures, take_folder
from tandem_files.run_config import note_config
from tandem_files.run_folder import STATE_FILE, SUMMARY_FILE
from weightsync.membership.rendezvous import Evicted

# So many failures from the same checkpoint need a person: the next attempt would fail too.
MAX_FAILURES = 7
# A trainer lost so many times in a row without a finished iteration would be lost again.
MAX_RETURNS = 3
# File that holds disk space, so that a run can write its last state and log lines when the disk is full.
RESERVE_FILE = ".reserve"
# Size of that file: the last state and log lines of all services; far less than a checkpoint.
RESERVE_BYTES = 1 << 20

log = get_logger(__name__)


async def run_or_stop(app: App, stop: asyncio.Event) -> int:
    """Execute the run until a signal (shutdown.py) or another coordinator's take-over, which cancels it immediately.

    Returns: the exit code.
    """
    try:
        began = await asyncio.to_thread(checkpoint_of, app.environment.run_dir)
    except OSError:  # whoever needs the folder says so
        began = None
    work = asyncio.create_task(_work(app), name="run")
    first = await first_of({"run": end_of(work), "lost": end_of(app.lost), "stop": stop})
    if first.name == "lost":
        await cancel(work)
        await _end(app, State.FAILED, f"{app.lost.exception()}; another coordinator leads the run")
        return app.exits.replaced
    if first.name == "stop" and await app.leaving.leave(work, app.config.run.stop_timeout_s):
        await _end(app, State.INTERRUPTED, "by a signal")
        return app.exits.interrupted
    error = Internal("the run was cancelled from inside: see the log") if work.cancelled() else work.exception()
    if error is None:
        await _end(app, State.FINISHED)
        await asyncio.to_thread(forget_failures, app.environment.run_dir, app.leading.check)
        await _release(app, stop, "the run is finished")
        return EXIT_OK
    if isinstance(error, TrainerLost):
        app.observed.life.note("trainer lost", str(error))
    # The boundary of the run: any failure ends it, and is reported with its cause.
    await _make_room(app)
    why = describe(error)
    if not is_known(error):
        log.error("unexpected error", error=why, exc_info=error)
    await _end(app, State.FAILED, why)
    code = exit_code_of(error)
    if isinstance(error, AlreadyExists | Evicted | Fenced):  # the run and its count are another coordinator's
        return code if isinstance(error, AlreadyExists) else app.exits.replaced
    code = await asyncio.to_thread(
        code_after_failure, app.environment.run_dir, began, app.exits, otherwise=code, leading=app.leading
    )
    if code == EXIT_GIVEN_UP:
        await _release(app, stop, "the run is given up")
    return code


async def _release(app: App, stop: asyncio.Event, why: str) -> None:
    """Give the GPUs of a cluster back when fleet.release_after_s have passed, immediately on a stop signal.

    Not if another coordinator leads the run, or begins to.
    """
    after_s = app.config.fleet.release_after_s
    if app.cluster is None or after_s is None:
        return
    if after_s:
        log.info("gpus kept for a while", seconds=after_s)
        await first_of({"lost": end_of(app.lost), "stop": stop}, timeout_s=after_s)
    if await may_write(app.lead, app.lost):
        await asyncio.to_thread(app.cluster.release, why)


def code_after_failure(
    run_dir: Path, began: int | None, exits: Exits, *, otherwise: int, leading: LeaderCheck | None = None
) -> int:
    """Count a failure in a row, and return the exit code that says whether another attempt may do better.

    Args:
        began: iteration of the checkpoint that the attempt started from; None: it did not get so far.
        otherwise: the code where failures are not counted, or cannot be.
        leading: of an attempt that led the run, which writes for the standby that it is given up.
    """
    check = no_check if leading is None else leading.check
    if exits.retry is None:
        return otherwise
    try:
        began = checkpoint_of(run_dir) if began is None else began
        failures = note_failure(run_dir, began, check)
        if failures >= MAX_FAILURES and leading is not None:
            noted = {"iteration": began, "failures": 0, "given_up": leading.leader.token}
            write_json_atomic(run_dir / FAILURES_FILE, noted, check)
        elif failures >= MAX_FAILURES:
            forget_failures(run_dir, check)
    except (OSError, TandemError) as error:
        log.error("failure not counted", error=describe(error))
        return otherwise
    if failures < MAX_FAILURES:
        log.info("another attempt may do better", failures_in_a_row=failures, most=MAX_FAILURES, exit_code=exits.retry)
        return exits.retry
    log.error(
        f"given up: {failures} attempts in a row have failed from the same checkpoint: see their errors",
        iteration=began,
    )
    return EXIT_GIVEN_UP


async def _work(app: App) -> None:
    """Attempt the run, again from its newest checkpoint whenever the cluster replaces a lost trainer.

    Raises: AlreadyExists: another coordinator is alive.
    """
    was_led = app.stood_by
    if not app.stood_by:
        with in_part("lease"):
            was_led = (await asyncio.to_thread(app.lead.rendezvous.leader)).token > 0
            await asyncio.to_thread(app.lead.claim, 2 * app.config.sync.lease_ttl_s)
        app = await as_leader(app)
    if app.inputs.has_begun:
        # A Redis that knows who has led before knows who lives. Into another one those announce themselves in a lease.
        app = replace(app, others_s=0.0 if was_led else app.config.sync.lease_ttl_s)
    if not app.owner.is_launched:
        resolved = dump_resolved(app.config)
        await asyncio.to_thread(note_config, app.environment.run_dir, resolved, app.leading.check)
    if app.cluster is not None:
        app.cluster.api.before_change = app.leading.check
        await app.cluster.start()
    returns = 0
    while True:
        before = app.inputs.state.iteration
        try:
            if await _attempt(app):
                return
        except ConfigError as error:  # e.g. of the trainer, which has refused a damaged checkpoint
            if not app.inputs.unread:
                raise
            log.warning("attempt failed, reading every file of the checkpoint", error=str(error))
            app = await _as_on_disk(app, deep=True)
            continue
        returns = returns + 1 if app.inputs.state.iteration == before else 0
        if returns >= MAX_RETURNS:
            raise Unavailable(
                f"the trainer was lost {returns} times in a row without a finished iteration: see its log"
            )
        app = await _from_checkpoint(app)


async def _attempt(app: App) -> bool:
    """Find the services, execute the run, write its summary. Returns: False: its trainer was lost and replaced."""
    async with AsyncExitStack() as stack:
        with in_part("services of the run"):
            services = await find_services(
                *(app.config, app.registry, app.identity, stack, app.cluster, app.lead.fence),
                wanted=app.view.replicas,
                resumed=app.inputs.resumed,
                others_s=app.others_s,
            )
        app.view.fleet = services.fleet
        await services.wait_for_trainer(app.config.run.startup_timeout_s)
        versions = asyncio.create_task(services.versions(), name="versions")
        stack.push_async_callback(cancel, versions)
        run = build_run(app, services, app.lead.rendezvous, app.lead)
        save = partial(
            run.checkpoints.save_for_trainer,
            app.leaving.settled,
            run.schedule.may_train,
            app.config.run.stop_timeout_s,
        )
        following = asyncio.create_task(follow(services.trainer, app.leaving, save), name="follow-trainer")
        try:
            await run.execute()
        except TandemError as error:
            app.leaving.saves = False  # the trainer is ahead of the run's state, or lost
            if services.guard is None:
                await services.raise_if_trainer_lost(error)
            if services.guard is None or app.leaving.stopping:
                raise
            app.leaving.renew()
            lost_s = time.time()
            await services.guard.wait_for_return(error)
            app.observed.life.note("trainer lost", str(error), since_s=lost_s)
            return False
        finally:
            await cancel(following)
        if app.leaving.left:
            return True
        summary = build_summary(run.state, run.rows.rows(), await versions)
        write_json_atomic(app.environment.run_dir / SUMMARY_FILE, summary, app.leading.check)
        return True


async def _from_checkpoint(app: App) -> App:
    """Return the app as after a restart with --resume from the newest checkpoint, and warn of the lost iterations."""
    done = app.inputs.state.iteration
    app.observed.life.begins("trainer restarted", done, app.inputs.state.totals.generated_tokens)
    app = replace(await _as_on_disk(app), others_s=0.0)
    state = app.inputs.state
    message = f"trainer restarted: resuming after iteration {state.iteration}, {done} were done"
    log.warning(message, iteration=state.iteration, done=done)
    app.events.append(EventKind.WARNING, message)
    return app


async def as_leader(app: App) -> App:
    """Take the run's folder, and return the app as it is on disk: a predecessor may have worked until now."""
    run_dir = app.environment.run_dir
    await asyncio.to_thread(release_reserve, run_dir)
    await asyncio.to_thread(take_folder, run_dir, app.leading.leader, partial(check_lease, app.lead))
    await asyncio.to_thread(app.observed.life.load, app.leading)
    await asyncio.to_thread(take_reserve, run_dir)
    return await _as_on_disk(app) if app.inputs.resumed else app


async def _as_on_disk(app: App, *, deep: bool = False) -> App:
    """Return the app with the state of the newest checkpoint; the state object stays the same, for its readers."""
    before, run_dir = app.inputs, app.environment.run_dir
    inputs = await asyncio.to_thread(read_inputs, app.config, run_dir, resume=True, data=before.data, deep=deep)
    was, now = before.checkpoint, inputs.checkpoint
    if inputs.unread and not before.unread and was is not None and now is not None and was.folder == now.folder:
        inputs = replace(inputs, checkpoint=was, unread=False)
    before.state.become(inputs.state)
    return replace(app, inputs=replace(inputs, state=before.state))


async def _make_room(app: App) -> bool:
    """Free the disk reserve for the final records, if we may write to the run's folder. Returns: whether we may."""
    ours = await may_write(app.lead, app.lost)
    if ours:
        release_reserve(app.environment.run_dir)
    return ours


async def _end(app: App, ended: State, why: str = "") -> None:
    """Record how the run ended: on disk if we still lead the run, in the status, in the log's last line."""
    state = app.inputs.state
    state.status, state.error, state.fence = ended.value, why, app.lead.fence.token
    if await _make_room(app):
        app.observed.life.note("coordinator ended", f"{ended.value}: {why}" if why else ended.value)
        try:
            state.save(app.environment.run_dir / STATE_FILE, app.leading.check)
        except Exception as error:  # noqa: BLE001 - the log still says how the run ended
            log.error("run state not written", error=describe(error))
    app.control.enter(ended, why)
    say_how_it_ended(state)


def say_how_it_ended(state: RunState) -> None:
    """Log how the run ended: the last line of a coordinator that has failed."""
    at = {"iteration": state.iteration, "policy_version": state.policy_version}
    if state.status == State.FAILED.value:
        log.error("run failed", error=state.error, **at)
    else:
        log.info(f"run {state.status}", why=state.error, **at)


def take_reserve(run_dir: Path) -> None:
    """Write the reserve file; a failure is only logged, because the run fails on a full disk anyway."""
    try:
        # Zeros suffice on common file systems; one that compresses would need random bytes.
        write_bytes_atomic(run_dir / RESERVE_FILE, bytes(RESERVE_BYTES))
    except OSError as error:
        log.warning("disk reserve not taken", error=str(error))


def release_reserve(run_dir: Path) -> None:
    """Remove the reserve file; call it before the last state is written."""
    try:
        (run_dir / RESERVE_FILE).unlink(missing_ok=True)
    except OSError as error:
        log.warning("disk reserve not released", error=str(error))


def checkpoint_of(run_dir: Path) -> int:
    """Return the iteration that an attempt resumes from: of the newest checkpoint, 0 without one."""
    return newest_iteration(run_dir) or 0


def note_failure(run_dir: Path, began: int, before_write: Callable[[], None] = no_check) -> int:
    """Count the failure of an attempt.

    Args:
        began: iteration of the checkpoint that it started from.
        before_write: as in write_bytes_atomic.
    Returns: failures in a row, this one included; 0: it has written a newer checkpoint.
    Raises: OSError: the count cannot be written.
    """
    newest = checkpoint_of(run_dir)
    failures = 0 if newest > began else _known(run_dir, began) + 1
    noted = {"iteration": max(newest, began), "failures": failures}
    write_json_atomic(run_dir / FAILURES_FILE, noted, before_write)
    return failures


def forget_failures(run_dir: Path, before_write: Callable[[], None] = no_check) -> None:
    """Begin to count anew: the run is over, or is given up, and a person decides. Takes: as remove_each."""
    try:
        left = remove_each([run_dir / FAILURES_FILE], before_write)
    except TandemError as error:
        left = [describe(error)]
    for text in left:
        log.warning("count of failures not removed", error=text)


def _known(run_dir: Path, began: int) -> int:
    """Return the failures in a row from this checkpoint; 0 if the file is missing or damaged."""
    try:
        noted = read_failures(run_dir)
        return int(noted["failures"]) if noted and int(noted["iteration"]) == began else 0
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning("count of failures not read, counting anew", error=str(error))
        return 0
