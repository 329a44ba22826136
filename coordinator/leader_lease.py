"""Our claim to be the run's only coordinator: waited for by a standby, checked before anything is written."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from servicekit.environment import ServiceEnvironment
from servicekit.errors import AlreadyExists, ConfigError, TandemError, Unavailable, describe, in_part
from servicekit.lifecycle.exit_codes import EXIT_FAILED, EXIT_GIVEN_UP, EXIT_OK
from servicekit.lifecycle.tasks import first_of
from servicekit.logs import get_logger
from tandem_api.common.v1 import common_pb2
from tandem_files.leader import LEADER_FILE, FolderLeader, read_failures, read_leader
from tandem_files.run_folder import read_state
from weightsync.membership.coordinator_lease import CoordinatorLease
from weightsync.membership.rendezvous import COORDINATOR_SLOT, Evicted, Rendezvous

_RETRY_S = 0.2
# Between two looks of a standby at the lease: a fraction of what a take-over takes besides.
_LOOK_S = 0.1
# Every so many looks at the lease, one at the run's state.
_LOOKS_AT_STATE = 10
# Leases for which a leader may seem not to fit: a folder of a network file system shows new files after a minute.
_PATIENCE_TTLS = 4.0
log = get_logger(__name__)


class LeaderLease(Protocol):
    """The claim (weightsync.membership.coordinator_lease.CoordinatorLease); its methods block."""

    @property
    def fence(self) -> common_pb2.CoordinatorFence:
        """The fence that calls carry if they change something."""
        ...

    @property
    def is_held(self) -> bool:
        """Whether the lead was acquired, and no other coordinator is known to have taken over since."""
        ...

    @property
    def left_s(self) -> float:
        """Seconds for which no other coordinator can acquire the lead, whether Redis answers or not."""
        ...

    def confirm(self, epoch: int, slots: Iterable[str]) -> None:
        """Check with Redis that we lead the run, and that these slots are as they were in the epoch.

        Raises: Evicted: another coordinator has taken over; Aborted: a slot has changed; Unavailable: no answer.
        """
        ...

    def hold(self) -> None:
        """Check with Redis that we lead the run.

        Raises: Evicted: another coordinator has taken over; Unavailable: Redis does not answer.
        """
        ...


async def check_lead(lead: LeaderLease, patience_s: float) -> None:
    """Return once it is certain that we lead the run; called before a row, a state or a checkpoint is written.

    Args:
        patience_s: how long to wait for Redis, once our lease may have run out.
    Raises: Evicted: another coordinator has taken over; Unavailable: Redis was unreachable for longer.
    """
    deadline_s = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            with in_part("lease"):
                await asyncio.to_thread(lead.hold)
            return
        except Unavailable as error:
            if lead.left_s > 0:
                return
            if asyncio.get_running_loop().time() >= deadline_s:
                raise Unavailable(
                    f"waited {patience_s:g} s to learn whether this coordinator still leads the run: {error}"
                ) from error
        await asyncio.sleep(_RETRY_S)


def check_lease(lead: LeaderLease) -> None:
    """Check the lead in the moment before a write: by our own clock while our lease lasts, else with Redis.

    So a process that was stopped for longer than its lease since check_lead notices, without a call to Redis per write.
    Raises: Evicted: another coordinator has taken over; Unavailable: Redis does not answer.
    """
    if lead.left_s <= 0:
        lead.hold()


async def may_write(lead: LeaderLease, lost: "asyncio.Future[None]") -> bool:
    """Whether no other coordinator is known to lead the run.

    True while Redis is unreachable: a run that fails because of that records it on disk.

    Args:
        lost: done once another coordinator is known to have taken over.
    """
    if not lead.is_held or lost.done():
        return False
    try:
        await check_lead(lead, patience_s=0.0)
    except Unavailable:
        return True
    except Evicted:
        return False
    except Exception as error:  # noqa: BLE001 - of a run that ends, whose first error counts
        log.warning("lead not confirmed", error=describe(error))
        return lead.left_s > 0
    return True


@dataclass(frozen=True, kw_only=True)
class LeaderCheck:
    """Checks that we lead the run, before anything of it is written.

    Attributes:
        patience_s: how long to wait for Redis to confirm it.
        run_dir: the run's folder, which we have taken (tandem_files/leader.py); None: there is none to take.
    """

    lease: LeaderLease
    patience_s: float
    run_dir: Path | None = None

    @property
    def leader(self) -> FolderLeader:
        """Ourselves, as the run's folder names us."""
        return FolderLeader(worker_id=self.lease.fence.worker_id, token=self.lease.fence.token)

    async def confirm(self) -> None:
        """Wait until it is certain. Raises: Evicted: another coordinator has taken over."""
        await check_lead(self.lease, self.patience_s)

    def check(self) -> None:
        """Check immediately before a file is changed. Raises: as check_lease; Fenced: another has taken the folder."""
        check_lease(self.lease)
        if self.run_dir is not None:
            self.leader.check(self.run_dir)


@dataclass(frozen=True, kw_only=True)
class RunOver:
    """The run has ended while a standby waited.

    Attributes:
        code: the standby's exit code.
    """

    code: int
    why: str


class Standby:
    """Waits behind the coordinator that leads a run, and takes the lead when that one's lease is over.

    Args:
        ttl_s: of the lease.
        differences: how our configuration differs from that of the run, as texts.
        retried: a coordinator that has failed is started again; else its run is over.
    """

    def __init__(
        self,
        lead: CoordinatorLease,
        run_dir: Path,
        ttl_s: float,
        differences: Callable[[], list[str]],
        *,
        retried: bool,
    ) -> None:
        self._lead, self._run_dir, self._ttl_s = lead, run_dir, ttl_s
        self._differences, self._retried = differences, retried
        self._newest = common_pb2.CoordinatorFence()
        self._since_s = 0.0  # when it was first seen
        # Tokens of leaders: one that was seen alive, one that fits us.
        self._seen = self._fitting = 0
        self._lost_s: float | None = None  # since when Redis does not know the newest one any more

    async def wait(self, stop: asyncio.Event) -> RunOver | None:
        """Wait until we lead, or until `stop`. Returns: None; or how the run has ended instead.

        Raises: ConfigError: the run's leader has another configuration, or another folder.
        """
        is_silent = False
        for look in count():
            if stop.is_set():
                break
            try:
                leads, is_silent = await asyncio.to_thread(self._claim), False
            except Unavailable as error:
                if not is_silent:
                    log.warning("standby: lease not known, Redis does not answer", error=str(error))
                leads, is_silent = False, True
            over = await asyncio.to_thread(self._over) if leads or look % _LOOKS_AT_STATE == 0 else None
            if over is not None or leads:
                return over
            if not look:
                log.info("standby: waiting for the lead", leader=self._newest.worker_id, token=self._newest.token)
            await first_of({"stop": stop}, timeout_s=_LOOK_S)
        return None

    def _claim(self) -> bool:
        """Claim the lead, if it is free. Returns: whether we lead."""
        newest, now_s = self._lead.rendezvous.leader(), time.monotonic()
        if newest.token < self._newest.token:
            # Redis has lost its data: a leader that lives takes its slot again before its lease would be over.
            self._lost_s = now_s if self._lost_s is None else self._lost_s
            if now_s - self._lost_s < self._ttl_s:
                return False
        elif newest.token > self._newest.token:
            self._newest, self._since_s = newest, now_s
        self._lost_s = None if newest.token >= self._newest.token else self._lost_s
        try:
            self._lead.claim(0.0)
        except AlreadyExists:
            self._seen = self._newest.token
            self._check_leader(now_s)
            return False
        if self._seen and self._seen == self._newest.token != self._fitting and self._complaint():
            self._lead.close()
            raise ConfigError(self._complaint())
        return True

    def _check_leader(self, now_s: float) -> None:
        """Raises: ConfigError: we have not fitted the living leader for longer than it takes to begin."""
        if self._fitting == self._newest.token:
            return
        complaint = self._complaint()
        if not complaint:
            self._fitting = self._newest.token
        elif now_s - self._since_s >= _PATIENCE_TTLS * self._ttl_s:
            raise ConfigError(complaint)

    def _complaint(self) -> str:
        name = f"coordinator {self._newest.worker_id}"
        try:
            leader = read_leader(self._run_dir)
        except OSError as error:
            return f"{name} leads the run, and its folder cannot be read: {error}"
        if leader is None or leader.token < self._newest.token:
            return (
                f"{name} leads the run, and {self._run_dir / LEADER_FILE} does not name it: this process has another "
                "folder under that path (TANDEM_RUN_DIR), not the run's: mount the same file system"
            )
        differences = self._differences()
        return f"{name} leads the run with another configuration: {'; '.join(differences)}" if differences else ""

    def _over(self) -> RunOver | None:
        """Return how the leader that we were waiting for has ended the run; None: it has not."""
        state = read_state(self._run_dir)
        if not self._seen or state.get("fence") != self._seen:
            return None
        if state.get("status") == "finished":
            return RunOver(code=EXIT_OK, why="the run is finished")
        with contextlib.suppress(OSError, ValueError):  # whoever counts says what is wrong with the file
            if read_failures(self._run_dir).get("given_up") == self._seen:
                return RunOver(code=EXIT_GIVEN_UP, why=f"the run is given up: {state.get('error')}")
        if state.get("status") == "failed" and not self._retried:
            return RunOver(code=EXIT_FAILED, why=f"the run has failed: {state.get('error')}")
        return None


def is_led(environment: ServiceEnvironment, *, unknown: bool) -> bool:
    """Whether a coordinator leads the run now; `unknown`: Redis does not answer. Blocking."""
    try:
        members = Rendezvous(environment.redis_url, f"tandem:{environment.run_id}").snapshot().members
    except TandemError:
        return unknown
    return COORDINATOR_SLOT in members
