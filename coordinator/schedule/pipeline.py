"""The groups between their begin and the step that trains them: which may begin, and which are trained next.

A group is charged when it begins, and free when its step is done and the weights are sent. There is room for S + 1
batches of P groups. Groups are trained in the order of their beginning, but for a window of W: until the oldest
unfinished one has come, the finished ones among the W - 1 after it may be trained before it, and no others.

So a group waits for at most (S + 1) P - 1 groups before it and W - 1 after it. When it is trained, the policy that it
began with is at most S + ceil((W - 1) / P) versions old. (The window is that of windowed FIFO, torchtitan's
experiments/rl/docs/windowed_fifo.md.)
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tandem_clients.flow import Group


@dataclass(kw_only=True, slots=True)
class _Slot:
    """A group under way. ordinal: its place among all that have begun."""

    wave: int
    ordinal: int
    group: Group | None = None


@dataclass(kw_only=True)
class Pipeline:
    """Groups under way, oldest first.

    Attributes:
        batch: groups of a train step, P.
        depth: batches of finished groups that may wait before no more groups begin.
        max_staleness: S.
        window: W.
        num_training: groups in the step under way, which are still charged.
        num_finished: finished groups that no step has taken.
    """

    batch: int
    depth: int
    max_staleness: int
    window: int
    num_training: int = 0
    num_finished: int = 0
    _line: dict[str, _Slot] = field(default_factory=dict)
    _num_begun: int = 0

    def __len__(self) -> int:
        """Return the number of groups that no step has taken."""
        return len(self._line)

    @property
    def max_age(self) -> int:
        """The bound on the age in versions of the policy with which a trained group began.

        >>> Pipeline(batch=64, depth=1, max_staleness=2, window=19).max_age
        3
        """
        return self.max_staleness - (1 - self.window) // self.batch

    @property
    def first_wave(self) -> int | None:
        """The oldest wave with groups that no step has taken; None: there is none."""
        return next((slot.wave for slot in self._line.values()), None)

    def finished(self) -> Iterator[Group]:
        """Yield the finished groups that no step has taken, oldest first."""
        return (slot.group for slot in self._line.values() if slot.group is not None)

    def may_begin(self, *, again: bool = False) -> bool:
        """Whether a batch of groups may begin. again: an earlier process has begun them."""
        free = (self.max_staleness + 1) * self.batch - len(self._line) - self.num_training
        return free >= self.batch and (again or self.num_finished < self.depth * self.batch)

    def begin(self, wave: int, names: Iterable[str], groups: Mapping[str, Group], settled: Container[str] = ()) -> None:
        """Charge the groups of a wave.

        Args:
            names: all of the wave, in order.
            groups: those that an earlier process has finished.
            settled: those that are trained or filtered already.
        """
        for name in names:
            self._num_begun += 1
            if name not in settled:
                self._line[name] = _Slot(wave=wave, ordinal=self._num_begun, group=groups.get(name))
        self.num_finished += len(groups)

    def finish(self, group: Group) -> int:
        """Note a finished group. Returns: its wave."""
        slot = self._line[group.group_id]
        slot.group = group
        self.num_finished += 1
        return slot.wave

    def take(self, size: int) -> list[Group] | None:
        """Take the groups of the next step, oldest first; None: there are not so many yet."""
        ready: list[Group] = []
        most: int | None = None
        for slot in self._line.values() if self.num_finished >= size else ():
            if slot.group is None and most is None:
                most = slot.ordinal + self.window
            if len(ready) == size or (most is not None and slot.ordinal >= most):
                break
            if slot.group is not None:
                ready.append(slot.group)
        return self._taken(ready) if len(ready) == size else None

    def missing(self, size: int) -> str:
        """Say why there are not so many groups to take: how many have come, and which one is waited for."""
        oldest = next((name for name, slot in self._line.items() if slot.group is None), "none")
        return (
            f"{self.num_finished} of {size} groups have come, the oldest that has not is {oldest}, and only the "
            f"{self.window - 1} after it may be trained before it (schedule.window)"
        )

    def take_named(self, names: Sequence[str]) -> list[Group]:
        """Take the groups of a step that an earlier process has sent."""
        return self._taken([group for name in names if (group := self._line[name].group) is not None])

    def free(self, number: int) -> None:
        """Free groups that were taken and are not trained."""
        self.num_training -= number

    def commit(self) -> None:
        """Free the groups of the step under way."""
        self.num_training = 0

    def _taken(self, groups: list[Group]) -> list[Group]:
        for group in groups:
            del self._line[group.group_id]
        self.num_finished -= len(groups)
        self.num_training += len(groups)
        return groups
