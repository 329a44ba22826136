"""Stop generation at a token boundary, in one of four modes, within a bounded time; and resume it."""

import asyncio
import time

from rollout_service.engine import RolloutEngine
from rollout_service.weight_updates.admission import Admission
from servicekit.errors import DeadlineExceeded, InvalidRequest, TandemError
from servicekit.logs import get_logger
from tandem_api.weights.v1 import weights_pb2 as pb
from weightsync.round.deadlines import DRAIN_S, END_CALLS_S

log = get_logger(__name__)

ABORT_RETRY_S = 0.5
# Modes in which running requests stay in the engine.
_STAY = (pb.PAUSE_MODE_KEEP_KV, pb.PAUSE_MODE_RECOMPUTE)
_MODES = (pb.PAUSE_MODE_DRAIN, pb.PAUSE_MODE_ABORT_REQUEUE, *_STAY)


class Pauses:
    """The pause switch of one replica; what streams submit meanwhile waits until it is `accepting` again.

    drain waits for the running calls and, after at most `drain_s`, aborts them; abort_requeue aborts immediately;
    keep_kv freezes them where they are; recompute drops their KV cache, too.
    """

    def __init__(self, engine: RolloutEngine, admission: Admission, drain_s: float = DRAIN_S) -> None:
        self._engine = engine
        self._admission = admission
        self._drain_s = drain_s
        self._frozen = False
        self._closed_s: float | None = None  # since when new calls are refused
        self.accepting = asyncio.Event()
        self.accepting.set()

    @property
    def paused(self) -> bool:
        """Whether new calls are refused."""
        return self._closed_s is not None

    async def pause(self, mode: pb.PauseMode.ValueType, drain_s: float = DRAIN_S) -> None:
        """Refuse new calls, end the running ones as the mode says, and freeze the engine, if it is not frozen yet.

        It is frozen in every mode: a call that its client gave up is over for us before the engine has dropped its
        requests. Nothing may read the weights from here on.

        Args:
            drain_s: time to drain that the round allows.
        Raises: InvalidRequest: no such mode; DeadlineExceeded: requests do not end (new calls stay refused).
        """
        if mode not in _MODES:
            raise InvalidRequest(f"pause mode {mode} is none of DRAIN, KEEP_KV, RECOMPUTE, ABORT_REQUEUE")
        if self._closed_s is None:
            self._closed_s = time.monotonic()
            self.accepting.clear()
        if not self._frozen:
            await self._end_running(mode, min(drain_s, self._drain_s))
            await self._engine.freeze()
            self._frozen = True
        if mode == pb.PAUSE_MODE_RECOMPUTE:
            await self._engine.retract()

    async def resume(self) -> float | None:
        """Thaw the engine and accept new calls. Returns: seconds for which they were refused; None: they were not."""
        if self._frozen:
            await self._engine.thaw()
            self._frozen = False
        closed_s, self._closed_s = self._closed_s, None
        self.accepting.set()
        return None if closed_s is None else time.monotonic() - closed_s

    async def flush(self) -> None:
        """Drop the KV of the old version. With keep_kv, requests keep theirs; prefixes are keyed by version anyway."""
        await self._engine.flush_cache()

    def evict(self, error: TandemError) -> None:
        """Fail every running call with `error`."""
        self._admission.evict(error)

    async def _end_running(self, mode: pb.PauseMode.ValueType, drain_s: float) -> None:
        if mode in _STAY:
            return
        if mode == pb.PAUSE_MODE_DRAIN and not await self._admission.wait_idle(drain_s):
            log.warning(
                "drain timed out, aborting the running groups", running=self._admission.running_groups, drain_s=drain_s
            )
        await self._abort_until_idle()

    async def _abort_until_idle(self) -> None:
        """Abort repeatedly: a request can be on its way to the engine during an abort."""
        deadline_s = time.monotonic() + END_CALLS_S
        while self._admission.running_groups > 0:
            await self._engine.abort_running()
            if await self._admission.wait_idle(ABORT_RETRY_S):
                break
            if time.monotonic() > deadline_s:
                running = self._admission.running_groups
                raise DeadlineExceeded(f"{running} groups still run {END_CALLS_S:g} s after their abort")
