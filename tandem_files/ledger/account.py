"""The account of a run's samples: what has become of each, by the records of its ledger.

begun = trained + filtered + dropped + under way    holds after every record; a record that breaks it is refused

A sample is begun with its group, and settled once. A resume from a checkpoint takes back what came after it: those
samples are under way again, and are trained on the line that survives, or dropped by name.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_files.ledger.records import Record

# What settles a sample; the last two say why, as in `filtered: all rewards of the group are equal`.
FATES = ("trained", "filtered", "dropped")
_OPEN = 0
# Samples of groups: the group's id -> indices, or None for all of them.
Samples = Mapping[str, Sequence[int] | None]


class Unbalanced(ValueError):
    """A record that would have a sample settled twice, trained before it is finished, or a prompt skipped."""


@dataclass(kw_only=True, slots=True)
class _Group:
    iteration: int
    # By sample, the place of its fate in Account._fates, or _OPEN.
    fates: bytearray
    is_finished: bool = False


@dataclass(kw_only=True)
class Position:
    """Where the line of a run stands.

    Attributes:
        iteration: that began last.
        next_prompt: ordinal of the next prompt, which counts all that the data's cursor has given out; -1: not known.
        step_id: of the last train step.
        digest: of all steps of the line, each with its samples (`chained`).
        before: the digest before the last step, which may be noted and not done: a run that ends saves its state then.
    """

    iteration: int = 0
    next_prompt: int = -1
    step_id: str = ""
    digest: str = ""
    before: str = ""


@dataclass(kw_only=True)
class Account:
    """What became of the samples that a run has begun.

    Attributes:
        counts: samples `begun`, samples by fate, and those `returned` from steps that a resume has undone.
        under_way: samples that are not settled.
        firsts: ordinal of the first prompt of each iteration since the oldest checkpoint that is kept.
        orders: of these iterations, what their groups were sampled from, and the version of the policy.
        trained: the version from which each iteration on the run's line was trained, from that checkpoint's on.
        renamed: iterations after which a resume gave the policy another version: iteration, former version, new one.
        problems: what cannot be true of the records so far, which count as far as they can; None: one is an error.
    """

    counts: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    position: Position = field(default_factory=Position)
    firsts: dict[int, int] = field(default_factory=dict)
    orders: dict[int, tuple[str, int]] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    renamed: list[tuple[int, int, int]] = field(default_factory=list)
    problems: list[str] | None = None
    _groups: dict[str, _Group] = field(default_factory=dict)
    _fates: list[str] = field(default_factory=lambda: ["under way"])

    def __post_init__(self) -> None:
        self._changes: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "segment": self._segment,
            "begun": self._begun,
            "finished": self._finished,
            "filtered": self._filtered,
            "dropped": self._dropped,
            "continued": self._continued,
            "step": self._step,
            "checkpoint": self._checkpoint,
            "resumed": self._resumed,
        }

    def add(self, record: Record) -> None:
        """Add a record. Raises: Unbalanced: it cannot be true."""
        if record.kind in self._changes:  # others say nothing of samples
            self._changes[record.kind](record.fields)
        if self.counts["begun"] != sum(map(self.total, FATES)) + self.under_way:
            raise Unbalanced(f"after {record.kind}: {dict(self.counts)}, and {self.under_way} under way")

    def total(self, fate: str) -> int:
        """Count the samples of a fate, for whatever reason."""
        return sum(num for name, num in self.counts.items() if name.partition(":")[0] == fate)

    def open_groups(self, iteration: int) -> dict[str, bool]:
        """Return the groups of an iteration that have unsettled samples, and whether each is finished."""
        return {
            name: group.is_finished
            for name, group in self._groups.items()
            if group.iteration == iteration and _OPEN in group.fates
        }

    def groups_of(self, iteration: int) -> list[str]:
        """Return the groups of an iteration."""
        return [name for name, group in self._groups.items() if group.iteration == iteration]

    def open_samples(self, iteration: int) -> dict[str, list[int]]:
        """Return the unsettled samples of an iteration: by group, their indices."""
        return {
            name: [index for index, fate in enumerate(self._groups[name].fates) if fate == _OPEN]
            for name in self.open_groups(iteration)
        }

    def open_iterations(self) -> list[int]:
        """Return the iterations that have unsettled samples, in order."""
        return sorted({group.iteration for group in self._groups.values() if _OPEN in group.fates})

    def names_of(self, iteration: int, version: int) -> set[int]:
        """Return all versions that the policy after an iteration has had: a resume may give it a new one.

        Args:
            version: one of them.
        """
        names = {version}
        renamed = [{former, now} for number, former, now in self.renamed if number == iteration]
        for same in renamed * len(renamed):
            names |= same if same & names else set()
        return names

    def settled_until(self) -> int:
        """Return the last iteration before all that have unsettled samples."""
        return min(self.open_iterations(), default=self.position.iteration + 1) - 1

    def snapshot(self, resumes_after: float = math.inf) -> dict[str, Any]:
        """Return what the head of a segment says of those before it.

        Args:
            resumes_after: the iteration after which the run continues, so that later ones are not settled.
        """
        settled_until = min(self.settled_until(), resumes_after)
        return {
            "counts": dict(self.counts),
            "under_way": self.under_way,
            "position": vars(self.position),
            "settled_until": settled_until,
            "trained": self.trained,
            "renamed": self.renamed,
            "orders": {iteration: order for iteration, order in self.orders.items() if iteration > settled_until},
            "groups": {
                name: [group.iteration, group.is_finished, [self._fates[place] for place in group.fates]]
                for name, group in self._groups.items()
                if group.iteration > settled_until
            },
        }

    def _segment(self, fields: Mapping[str, Any]) -> None:
        """The head of the first segment that is left says what those before it held; of any other it is known."""
        if self.counts["begun"]:
            return
        said = fields["account"]
        self.counts, self.under_way = Counter(said["counts"]), said["under_way"]
        self.position = Position(**said["position"])
        self.orders = {int(iteration): tuple(order) for iteration, order in said.get("orders", {}).items()}
        self.trained = {int(iteration): version for iteration, version in said.get("trained", {}).items()}
        self.renamed = [(iteration, version, now) for iteration, version, now in said.get("renamed", ())]
        for name, (iteration, is_finished, fates) in said.get("groups", {}).items():
            places = bytearray(map(self._place, fates))
            self._groups[name] = _Group(iteration=iteration, fates=places, is_finished=is_finished)

    def _begun(self, fields: Mapping[str, Any]) -> None:
        iteration, first, names = fields["iteration"], fields["first"], fields["groups"]
        expected = self.position.next_prompt
        if expected not in (-1, first):
            what = f"prompts {expected} to {first - 1} are skipped" if first > expected else "prompts are begun again"
            self._wrong(f"iteration {iteration} begins with prompt {first}, not {expected}: {what}")
        if again := [name for name in names if name in self._groups and _OPEN in self._groups[name].fates]:
            self._wrong(f"group {again[0]} is begun while it is under way")
            return
        self._begin(fields, len(names))
        for name in names:
            self._groups[name] = _Group(iteration=iteration, fates=bytearray(fields["size"]))
        self.counts["begun"] += fields["size"] * len(names)
        self.under_way += fields["size"] * len(names)

    def _finished(self, fields: Mapping[str, Any]) -> None:
        for name, group in self._known(fields["groups"]):
            if group.is_finished:
                self._wrong(f"group {name} is finished twice")
            group.is_finished = True

    def _continued(self, fields: Mapping[str, Any]) -> None:
        """Of the groups under way, those that are not restored are generated anew."""
        iteration = fields["iteration"]
        groups = [group for group in self._groups.values() if group.iteration == iteration and _OPEN in group.fates]
        for group in groups:
            group.is_finished = False
        for _, group in self._known(fields["groups"]):
            group.is_finished = True
        self._begin(fields, len(groups))

    def _begin(self, fields: Mapping[str, Any], num_groups: int) -> None:
        iteration, first = fields["iteration"], fields["first"]
        self.firsts[iteration], self.orders[iteration] = first, (fields["order"], fields["version"])
        self.position.iteration, self.position.next_prompt = iteration, first + num_groups

    def _filtered(self, fields: Mapping[str, Any]) -> None:
        self._settle(fields["samples"], f"filtered: {fields['why']}")

    def _dropped(self, fields: Mapping[str, Any]) -> None:
        self._settle(fields["samples"], f"dropped: {fields['why']}")

    def _step(self, fields: Mapping[str, Any]) -> None:
        samples, digest = fields["samples"], fields["digest"]
        if unfinished := [name for name, group in self._known(samples) if not group.is_finished]:
            self._wrong(f"step {fields['step']} has group {unfinished[0]}, which is not finished")
        if digest != chained(self.position.digest, fields["step"], fields["version"], samples):
            self._wrong(f"step {fields['step']} has another digest than its samples and the steps before it")
        self._settle(samples, "trained")
        self.trained[fields["iteration"]] = fields["version"]
        self.position.before, self.position.step_id, self.position.digest = self.position.digest, fields["step"], digest

    def _checkpoint(self, fields: Mapping[str, Any]) -> None:
        if fields["digest"] not in (self.position.digest, self.position.before):
            self._wrong(
                f"the checkpoint of iteration {fields['iteration']} was made after other steps than the ledger has"
            )
        # What no resume goes back to needs no names any more.
        oldest = fields["oldest"]
        self._groups = {
            name: group for name, group in self._groups.items() if group.iteration > oldest or _OPEN in group.fates
        }
        self.firsts = {number: first for number, first in self.firsts.items() if number > oldest}
        self.orders = {number: order for number, order in self.orders.items() if number > oldest}
        self.trained = {number: version for number, version in self.trained.items() if number >= oldest}
        self.renamed = [renamed for renamed in self.renamed if renamed[0] >= oldest]

    def _resumed(self, fields: Mapping[str, Any]) -> None:
        iteration = fields["iteration"]
        self.renamed.append((iteration, fields["version"], fields["as"]))
        for group in self._groups.values():
            if group.iteration > iteration:
                for place, num in Counter(group.fates).items():
                    if place != _OPEN:
                        self.counts[self._fates[place]] -= num
                        self.under_way += num
                    # A step that is sent again under its id is done once.
                    if self._fates[place] == "trained" and not fields["step"]:
                        self.counts["returned"] += num
                group.fates = bytearray(len(group.fates))
        if self.counts["begun"] and iteration > self.position.iteration:
            self._wrong(f"a run continues after iteration {iteration}, its records end in {self.position.iteration}")
        first = self.firsts.get(iteration + 1, fields["first"])
        if first != fields["first"]:
            self._wrong(f"iteration {iteration + 1} began with prompt {first}, and begins with {fields['first']} now")
        self.firsts = {number: first for number, first in self.firsts.items() if number <= iteration}
        self.trained = {number: version for number, version in self.trained.items() if number <= iteration}
        self.position = Position(
            iteration=iteration, next_prompt=fields["first"], step_id=fields["last"], digest=fields["digest"]
        )

    def _settle(self, samples: Samples, fate: str) -> None:
        """Settle samples. Raises: Unbalanced: one is not under way."""
        code = self._place(fate)
        for name, group in self._known(samples):
            fates, num_open, indices = group.fates, group.fates.count(_OPEN), samples[name]
            wanted = range(len(fates)) if indices is None else indices
            if num_open < len(fates) and any(fates[index] != _OPEN for index in wanted):
                already = {self._fates[settled] for settled in fates if settled != _OPEN}
                self._wrong(f"samples of {name} are {fate}, and are already {', '.join(sorted(already))}")
            for index in wanted:
                fates[index] = fates[index] or code
            settled = num_open - fates.count(_OPEN)
            self.counts[fate] += settled
            self.under_way -= settled

    def _place(self, fate: str) -> int:
        """Return the place of a fate in `_fates`."""
        if fate not in self._fates:
            self._fates.append(fate)
        return self._fates.index(fate)

    def _known(self, names: Iterable[str]) -> Iterator[tuple[str, _Group]]:
        for name in names:
            if name in self._groups:
                yield name, self._groups[name]
            else:
                self._wrong(f"group {name} was not begun")

    def _wrong(self, text: str) -> None:
        if self.problems is None:
            raise Unbalanced(text)
        self.problems.append(text)


def chained(before: str, step_id: str, version: int, samples: Samples) -> str:
    """Return the digest of a line of train steps, from that of the steps before the last one."""
    names = [name if indices is None else f"{name}#{sorted(indices)}" for name, indices in samples.items()]
    text = "\n".join([before, step_id, str(version), *sorted(names)])
    return hashlib.sha256(text.encode()).hexdigest()[:32]
