"""A worker's side of the bond with its leader: whose it is, when it last heard of it, and how it ends.

| event                          | from    | to     | does                                                          |
|--------------------------------|---------|--------|---------------------------------------------------------------|
| Join                           | free    | joined | the ranks start                                               |
| Join, same leader              | joined  | joined | nothing                                                       |
| Join, another leader           | joined  | over   | refuses it and ends: the ranks of two lives must not meet     |
| Beat                           | joined  | joined | the silence begins anew                                       |
| Leave                          | joined  | over   | ends; with an error if the leader has failed                  |
| no Beat within the lease's time| joined  | over   | ends with an error: the leader is gone                        |
"""

import asyncio

from rollout_service.hosts.host_ranks import HostRanks
from servicekit.errors import Aborted, InvalidRequest, TandemError, Unavailable
from servicekit.logs import get_logger
from tandem_api.rollout.v1 import worker_pb2 as wpb

log = get_logger(__name__)


class WorkerMembership:
    """All methods run on the service's event loop.

    joined: done with this host's share once a leader has come. over: done when the leader lets this process go; failed
    when it must end for another reason. ready, failure and asked_to_stop are what the leader hears with each beat.
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
        self._heard_s = loop.time()
        self._silence: asyncio.TimerHandle | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the leader was last heard."""
        return asyncio.get_running_loop().time() - self._heard_s

    def join(self, request: wpb.JoinRequest) -> None:
        """Raises: InvalidRequest: the leader means another host or another engine; Aborted: it is not the first."""
        share = self._share
        asked = (request.replica, request.nodes, request.tensor_parallel, request.host)
        if asked != (self._replica, share.nodes, share.tensor_parallel, share.host):
            raise InvalidRequest(
                f"the leader asks for host {request.host} of {request.replica}, {request.tensor_parallel} ranks on "
                f"{request.nodes} hosts, but this is host {share.host} of {self._replica}, {share.tensor_parallel} "
                f"ranks on {share.nodes} hosts: start all with one configuration"
            )
        if self._leader_id and request.leader_id != self._leader_id:
            self._end(
                Unavailable(f"{self._replica} has a new leader: this process belongs to an earlier one, and ends")
            )
            raise Aborted(f"host {share.host} of {self._replica} belongs to another leader, and ends")
        if not self._leader_id:
            self._leader_id = request.leader_id
            self.joined.set_result(share.meeting_at(request.store_address))
            log.info("joined", replica=self._replica, host=share.host, store=request.store_address)
        self._hear()

    def beat(self, leader_id: str) -> None:
        """Raises: Aborted: it is not our leader's."""
        self.check(leader_id)
        self._hear()

    def check(self, leader_id: str) -> None:
        """Raises: Aborted: this process does not belong to that leader."""
        if not self._leader_id or leader_id != self._leader_id:
            raise Aborted(
                f"host {self._share.host} of {self._replica} does not belong to this leader: "
                f"{'it belongs to another' if self._leader_id else 'it was started anew'}"
            )

    def leave(self, leader_id: str, reason: str, *, failed: bool) -> None:
        """Raises: Aborted: it is not our leader's."""
        self.check(leader_id)
        self._end(Unavailable(f"the leader of {self._replica} ended: {reason}") if failed else None)

    def _hear(self) -> None:
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        if self._silence is not None:
            self._silence.cancel()
        self._silence = loop.call_later(self._ttl_s, self._fall_silent)

    def _fall_silent(self) -> None:
        self._end(Unavailable(f"the leader of {self._replica} is gone: no word of it for {self._ttl_s:g} s"))

    def _end(self, error: TandemError | None) -> None:
        if self._silence is not None:
            self._silence.cancel()
        if self.over.done():
            return
        if error is None:
            self.over.set_result(None)
        else:
            self.over.set_exception(error)
