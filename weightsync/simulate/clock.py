"""Simulated time: activities that share links and cores, and the events at which they end."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

# What it returns is not looked at.
Callback = Callable[[], object]


class Clock:
    """Calls callbacks in the order of their times; equal times in the order of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Callback]] = []

    def after(self, delay_s: float, callback: Callback) -> None:
        """Asks for a call `delay_s` from now."""
        self.num_events += 1
        heapq.heappush(self._heap, (self.now + delay_s, self.num_events, callback))

    def run(self, until_s: float = float("inf")) -> None:
        """Runs until nothing is left to happen, or until a time."""
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
    """Bytes on links (out, in), or seconds of a core."""

    left: float
    links: tuple[SimulatedLink, ...]
    speed: float  # seconds of core time per second; links have their own
    cores_per_rate: float
    on_end: Callback
    rate: float = 0.0
    since: float = 0.0
    plan: int = 0  # number of its latest planned end; earlier ones are void

    def full_rate(self) -> float:
        """Its rate if there were cores enough."""
        if not self.links:
            return self.speed
        return min(link.bytes_per_s / len(link.users) for link in self.links)


class Machine:
    """Runs activities at the rates that their links and the shared cores allow.

    Args:
        cores: shared by all activities: if they are short, all of them slow down alike; None: no limit.
    """

    def __init__(self, clock: Clock, cores: float | None) -> None:
        self._clock = clock
        self._cores = cores
        self._running: dict[Activity, None] = {}  # kept only if cores are shared, in order of arrival

    def compute(self, seconds: float, on_end: Callback, speed: float = 1.0) -> None:
        """Keeps a core busy for `seconds` / speed, or longer if cores are short."""
        if self._cores is None:
            self._clock.after(seconds / speed, on_end)
        else:
            self._begin(Activity(left=seconds, links=(), speed=speed, cores_per_rate=1 / speed, on_end=on_end))

    def send(
        self, num_bytes: float, out: SimulatedLink, into: SimulatedLink, core_s_per_byte: float, on_end: Callback
    ) -> None:
        """Moves bytes over two links."""
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
        """New rates for whom the coming or going of an activity concerns."""
        if self._cores is None:
            for one in {user: None for link in activity.links for user in link.users}:
                self._set_rate(one, one.full_rate())
            return
        if sign > 0:
            self._running[activity] = None
        else:
            del self._running[activity]
        rates = [one.full_rate() for one in self._running]
        load = sum(rate * one.cores_per_rate for rate, one in zip(rates, self._running, strict=True))
        scale = min(1.0, self._cores / load) if load > 0 else 1.0
        for rate, one in zip(rates, tuple(self._running), strict=True):
            self._set_rate(one, rate * scale)

    def _set_rate(self, activity: Activity, rate: float) -> None:
        if rate == activity.rate:
            return
        now = self._clock.now
        activity.left = max(0.0, activity.left - activity.rate * (now - activity.since))
        activity.since, activity.rate = now, rate
        activity.plan += 1
        plan = activity.plan
        self._clock.after(activity.left / rate, lambda: self._end(activity) if activity.plan == plan else None)
