"""Finds the participants of a round: services that are present, so answer and hold their slots in the weight group.

A replica that is not present is left out, and not waited for again until it is back (excluded_replicas.py). The roll
call waits, until its deadline, for the trainer and rollout.min_replicas replicas; while too few are left and others are
held in a queue, the deadline does not come nearer.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.sync.excluded_replicas import LeftOut
from servicekit.errors import ConfigurationSkew, DeadlineExceeded, StaleVersion, TandemError, Unavailable, WrongVersion
from servicekit.logs import get_logger
from servicekit.redis.registry import SETTINGS_ADVICE
from tandem_api.rollout.v1 import rollout_pb2
from tandem_api.trainer.v1 import trainer_pb2
from tandem_api.weights.v1 import weights_pb2
from tandem_clients.fleet import LOOK_INTERVAL_S, Fleet
from tandem_clients.replica import Replica
from tandem_clients.trainer import Trainer
from weightsync.layouts.layout import Parallel
from weightsync.membership.rendezvous import Membership
from weightsync.plans.participants import Participants, rollout_slot, trainer_slot

# A poll of the group that is running when the run is cancelled can delay the exit by this long.
_WAIT_SLICE_S = 0.5
# What to do when the versions of trainer or replicas contradict the run's.
RESUME_ADVICE = (
    "end the run and resume from its newest checkpoint (--resume), which gets a version that no service has had"
)

log = get_logger(__name__)


class WeightGroup(Protocol):
    """The weight group (weightsync.membership.rendezvous.Rendezvous); blocking."""

    @property
    def group(self) -> str:
        """Name of the weight group, as participants join it."""
        ...

    def settle(self, slots: Sequence[str], timeout_s: float) -> Membership:
        """Wait until all of `slots` are held, or for `timeout_s`. Returns: the group then, complete or not."""
        ...


class Agreement(Protocol):
    """The settings on which the run's services must agree (servicekit.redis.registry.Registry)."""

    @property
    def settings_digest(self) -> str:
        """Digest of the coordinator's own."""
        ...

    def explain_settings(self, digest: str) -> str:
        """Say in which settings a service with this digest differs; blocking."""
        ...


@dataclass(frozen=True, kw_only=True)
class PresentServices:
    """Trainer and replicas that are present, and the epoch of their group.

    Attributes:
        trainer: None: it was not asked.
        source: the replica that sends in its place, if there is one.
    """

    epoch: int
    trainer: trainer_pb2.GetStatusResponse | None = None
    source: dict[Replica, rollout_pb2.GetStatusResponse] = field(default_factory=dict)
    replicas: dict[Replica, rollout_pb2.GetStatusResponse]

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots of all of them."""
        return Participants.of_round(parallel_sizes(self)).slots


@dataclass(kw_only=True)
class _Look:
    """One look at the services: the statuses of those that answered; by name, why the others do not count."""

    trainer: trainer_pb2.GetStatusResponse | None = None
    replicas: dict[Replica, rollout_pb2.GetStatusResponse] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)


class _Wait:
    """A wait for services; it begins again when replicas leave a queue."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._is_queued = False

    @property
    def waited_s(self) -> float:
        """How long it has taken so far, without what was before and in a queue."""
        return time.monotonic() - self._begun_s

    def note(self, is_queued: bool, absent: Mapping[str, str]) -> None:
        """Note whether the replicas that it waits for are queued now."""
        if is_queued and not self._is_queued:
            log.warning("too few replicas, others are queued: waiting as long as they are", absent=dict(absent))
        if not is_queued and self._is_queued:
            log.info("replicas are no longer queued", queued_s=round(self.waited_s, 1))
            self._begun_s = time.monotonic()
        self._is_queued = is_queued


class RollCall:
    """Finds out which services are present.

    Args:
        agreement: the settings on which the services must agree; None: they are not compared.
        probe_timeout_s: a service whose status does not arrive in this time is absent.
        slots_timeout_s: a service with a rank without its slot for so long is absent.
        timeout_s: how long to wait for the trainer and min_replicas replicas to be present.
        ending: once it is set, because the run is to end, no service is waited for.
        is_queued: whether replicas are held in a queue.
        left_out: gets the replicas that were waited for in vain.
    Attributes:
        absent: why services were not present at the last call that found enough.
    """

    def __init__(
        self,
        *,
        trainer: Trainer,
        fleet: Fleet,
        group: WeightGroup,
        min_replicas: int,
        probe_timeout_s: float,
        slots_timeout_s: float,
        timeout_s: float,
        ending: asyncio.Event,
        agreement: Agreement | None = None,
        is_queued: Callable[[], bool] = lambda: False,
        left_out: LeftOut | None = None,
    ) -> None:
        self._left_out = LeftOut() if left_out is None else left_out
        # Questions to replicas that have not answered one: these are not waited for.
        self._asked: dict[Replica, asyncio.Task[bool]] = {}
        self.absent: dict[str, str] = {}
        self._agreement, self._is_queued = agreement, is_queued
        self._trainer, self._fleet, self._group, self._ending = trainer, fleet, group, ending
        self._min_replicas = min_replicas
        self._probe_timeout_s, self._slots_timeout_s, self._timeout_s = probe_timeout_s, slots_timeout_s, timeout_s

    async def call(self, policy_version: int, *, rejoin_timeout_s: float | None = None) -> PresentServices:
        """Wait until the trainer and enough replicas are present.

        Args:
            rejoin_timeout_s: how long to wait for replicas while the trainer is present, if longer than timeout_s,
                from when none is held in a queue any more; None: for timeout_s, whether they are queued or not.
        Raises:
            DeadlineExceeded: the trainer or too many replicas are absent; the message says why each is.
            WrongVersion: the trainer has another version, for example after a restart from an older checkpoint.
            StaleVersion: too few replicas are left without those that have had a newer version.
            ConfigurationSkew: the trainer has read another configuration, or too few replicas are left without those
                that have.
        """
        wait, timeout_s = _Wait(), self._timeout_s
        while True:
            left_s = timeout_s - wait.waited_s
            look = await self._look()
            await self._refuse_other_settings(look)
            ahead = _exclude_newer(look, policy_version)
            if ahead and len(look.replicas) < self._min_replicas:
                raise StaleVersion(f"version {policy_version} is not new: {'; '.join(ahead)}; {RESUME_ADVICE}")
            present = await self._with_slots(look, max(left_s, 0.0))
            trainer = None if present is None else present.trainer
            if trainer is not None and trainer.policy_version != policy_version:
                raise WrongVersion(
                    f"the trainer is at policy version {trainer.policy_version}, not at {policy_version}: "
                    f"it was restarted from a checkpoint; {RESUME_ADVICE}"
                )
            if present is not None and len(present.replicas) >= self._min_replicas:
                wait.note(False, look.absent)
                if look.absent.keys() - self.absent.keys():
                    log.warning("starting round without absent members", absent=look.absent)
                self.absent = dict(look.absent)
                return present
            may_rejoin = (
                rejoin_timeout_s if look.trainer is not None and self._trainer.name not in look.absent else None
            )
            timeout_s = self._timeout_s if may_rejoin is None else max(self._timeout_s, may_rejoin)
            is_queued = may_rejoin is not None and self._is_queued()
            wait.note(is_queued, look.absent)
            waited_s = wait.waited_s
            if (waited_s >= timeout_s and not is_queued) or self._ending.is_set():
                raise DeadlineExceeded(self._timeout_message(look, min(timeout_s, waited_s)))
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def look_once(self) -> PresentServices | None:
        """Look at the services without waiting for any; None: not all of them are present."""
        look = await self._look()
        try:
            await self._refuse_other_settings(look)
        except ConfigurationSkew:  # the next call says which
            return None
        present = await self._with_slots(look, 0.0)
        return None if look.absent else present

    async def replicas_now(self, policy_version: int) -> PresentServices | None:
        """Look at the replicas alone, without waiting for any; None: no replica is present, or the group is unknown."""
        look = await self._look(asks_trainer=False)
        with suppress(ConfigurationSkew):  # it has marked them as absent
            await self._refuse_other_settings(look)
        _exclude_newer(look, policy_version)
        return await self._with_slots(look, 0.0, asks_trainer=False)

    async def check_configuration(self) -> None:
        """Compare the settings of the services that answer now with ours. Raises: ConfigurationSkew: as call()."""
        await self._refuse_other_settings(await self._look())

    async def _refuse_other_settings(self, look: _Look) -> None:
        """Mark replicas that have read another configuration as absent. Raises: ConfigurationSkew: as call()."""
        if self._agreement is None:
            return
        digests = {replica.name: status.settings_digest for replica, status in look.replicas.items()}
        if look.trainer is not None:
            digests[self._trainer.name] = look.trainer.settings_digest
        ours = self._agreement.settings_digest
        other = {name: digest for name, digest in digests.items() if digest not in ("", ours)}
        if not other:
            return
        for name, digest in other.items():
            differences = await asyncio.to_thread(self._agreement.explain_settings, digest)
            look.absent[name] = f"it has read another configuration: {differences}"
        look.replicas = {replica: status for replica, status in look.replicas.items() if replica.name not in other}
        if self._trainer.name in other or len(look.replicas) < self._min_replicas:
            refused = "; ".join(f"{name}: {look.absent[name]}" for name in other)
            raise ConfigurationSkew(f"{refused}: {SETTINGS_ADVICE}")

    async def _look(self, *, asks_trainer: bool = True) -> _Look:
        """Ask the trainer and every announced replica for their status."""
        look = _Look()
        try:
            replicas = await self._fleet.look()
        except Unavailable as error:
            look.absent["the registry"] = str(error)
            return look
        self.note_announced(replicas)
        silent = self._still_silent(replicas)
        look.absent = {replica.name: "it has not answered since it was waited for" for replica in silent}
        replicas = tuple(replica for replica in replicas if replica not in silent)
        services: tuple[Trainer | Replica, ...] = (*([self._trainer] if asks_trainer else []), *replicas)
        calls = (service.status(timeout_s=self._probe_timeout_s) for service in services)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for service, answer in zip(services, answers, strict=True):
            if isinstance(answer, TandemError):
                look.absent[service.name] = str(answer)
                if isinstance(answer, DeadlineExceeded) and isinstance(service, Replica):
                    self.note_lost(service, f"no answer within {self._probe_timeout_s:g} s", answers=False)
            elif isinstance(answer, trainer_pb2.GetStatusResponse):
                look.trainer = answer
            elif isinstance(answer, rollout_pb2.GetStatusResponse) and isinstance(service, Replica):
                look.replicas[service] = answer
            elif isinstance(answer, BaseException):
                raise answer
        return look

    def note_announced(self, replicas: Sequence[Replica]) -> None:
        """Note who is announced; the answer of one that flaps is not waited for."""
        for replica in self._left_out.look(replicas, self._fleet.serving()):
            self._ask_aside(replica)

    def _still_silent(self, replicas: Sequence[Replica]) -> set[Replica]:
        """Return the replicas that have not answered since they were waited for in vain."""
        asked, self._asked = self._asked, {}
        for replica, question in asked.items():
            if replica not in replicas:
                question.cancel()
            elif not question.done():
                self._asked[replica] = question
            elif not question.result():
                self._ask_aside(replica)
        return set(self._asked)

    def note_lost(self, replica: Replica, reason: str, *, answers: bool) -> None:
        """Note a replica that is lost: no roll call waits for its answer, or for its slots if it answers."""
        self._left_out.note_absent(replica, reason)
        if not answers and replica not in self._asked:
            self._ask_aside(replica)

    def _ask_aside(self, replica: Replica) -> None:
        async def answers() -> bool:
            try:
                await replica.status(timeout_s=self._probe_timeout_s)
            except TandemError:
                return False
            return True

        self._asked[replica] = asyncio.create_task(answers(), name=f"ask-{replica.name}")

    async def _with_slots(self, look: _Look, left_s: float, *, asks_trainer: bool = True) -> PresentServices | None:
        """Keep the services of `look` whose ranks hold their slots; None: not the trainer's, or no replica answered."""
        if (look.trainer is None and asks_trainer) or not look.replicas:
            return None
        slots = {} if look.trainer is None else {self._trainer.name: trainer_slots(look.trainer)}
        slots |= replica_slots(look.replicas)
        absent = {replica.name for replica in look.replicas if not self._left_out.is_awaited(replica)}
        awaited = [slot for name, wanted in slots.items() if name not in absent for slot in wanted]
        try:
            group = await self._settle(awaited, left_s)
        except Unavailable as error:
            look.absent["the weight group"] = str(error)
            return None
        for name, wanted in slots.items():
            missing = [slot for slot in wanted if slot not in group.members]
            if missing:
                look.absent[name] = f"slots missing from {self._group.group}: {', '.join(missing)}"
        if self._trainer.name in look.absent:
            return None
        for replica in look.replicas:
            if replica.name not in look.absent and self._left_out.is_absent(replica):
                log.info("replica is back", replica=replica.name)
                self._left_out.forget([replica])
            elif replica.name in look.absent and left_s > 0:
                self._left_out.note_absent(replica, look.absent[replica.name])
        replicas = {replica: status for replica, status in look.replicas.items() if replica.name not in look.absent}
        return PresentServices(epoch=group.epoch, trainer=look.trainer, replicas=replicas)

    async def _settle(self, slots: Sequence[str], left_s: float) -> Membership:
        """Return the group once all slots are held, slots_timeout_s or `left_s` is over, or the run is to end."""
        deadline_s = time.monotonic() + min(left_s, self._slots_timeout_s)
        while True:
            # In a thread, because it polls Redis; in slices, because a thread cannot be cancelled when the run is.
            slice_s = max(0.0, min(deadline_s - time.monotonic(), _WAIT_SLICE_S))
            group = await asyncio.to_thread(self._group.settle, slots, slice_s)
            if set(slots) <= set(group.members) or time.monotonic() >= deadline_s or self._ending.is_set():
                return group

    def _timeout_message(self, look: _Look, waited_s: float) -> str:
        absent = "; ".join(f"{name}: {why}" for name, why in look.absent.items()) or "no other service is announced"
        present = ", ".join(replica.name for replica in look.replicas if replica.name not in look.absent) or "none"
        return (
            f"waited {round(waited_s, 2):g} s for the trainer and {self._min_replicas} replicas "
            f"(rollout.min_replicas); replicas present: {present}; {absent}"
        )


def _exclude_newer(look: _Look, policy_version: int) -> list[str]:
    """Mark replicas that have had a newer version as absent: they must not go back to an older one.

    Returns: a sentence for each of them.
    """
    newer = {replica: seeded_version(status) for replica, status in look.replicas.items()}
    newer = {replica: version for replica, version in newer.items() if version > policy_version}
    for replica, version in newer.items():
        look.absent[replica.name] = f"it has had version {version}, and versions only grow"
        del look.replicas[replica]
    return [f"{replica.name}: {look.absent[replica.name]}" for replica in newer]


def seeded_version(status: rollout_pb2.GetStatusResponse) -> int:
    """Return the version that a replica has served; 0 if it never had one."""
    return 0 if status.state == weights_pb2.REPLICA_STATE_UNSEEDED else int(status.policy_version)


def trainer_slots(trainer: trainer_pb2.GetStatusResponse) -> list[str]:
    """Return the slots of the trainer's ranks."""
    return [trainer_slot(rank) for rank in range(trainer.world_size)]


def replica_slots(replicas: Mapping[Replica, rollout_pb2.GetStatusResponse]) -> dict[str, list[str]]:
    """Return the slots of each replica's ranks, by its name."""
    sizes = {replica.name: Parallel.from_proto(status.parallel).world_size for replica, status in replicas.items()}
    return {name: [rollout_slot(name, rank) for rank in range(size)] for name, size in sizes.items()}


def parallel_sizes(present: PresentServices) -> weights_pb2.Round:
    """Return a round with only the parallel sizes of those present."""
    specs = [
        weights_pb2.ReplicaSpec(name=replica.name, parallel=status.parallel)
        for replica, status in present.replicas.items()
    ]
    for source, status in present.source.items():
        return weights_pb2.Round(trainer=status.parallel, source=source.name, replicas=specs)
    sender = None if present.trainer is None else present.trainer.parallel
    return weights_pb2.Round(trainer=sender, replicas=specs)
