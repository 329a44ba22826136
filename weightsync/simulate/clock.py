"""Simulated time: activities that share links and cores, and the events that end them."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

# The return value is ignored.
Callback = Callable[[], object]


class Clock:
    """Calls callbacks in the order of their times; those of equal times in the order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callback]] = []

    def after(self, delay_s: float, callback: Callback) -> None:
        """Schedule a call `delay_s` from now."""
        self.num_events += 1
        heapq.heappush(self._heap, (self.now + delay_s, self.num_events, callback))

    def run(self, until_s: float = float("inf")) -> None:
        """Run until no call is left, or until a time."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
        if self._heap:
            self.now = until_s


@dataclass(eq=False, slots=True)
class SimulatedLink:
    """One direction of a rank's link; messages in flight share it equally."""

    bytes_per_s: float
    users: list["Activity"] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Activity:
    """A transfer of bytes over links (out, in), or a computation of core seconds."""

    left: float
    links: tuple[SimulatedLink, ...]
    speed: float  # seconds of core time per second; links have their own
    cores_per_rate: float
    on_end: Callback
    rate: float = 0.0
    since: float = 0.0
    plan: int = 0  # number of its latest scheduled end; earlier ones are void

    def full_rate(self) -> float:
        """Return the rate without a shortage of cores."""
        if not self.links:
            return self.speed
        return min(link.bytes_per_s / len(link.users) for link in self.links)


class Machine:
    """Runs activities at the rates that their links and the shared cores allow.

    Args:
        cores: shared by all activities, which slow down alike if they need more; None: no limit.
    """

    def __init__(self, clock: Clock, cores: float | None) -> None:
        self._clock = clock
        self._cores = cores
        self._running: dict[Activity, None] = {}  # kept only if cores are shared, in order of arrival

    def compute(self, seconds: float, on_end: Callback, speed: float = 1.0) -> None:
        """Keep a core busy for `seconds` / speed, or longer if cores are short; then call `on_end`."""
        if self._cores is None:
            self._clock.after(seconds / speed, on_end)
        else:
            self._begin(Activity(left=seconds, links=(), speed=speed, cores_per_rate=1 / speed, on_end=on_end))

    def send(
        self, num_bytes: float, out: SimulatedLink, into: SimulatedLink, core_s_per_byte: float, on_end: Callback
    ) -> None:
        """Send bytes over two links, with core time per byte; then call `on_end`."""
        self._begin(
            Activity(left=num_bytes, links=(out, into), speed=1.0, cores_per_rate=core_s_per_byte, on_end=on_end)
        )

    def _begin(self, activity: Activity) -> None:
        activity.since = self._clock.now
        for link in activity.links:
            link.users.append(activity)
        self._change(activity, +1)

    def _end(self, activity: Activity) -> None:
        for link in activity.links:
            link.users.remove(activity)
        activity.plan += 1
        self._change(activity, -1)
        activity.on_end()

    def _change(self, activity: Activity, sign: int) -> None:
        """Set the rates of the activities that the start (sign 1) or end (-1) of `activity` affects."""
        if self._cores is None:
            for user in {user: None for link in activity.links for user in link.users}:
                self._set_rate(user, user.full_rate())
            return
        if sign > 0:
            self._running[activity] = None
        else:
            del self._running[activity]
        rates = [user.full_rate() for user in self._running]
        load = sum(rate * user.cores_per_rate for rate, user in zip(rates, self._running, strict=True))
        scale = min(1.0, self._cores / load) if load > 0 else 1.0
        for rate, user in zip(rates, tuple(self._running), strict=True):
            self._set_rate(user, rate * scale)

    def _set_rate(self, activity: Activity, rate: float) -> None:
        if rate == activity.rate:
            return
        now = self._clock.now
        activity.left = max(0.0, activity.left - activity.rate * (now - activity.since))
        activity.since, activity.rate = now, rate
        activity.plan += 1
        plan = activity.plan
        self._clock.after(activity.left / rate, lambda: self._end(activity) if activity.plan == plan else None)
