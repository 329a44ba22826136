"""The order of a round's phases, and the answers to repeated ones: one guard per replica and per rank."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from servicekit.errors import Aborted, PhaseOrder
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round.phases import ABORT, PREPARE, RULES, Phase, Role, name_of, required

# Rounds whose replies are kept; a lost reply is requested again within its round.
KEPT_ROUNDS = 4
# Ids of rounds that are over; a PREPARE that arrives after its ABORT is late by seconds, not by so many rounds.
KEPT_IDS = 64


@dataclass(kw_only=True)
class OpenRound:
    """A round under way at one participant.

    Attributes:
        done: phases that have succeeded here.
        failure: of a phase after which only ABORT helps; "": none.
    """

    message: pb.Round
    role: Role
    done: set[Phase] = field(default_factory=set)
    failure: str = ""

    @property
    def staged(self) -> bool:
        """Whether the new weights are installed from a spare shard at COMMIT."""
        return self.message.install_mode == pb.INSTALL_MODE_STAGED


Open = TypeVar("Open", bound=OpenRound)
Reply = TypeVar("Reply")


def require(current: Open | None, phase: Phase, round_: pb.Round, where: str = "") -> Open:
    """Return the open round, if it is this one and the phase may run now.

    Args:
        where: prefix of the error.
    Raises: PhaseOrder: why the phase may not run.
    """
    if phase not in RULES:
        raise PhaseOrder(f"{where}{phase} is no phase of a round")
    name = name_of(phase).upper()
    if current is None or current.message.round_id != round_.round_id:
        raise PhaseOrder(
            f"{where}{name}: round {round_.round_id!r} is not open here; begin it with {name_of(PREPARE).upper()}"
        )
    if current.failure:
        raise PhaseOrder(f"{where}{name}: round {round_.round_id} has failed ({current.failure}); abort it")
    missing = required(phase, current.role, staged=current.staged) - current.done
    if missing:
        names = ", ".join(name_of(needed).upper() for needed in sorted(missing))
        raise PhaseOrder(f"{where}{name}: round {round_.round_id} has not done {names}")
    return current


class PhaseGuard(Generic[Open, Reply]):
    """One participant's rounds: at most one is open, and its phases run in the order of the table.

    Its rules, for calls in any order:

    * A repeated phase gets the reply of the first call, or its error.
    * PREPARE opens a round, once. It ends the round that is open, unless that is of a newer epoch.
    * A phase that failed fails its round, which then accepts ABORT only.
    * ABORT of a round that is not open only keeps that round from opening later.

    Not thread-safe: the caller holds a lock from `answer` to `answered`, so that a repetition waits for the phase
    under way.

        with lock:
            reply = guard.answer(phase, round_)
            if reply is None:
                if phase == PREPARE and (older := guard.superseded_by(round_)) is not None:
                    ...  # give the older round up, then guard.close(older.message)
                with guard.running(phase, round_) as current:
                    reply = ...  # at COMMIT, guard.close(round_)
                guard.answered(phase, round_, reply)

    Args:
        make: makes the OpenRound of a round that opens.
        where: prefix of errors.
    Attributes:
        current: the open round.
    """

    def __init__(self, make: Callable[[pb.Round], Open], where: str = "") -> None:
        self._make = make
        self._where = where
        self.current: Open | None = None
        self._over: deque[str] = deque(maxlen=KEPT_IDS)
        self._answers: dict[str, dict[Phase, Reply | Exception]] = {}

    def is_open(self, round_: pb.Round) -> bool:
        """Whether this is the open round."""
        return self.current is not None and self.current.message.round_id == round_.round_id

    def answer(self, phase: Phase, round_: pb.Round) -> Reply | None:
        """Return the reply that the phase got before; None: it has not run. Raises: the error that it failed with."""
        answer = self._answers.get(round_.round_id, {}).get(phase)
        if isinstance(answer, Exception):
            raise _without_frames(answer)
        return answer

    def ended_by(self, phase: Phase, round_: pb.Round) -> Open | None:
        """Return the open round that a phase will end, whose own phase need not be waited for; None: it ends none."""
        if self.current is None or self.is_open(round_):
            return self.current if phase == ABORT else None
        is_over, (ours, other) = round_.round_id in self._over, (self.current.message, round_)
        is_older = (other.epoch, other.policy_version) < (ours.epoch, ours.policy_version)
        return self.current if phase == PREPARE and not is_over and not is_older else None

    def superseded_by(self, round_: pb.Round) -> Open | None:
        """Return the open round that PREPARE of this one ends: its coordinator is lost, or would have ended it.

        Raises: PhaseOrder: this round is over; Aborted: it is of an older epoch than the open one.
        """
        if round_.round_id in self._over:
            raise PhaseOrder(f"{self._where}round {round_.round_id} is over; start a new one")
        if self.current is None or self.is_open(round_):
            return None
        newer = self.current.message
        if round_.epoch < newer.epoch:
            raise Aborted(
                f"{self._where}round {round_.round_id} is of epoch {round_.epoch}; {newer.round_id} of epoch "
                f"{newer.epoch} is open"
            )
        return self.current

    @contextmanager
    def running(self, phase: Phase, round_: pb.Round) -> Iterator[Open]:
        """Surround the work of any phase but ABORT; PREPARE opens the round. An error inside fails the round.

        Raises: PhaseOrder: the phase may not run now.
        """
        if phase == PREPARE and not self.is_open(round_):
            if self.superseded_by(round_) is not None:
                raise PhaseOrder(f"{self._where}the open round must be given up before {round_.round_id}")
            self.current = self._make(round_)
        current = require(self.current, phase, round_, self._where)
        try:
            yield current
        except BaseException as error:
            current.failure = f"{name_of(phase).upper()} failed: {error}"
            if isinstance(error, Exception):
                self._keep(phase, round_, _without_frames(error))
            raise

    def answered(self, phase: Phase, round_: pb.Round, reply: Reply) -> None:
        """Record that the phase is done, with its reply."""
        if self.current is not None and self.is_open(round_):
            self.current.done.add(phase)
        self._keep(phase, round_, reply)

    def close(self, round_: pb.Round) -> None:
        """End the round, whether it was open or never came; no PREPARE opens it afterwards."""
        if round_.round_id not in self._over:
            self._over.append(round_.round_id)
        if self.is_open(round_):
            self.current = None

    def _keep(self, phase: Phase, round_: pb.Round, answer: Reply | Exception) -> None:
        self._answers.setdefault(round_.round_id, {})[phase] = answer
        if len(self._answers) > KEPT_ROUNDS:
            open_id = self.current.message.round_id if self.current is not None else ""
            del self._answers[next(round_id for round_id in self._answers if round_id != open_id)]


def _without_frames(error: Exception) -> Exception:
    """Copy the error without its traceback, whose frames hold the memory that the phase worked on."""
    same = type(error).__new__(type(error), *error.args)
    same.__dict__.update(error.__dict__)
    return same
