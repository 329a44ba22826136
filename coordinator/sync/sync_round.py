"""One weight-sync round: its phases in order, on the sender (the trainer, or a replica) and every receiving replica.

The table of phases is weightsync/round/phases.py. Checks after PREPARE that all plans are equal, and after TRANSFER
that each rank received the bytes of its shard. COMMIT is sent once more if its reply is lost. Up to VERIFY all succeed
or the round is aborted, but for a sender that is lost once every replica has verified its own bytes: it has done its
part. From COMMIT on every replica has done so: losing one does not undo the others.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from coordinator.sync.blame import CONTAGIOUS
from coordinator.sync.slot_watch import SlotWatch
from coordinator.sync.sync_report import RoundReports
from servicekit.errors import DeadlineExceeded, Fenced, PeerLost, TandemError, Unavailable
from servicekit.lifecycle.tasks import cancel, first_of
from servicekit.logs import get_logger
from servicekit.tracing import span
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.flow import ReplicaOutcome
from tandem_clients.probing import NoAnswer, while_alive
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer
from weightsync.round.phases import (
    ABORT,
    COMMIT,
    PREPARE,
    TRANSFER,
    Phase,
    PhaseRule,
    Role,
    calls_of,
    first_write,
    name_of,
)

# A rank that fails closes its connections, and its peers report PeerLost immediately. The rank's own error, which has
# the cause, may arrive a moment later; so may what others say to what all may see alike (blame.py). The second: for
# others that fail by themselves as well.
BLAME_S, OTHERS_S = 1.0, 0.1
# What ABORT and the question for a state may take of a participant that has not answered a probe: it was waited for.
SECOND_CHANCE_S = 1.0

log = get_logger(__name__)

Reports = list[weights_pb2.PhaseReport]


Participant: TypeAlias = Trainer | Replica
T = TypeVar("T")


class Straggler(Unavailable):
    """A replica was too much slower than the others."""


class SyncRound:
    """One round; `run` it once, `abort` it if that raises.

    Args:
        sender: the trainer, or the replica that the description names as the source.
        probe_timeout_s: a participant that does not answer a status call for so long is lost.
        straggler_s: replicas that take so much longer than the others in a phase fail; None: only with its deadline.
        usual_s: what a round takes, if there are no others to compare with; None: it is not known.
        slots: notices replicas with a rank that loses its slot meanwhile; None: they are not noticed.
    Attributes:
        reports: figures of the ranks, complete once `run` has returned.
        outcomes: by replica, how the round ended for it.
        errors: by participant, of the call that failed.
        unreachable: replicas that did not answer when the round was given up.
        is_pressed: ABORT and the question for states get SECOND_CHANCE_S of each: a publication waits for them.
    """

    def __init__(
        self,
        description: weights_pb2.Round,
        sender: Participant,
        replicas: Sequence[Replica],
        *,
        probe_timeout_s: float = 10.0,
        straggler_s: float | None = None,
        usual_s: float | None = None,
        slots: SlotWatch | None = None,
    ) -> None:
        self.description = description
        self.reports = RoundReports()
        self.outcomes: dict[str, ReplicaOutcome] = {}
        self.errors: dict[str, TandemError] = {}
        self.unreachable: set[str] = set()
        self.is_pressed = False
        self._slots = slots
        self._sender, self._replicas = sender, tuple(replicas)
        self._everyone: tuple[Participant, ...] = (sender, *replicas)
        self._probe_timeout_s = probe_timeout_s
        self._straggler_s, self._usual_s = straggler_s, usual_s
        # Names of participants that have not answered a probe.
        self._silent: set[str] = set()
        self._begun: Phase = weights_pb2.ROUND_PHASE_UNSPECIFIED

    async def run(self) -> None:
        """Run all phases, filling `reports` and `outcomes`.

        Raises: TandemError: of the participant that failed first, with its name; no replica has committed.
        """
        answers = []
        for rules in calls_of(staged=self._is_staged):
            answers.append(await self._commit() if rules[0].phase == COMMIT else await self._phases(rules))
            self._check(rules[0].phase, answers[-1])
        for reports in answers:
            self.reports.add(reports)

    def _check(self, phase: Phase, reports: dict[str, Reports]) -> None:
        """Raises: Internal, DigestMismatch: the participants' reports contradict each other."""
        wrong: dict[str, TandemError] = {}
        if phase == PREPARE:
            wrong = self.reports.check_plans(reports, self._sender.name)
        if phase == TRANSFER:
            wrong = self.reports.check_bytes({replica.name: reports[replica.name] for replica in self._replicas})
        if wrong:
            self.errors = wrong
            raise next(iter(wrong.values()))

    async def _commit(self) -> dict[str, Reports]:
        """Commit on every participant that can; abort on the others. Raises: TandemError: no replica has committed."""
        self._begun = COMMIT
        with span("sync commit"):
            calls = {participant.name: self._commit_one(participant) for participant in self._everyone}
            async with self._calls(calls, is_over=lambda _: False) as tasks:
                by_name = {name: _late_of(task) or task.result() for name, task in tasks.items()}
        done = {name: answer for name, answer in by_name.items() if not isinstance(answer, TandemError)}
        failed = {name: answer for name, answer in by_name.items() if isinstance(answer, TandemError)}
        self.errors = failed
        for name, error in failed.items():
            log.warning("COMMIT failed", participant=name, round_id=self.description.round_id, error=str(error))
        if not any(replica.name in done for replica in self._replicas):
            raise next(iter(failed.values()))
        await self.abort([participant for participant in self._everyone if participant.name in failed])
        self.outcomes |= {replica.name: ReplicaOutcome.COMMITTED for replica in self._replicas if replica.name in done}
        return done

    async def _commit_one(self, participant: Participant) -> Reports | TandemError:
        """Send COMMIT, again if its reply is lost: it is idempotent, so a lost reply does not undo a finished round."""
        try:
            return await self._call((COMMIT,), participant)
        except (Unavailable, DeadlineExceeded) as error:
            log.warning("COMMIT reply lost, sending it again", error=str(error))
        except TandemError as error:
            return error
        try:
            return await self._call((COMMIT,), participant)
        except TandemError as error:
            return error

    async def abort(self, participants: Sequence[Participant] | None = None) -> list[str]:
        """Abort the round on `participants`, all by default, and record in `outcomes` what it left on the replicas.

        Returns: as text, the state of each replica, and the errors of participants that did not confirm the abort.
        """
        concerned = self._everyone if participants is None else tuple(participants)
        answers = await asyncio.gather(*(self._abort_one(participant) for participant in concerned))
        replicas = [replica for replica in self._replicas if replica in concerned]
        states = await asyncio.gather(*(self._settle(replica) for replica in replicas))
        return [*states, *(f"abort: {answer}" for answer in answers if answer is not None)]

    async def _abort_one(self, participant: Participant) -> TandemError | None:
        # With the deadline of any phase: a participant that waits for a lost peer answers only when that wait is over.
        is_silent = self.is_pressed or participant.name in self._silent
        try:
            async with asyncio.timeout(SECOND_CHANCE_S if is_silent else None):
                await self._call((ABORT,), participant)
        except TimeoutError:
            return DeadlineExceeded(f"{participant.name} still does not answer")
        except TandemError as error:
            return error
        return None

    async def _settle(self, replica: Replica) -> str:
        """Ask a replica for the state that the round left: an RPC error only says that a reply was lost."""
        is_silent = self.is_pressed or replica.name in self._silent
        timeout_s = min(self._probe_timeout_s, SECOND_CHANCE_S) if is_silent else self._probe_timeout_s
        try:
            status = await replica.status(timeout_s=timeout_s)
        except TandemError as error:
            self.outcomes[replica.name] = ReplicaOutcome.POISONED if self._may_have_written else ReplicaOutcome.ABORTED
            self.unreachable.add(replica.name)
            return f"{replica.name} does not answer ({error})"
        self.outcomes[replica.name] = self._outcome_of(status)
        state = weights_pb2.ReplicaState.Name(status.state).removeprefix("REPLICA_STATE_").lower()
        return f"{replica.name} is {state} at version {status.policy_version}"

    def _outcome_of(self, status: rollout_pb2.GetStatusResponse) -> ReplicaOutcome:
        unfinished = status.state == weights_pb2.REPLICA_STATE_PAUSED and self._may_have_written
        if status.state == weights_pb2.REPLICA_STATE_POISONED or unfinished:
            return ReplicaOutcome.POISONED
        serves = status.state == weights_pb2.REPLICA_STATE_SERVING
        # Before COMMIT no replica can have this round's version; an equal one is from an earlier round.
        new = self._begun == COMMIT and status.policy_version == self.description.policy_version
        return ReplicaOutcome.COMMITTED if serves and new else ReplicaOutcome.ABORTED

    @property
    def _may_have_written(self) -> bool:
        """Whether a replica whose state is unknown may hold a mixture of versions."""
        return self._begun >= first_write(staged=self._is_staged)

    @property
    def _is_staged(self) -> bool:
        return self.description.install_mode == weights_pb2.INSTALL_MODE_STAGED

    async def _phases(self, rules: Sequence[PhaseRule]) -> dict[str, Reports]:
        """Run the phases of one call on all of their participants concurrently: they wait for each other inside it."""
        self._begun = rules[0].phase
        with span(f"sync {rules[0].name}"):
            own = {participant: self._own(rules, participant) for participant in self._everyone}
            return await self._on_all({participant: phases for participant, phases in own.items() if phases})

    def _own(self, rules: Sequence[PhaseRule], participant: Participant) -> list[Phase]:
        """Return the phases in which a participant has work."""
        role = Role.SENDER if participant is self._sender else Role.REPLICA
        return [rule.phase for rule in rules if role in rule.roles]

    async def _on_all(self, phases: Mapping[Participant, Sequence[Phase]]) -> dict[str, Reports]:
        calls = {participant.name: self._call(own, participant) for participant, own in phases.items()}
        async with self._calls(calls, is_over=lambda task: task.exception() is not None) as tasks:
            await wait_for_cause(tasks)
            lost = await self._lost_after_its_part(tasks)
            self.errors = {name: error for name, error in errors_of(tasks).items() if name != lost}
            raise_first({name: task for name, task in tasks.items() if name != lost})
            return {name: task.result() for name, task in tasks.items() if name != lost}

    @contextlib.asynccontextmanager
    async def _calls(
        self, calls: Mapping[str, Coroutine[Any, Any, T]], is_over: Callable[["asyncio.Task[T]"], bool]
    ) -> AsyncIterator[dict[str, "asyncio.Task[T]"]]:
        """Run the calls of a phase until all have ended, or one so that the phase is over; stragglers fail.

        Args:
            calls: by participant.
        """
        late = {name: asyncio.Event() for name in calls}
        step = weights_pb2.RoundPhase.Name(self._begun)
        tasks = {
            name: asyncio.create_task(
                call if self._straggler_s is None else self._unless(late[name], name, call), name=f"{step}-{name}"
            )
            for name, call in calls.items()
        }
        clock = asyncio.get_running_loop().time
        begun_s = last_s = clock()
        try:
            while not all(task.done() for task in tasks.values()):
                slow = [replica.name for replica in self._replicas if not tasks[replica.name].done()]
                most_s = None if any(late[name].is_set() for name in slow) else self._most_s(slow, last_s - begun_s)
                running = [task for task in tasks.values() if not task.done()]
                timeout_s = None if most_s is None else begun_s + most_s - clock()
                done, _ = await asyncio.wait(running, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for name in () if done else slow:
                    late[name].set()
                last_s = clock()
                if any(is_over(task) for task in done):
                    break
            yield tasks
        finally:
            await cancel(*tasks.values())

    def _most_s(self, slow: Sequence[str], others_s: float) -> float | None:
        """Return how long the calls of a phase may take; None: as long as their own deadline allows.

        Args:
            slow: replicas that are not done; at most half of them count as slow.
            others_s: what the others have taken.
        """
        if self._straggler_s is None or not slow:
            return None
        if 2 * len(slow) <= len(self._replicas):
            return 2 * others_s + self._straggler_s
        return None if self._usual_s is None else self._usual_s + self._straggler_s

    async def _unless(self, late: asyncio.Event, name: str, call: Coroutine[Any, Any, T]) -> T:
        first = await first_of({"call": call, "late": late})
        if first.name == "late":
            raise Straggler(
                f"{name} took {self._straggler_s:g} s longer than the others in {name_of(self._begun)} "
                "(sync.straggler_timeout_s)"
            )
        return cast(T, first.value)

    async def _lost_after_its_part(self, tasks: "Mapping[str, asyncio.Task[Reports]]") -> str | None:
        """Return the sender's name if only its reply was lost: every replica has received and verified all bytes."""
        sending = tasks.get(self._sender.name)
        if self._begun != TRANSFER or sending is None or not sending.done() or not _is_loss(sending.exception()):
            return None
        receiving = [task for name, task in tasks.items() if task is not sending]
        await asyncio.wait(receiving, timeout=BLAME_S, return_when=asyncio.FIRST_EXCEPTION)
        if not all(task.done() and task.exception() is None for task in receiving):
            return None
        name = self._sender.name
        log.warning("reply of the sender lost: it had sent everything", sender=name, round_id=self.description.round_id)
        return name

    async def _call(self, phases: Sequence[Phase], participant: Participant) -> Reports:
        call = participant.rounds.run_phases(phases, self.description)
        try:
            watched = self._slots is not None and isinstance(participant, Replica)
            lost = self._slots.until_lost(participant.name) if self._slots is not None and watched else None
            return await while_alive(call, participant, probe_timeout_s=self._probe_timeout_s, lost=lost)
        except NoAnswer:
            self._silent.add(participant.name)
            raise


def _late_of(task: "asyncio.Task[Any]") -> Straggler | None:
    """Return the error of a straggler. Raises: any other."""
    error = task.exception()
    if error is not None and not isinstance(error, Straggler):
        raise error
    return error


def _is_loss(error: BaseException | None) -> bool:
    return isinstance(error, (PeerLost, Unavailable, DeadlineExceeded))


async def wait_for_cause(tasks: Mapping[str, "asyncio.Task[Reports]"], blame_s: float = BLAME_S) -> None:
    """After an error: wait for the others' up to `blame_s`, or OTHERS_S after one that has its own cause.

    Not after a loss, which is the cause; nor without an error.
    """
    begun_s = asyncio.get_running_loop().time()
    while True:
        errors = errors_of(tasks).values()
        running = [task for task in tasks.values() if not task.done()]
        has_own = any(not isinstance(error, CONTAGIOUS) for error in errors)
        left_s = begun_s + (min(OTHERS_S, blame_s) if has_own else blame_s) - asyncio.get_running_loop().time()
        if not running or not errors or left_s <= 0 or any(isinstance(error, NoAnswer) for error in errors):
            return
        await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)


def errors_of(tasks: Mapping[str, "asyncio.Task[Reports]"]) -> dict[str, TandemError]:
    """Return the errors so far, by participant. Raises: what is no TandemError."""
    found = {name: task.exception() for name, task in tasks.items() if task.done()}
    for error in found.values():
        if error is not None and not isinstance(error, TandemError):
            raise error
    return {name: error for name, error in found.items() if isinstance(error, TandemError)}


def raise_first(tasks: Mapping[str, "asyncio.Task[Reports]"]) -> None:
    """Raise the first error, if any; prefer a Fenced, then a peer's own error to the PeerLost that others saw."""
    errors = sorted(
        errors_of(tasks).values(), key=lambda error: (not isinstance(error, Fenced), isinstance(error, PeerLost))
    )
    if errors:
        raise errors[0]
