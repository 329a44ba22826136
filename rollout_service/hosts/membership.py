"""A worker's membership with its leader: which leader, when its last beat came, and how it ends.

| event                          | from    | to     | does                                                          |
|--------------------------------|---------|--------|---------------------------------------------------------------|
| Join                           | free    | joined | the ranks start                                               |
| Join, same leader              | joined  | joined | nothing                                                       |
| Join, another leader           | joined  | over   | refuses it and ends: ranks of two starts must not meet        |
| Beat                           | joined  | joined | restarts the timer                                            |
| Leave                          | joined  | over   | ends; with an error if the leader has failed                  |
| no Beat within the lease's time| joined  | over   | ends with an error: the leader is lost                        |
"""

import asyncio
import json

from rollout_service.hosts.host_ranks import HostRanks
from servicekit.errors import Aborted, InvalidRequest, TandemError, Unavailable
from servicekit.logs import get_logger
from servicekit.redis.records import AgreedSettings
from servicekit.redis.registry import SETTINGS_ADVICE
from tandem_api.rollout.v1 import worker_pb2 as wpb

log = get_logger(__name__)


class WorkerMembership:
    """Whether this worker has a leader, and its state for the leader's beats. Runs on the service's event loop.

    Attributes:
        joined: done with this host's share once a leader has joined it.
        over: done when the leader releases this process; failed when it must end for another reason.
        ready, failure, asked_to_stop: what the answer to each beat reports.
    """

    def __init__(self, replica: str, share: HostRanks, ttl_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.joined: asyncio.Future[HostRanks] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.ready = False
        self.failure = ""
        self.asked_to_stop = False
        self._replica = replica
        self._share = share
        self._ttl_s = ttl_s
        self._leader_id = ""
        self._last_beat_s = loop.time()
        self._expiry: asyncio.TimerHandle | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the leader's last call."""
        return asyncio.get_running_loop().time() - self._last_beat_s

    def join(self, request: wpb.JoinRequest) -> None:
        """Join a leader. Raises: InvalidRequest: it asks for another host or engine; Aborted: there is another one."""
        share = self._share
        asked = (request.replica, request.nodes, request.tensor_parallel, request.host)
        if asked != (self._replica, share.nodes, share.tensor_parallel, share.host):
            raise InvalidRequest(
                f"the leader asks for host {request.host} of {request.replica}, {request.tensor_parallel} ranks on "
                f"{request.nodes} hosts, but this is host {share.host} of {self._replica}, {share.tensor_parallel} "
                f"ranks on {share.nodes} hosts: start all with one configuration"
            )
        if request.settings and share.settings and request.settings != share.settings:
            raise InvalidRequest(
                f"host {share.host} of {self._replica} has read other settings of the engine than its leader: "
                f"{_differences(share.settings, request.settings)}: {SETTINGS_ADVICE}"
            )
        if self._leader_id and request.leader_id != self._leader_id:
            self._end(Unavailable(f"{self._replica} has a new leader; this process belongs to an earlier one and ends"))
            raise Aborted(f"host {share.host} of {self._replica} belongs to another leader, and ends")
        if not self._leader_id:
            self._leader_id = request.leader_id
            self.joined.set_result(share.meeting_at(request.store_address))
            log.info("joined", replica=self._replica, host=share.host, store=request.store_address)
        self._note_beat()

    def beat(self, leader_id: str) -> None:
        """Note a beat. Raises: Aborted: it is not our leader's."""
        self.check(leader_id)
        self._note_beat()

    def check(self, leader_id: str) -> None:
        """Raise Aborted unless this process belongs to that leader."""
        if not self._leader_id or leader_id != self._leader_id:
            raise Aborted(
                f"host {self._share.host} of {self._replica} does not belong to this leader: "
                f"{'it belongs to another' if self._leader_id else 'it was restarted'}"
            )

    def leave(self, leader_id: str, reason: str, *, failed: bool) -> None:
        """End the membership. Raises: Aborted: the call is not our leader's."""
        self.check(leader_id)
        self._end(Unavailable(f"the leader of {self._replica} ended: {reason}") if failed else None)

    def _note_beat(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_beat_s = loop.time()
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = loop.call_later(self._ttl_s, self._expire)

    def _expire(self) -> None:
        self._end(Unavailable(f"the leader of {self._replica} is lost: no beat for {self._ttl_s:g} s"))

    def _end(self, error: TandemError | None) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)


def _differences(ours: str, theirs: str) -> str:
    try:
        return AgreedSettings(json.loads(ours)).differences(theirs)
    except ValueError as error:
        return f"the leader's cannot be read ({error})"
