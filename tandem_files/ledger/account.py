"""The account of a run's samples: what has become of each, by the records of its ledger.

begun = trained + filtered + dropped + under way    holds after every record; a record that breaks it is refused

A sample is begun with its group, and settled once, by the step of an iteration. Groups begin in waves, one of them for
an iteration; a step may take groups of several waves (schedule.kind: async). A resume from a checkpoint takes back what
came after it: those samples are under way again, and are trained on the line that survives, or dropped by name.
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
# Iterations before a checkpoint whose versions stay known, because groups under way may be of them.
KEPT_VERSIONS = 32
_OPEN = 0
# Samples of groups: the group's id -> indices, or None for all of them.
Samples = Mapping[str, Sequence[int] | None]


class Unbalanced(ValueError):
    """A record that would have a sample settled twice, trained before it is finished, or a prompt skipped."""


@dataclass(kw_only=True, slots=True)
class _Group:
    wave: int
    # By sample, the place of its fate in Account._fates, or _OPEN.
    fates: bytearray
    is_finished: bool = False
    # The last iteration that has settled one of its samples; 0: none has.
    settled_in: int = 0


@dataclass(kw_only=True)
class Position:
    """Where the line of a run stands.

    Attributes:
        iteration: that the run was continued after, or that has settled samples last.
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
        firsts: ordinal of the first prompt of each wave of which the oldest checkpoint that is kept needs groups.
        orders: of these waves, what their groups were sampled from, and the version of the policy.
        trained: the version from which each iteration on the run's line was trained, from KEPT_VERSIONS before that
            checkpoint on.
        begins: by iteration of a checkpoint or a resume, the first wave that had groups under way then, or came next.
        renamed: iterations after which a resume gave the policy another version: iteration, former version, new one.
        problems: what cannot be true of the records so far, which count as far as they can; None: one is an error.
    """

    counts: Counter[str] = field(default_factory=Counter)
    under_way: int = 0
    position: Position = field(default_factory=Position)
    firsts: dict[int, int] = field(default_factory=dict)
    orders: dict[int, tuple[str, int]] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
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

    def open_groups(self, wave: int) -> dict[str, bool]:
        """Return the groups of a wave that have unsettled samples, and whether each is finished."""
        return {
            name: group.is_finished
            for name, group in self._groups.items()
            if group.wave == wave and _OPEN in group.fates
        }

    def groups_of(self, wave: int) -> list[str]:
        """Return the groups of a wave."""
        return [name for name, group in self._groups.items() if group.wave == wave]

    def settled_groups(self, wave: int) -> set[str]:
        """Return the groups of a wave that are done with: one that was dropped may begin again."""
        dropped = {place for place, fate in enumerate(self._fates) if fate.startswith("dropped")} | {_OPEN}
        return {name for name in self.groups_of(wave) if not dropped & {*self._groups[name].fates}}

    def wave_of(self, name: str) -> int:
        """Return the wave of a group; 0: it is not known."""
        return self._groups[name].wave if name in self._groups else 0

    def open_samples(self, wave: int) -> dict[str, list[int]]:
        """Return the unsettled samples of a wave: by group, their indices."""
        return {
            name: [index for index, fate in enumerate(self._groups[name].fates) if fate == _OPEN]
            for name in self.open_groups(wave)
        }

    def open_waves(self) -> list[int]:
        """Return the waves that have unsettled samples, in order."""
        return sorted({group.wave for group in self._groups.values() if _OPEN in group.fates})

    def waves(self) -> set[int]:
        """Return the waves with groups that are under way, or settled since the oldest checkpoint that is kept."""
        return {group.wave for group in self._groups.values()}

    def needed_waves(self, iteration: int) -> set[int]:
        """Return the waves that a process which continues after an iteration, or after a later one, may begin.

        These are the first with groups that are under way, or that a step after it has settled, and all after that:
        those that are settled already must not begin anew.
        """
        waves = [group.wave for group in self._groups.values() if group.settled_in > iteration or _OPEN in group.fates]
        waves += [self.begins[number] for number in sorted(self.begins) if number <= iteration][-1:]
        first = min(waves, default=math.inf)
        return {group.wave for group in self._groups.values() if group.wave >= first}

    def forget(self, iteration: int) -> None:
        """Forget the groups of which no process asks that continues after an iteration, or after a later one."""
        waves = self.needed_waves(iteration)
        self._groups = {name: group for name, group in self._groups.items() if group.wave in waves}

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

    def snapshot(self, resumes_after: float = math.inf) -> dict[str, Any]:
        """Return what the head of a segment says of those before it.

        Args:
            resumes_after: the iteration after which the run continues, so that later ones have settled nothing.
        Returns: in `settled_until` the last iteration whose groups it leaves out.
        """
        settled_until = min(self.position.iteration, resumes_after)
        waves = self.needed_waves(int(settled_until))
        return {
            "counts": dict(self.counts),
            "under_way": self.under_way,
            "position": vars(self.position),
            "settled_until": settled_until,
            "trained": self.trained,
            "begins": dict([one for one in sorted(self.begins.items()) if one[0] <= settled_until][-1:]),
            "renamed": self.renamed,
            "firsts": {wave: first for wave, first in self.firsts.items() if wave in waves},
            "orders": {wave: order for wave, order in self.orders.items() if wave in waves},
            "groups": {
                name: [group.wave, group.is_finished, [self._fates[at] for at in group.fates], group.settled_in]
                for name, group in self._groups.items()
                if group.wave in waves
            },
        }

    def _segment(self, fields: Mapping[str, Any]) -> None:
        """The head of the first segment that is left says what those before it held; of any other it is known."""
        if self.counts["begun"]:
            return
        said = fields["account"]
        self.counts, self.under_way = Counter(said["counts"]), said["under_way"]
        self.position = Position(**said["position"])
        self.firsts = {int(wave): first for wave, first in said.get("firsts", {}).items()}
        self.orders = {int(iteration): tuple(order) for iteration, order in said.get("orders", {}).items()}
        self.trained = {int(iteration): version for iteration, version in said.get("trained", {}).items()}
        self.begins = {int(iteration): wave for iteration, wave in said.get("begins", {}).items()}
        self.renamed = [(iteration, version, now) for iteration, version, now in said.get("renamed", ())]
        for name, (wave, is_finished, fates, *more) in said.get("groups", {}).items():
            places = bytearray(map(self._place, fates))
            settled_in = more[0] if more else wave if any(places) else 0  # format 1 has waves of their iteration only
            self._groups[name] = _Group(wave=wave, fates=places, is_finished=is_finished, settled_in=settled_in)

    def _begun(self, fields: Mapping[str, Any]) -> None:
        wave, first, names = fields["iteration"], fields["first"], fields["groups"]
        expected = self.position.next_prompt
        if expected not in (-1, first):
            what = f"prompts {expected} to {first - 1} are skipped" if first > expected else "prompts are begun again"
            self._wrong(f"wave {wave} begins with prompt {first}, not {expected}: {what}")
        if again := [name for name in names if name in self._groups and _OPEN in self._groups[name].fates]:
            self._wrong(f"group {again[0]} is begun while it is under way")
            return
        self._begin(fields, len(names))
        for name in names:
            self._groups[name] = _Group(wave=wave, fates=bytearray(fields["size"]))
        self.counts["begun"] += fields["size"] * len(names)
        self.under_way += fields["size"] * len(names)

    def _finished(self, fields: Mapping[str, Any]) -> None:
        for name, group in self._known(fields["groups"]):
            if group.is_finished:
                self._wrong(f"group {name} is finished twice")
            group.is_finished = True

    def _continued(self, fields: Mapping[str, Any]) -> None:
        """Of the groups under way, those that are not restored are generated anew."""
        groups = [self._groups[name] for name in self.open_groups(fields["iteration"])]
        for group in groups:
            group.is_finished = False
        for _, group in self._known(fields["groups"]):
            group.is_finished = True
        self._begin(fields, len(groups))

    def _begin(self, fields: Mapping[str, Any], num_groups: int) -> None:
        wave, first = fields["iteration"], fields["first"]
        self.firsts[wave], self.orders[wave] = first, (fields["order"], fields["version"])
        # A wave of which some groups are trained already begins with the others; it has taken as many prompts as ever.
        self.position.next_prompt = first + fields.get("prompts", num_groups)

    def _filtered(self, fields: Mapping[str, Any]) -> None:
        samples = fields["samples"]  # in format 1 of the wave with the iteration's number
        iteration = fields.get("iteration") or max([group.wave for _, group in self._known(samples)], default=0)
        self._settle(samples, f"filtered: {fields['why']}", iteration)

    def _dropped(self, fields: Mapping[str, Any]) -> None:
        self._settle(fields["samples"], f"dropped: {fields['why']}")

    def _step(self, fields: Mapping[str, Any]) -> None:
        samples, digest = fields["samples"], fields["digest"]
        if unfinished := [name for name, group in self._known(samples) if not group.is_finished]:
            self._wrong(f"step {fields['step']} has group {unfinished[0]}, which is not finished")
        if digest != chained(self.position.digest, fields["step"], fields["version"], samples):
            self._wrong(f"step {fields['step']} has another digest than its samples and the steps before it")
        self._settle(samples, "trained", fields["iteration"])
        self.trained[fields["iteration"]] = fields["version"]
        self.position.before, self.position.step_id, self.position.digest = self.position.digest, fields["step"], digest

    def _checkpoint(self, fields: Mapping[str, Any]) -> None:
        if fields["digest"] not in (self.position.digest, self.position.before):
            self._wrong(
                f"the checkpoint of iteration {fields['iteration']} was made after other steps than the ledger has"
            )
        # What no resume goes back to needs no names any more.
        oldest, iteration = fields["oldest"], fields["iteration"]
        self.begins = {number: wave for number, wave in self.begins.items() if number >= oldest}
        self.begins[iteration] = fields.get("wave", iteration + 1)
        self.forget(oldest)
        waves = self.waves()
        self.firsts = {wave: first for wave, first in self.firsts.items() if wave in waves}
        self.orders = {wave: order for wave, order in self.orders.items() if wave in waves}
        named = oldest - KEPT_VERSIONS
        self.trained = {number: version for number, version in self.trained.items() if number >= named}
        self.renamed = [renamed for renamed in self.renamed if renamed[0] >= named]

    def _resumed(self, fields: Mapping[str, Any]) -> None:
        iteration = fields["iteration"]
        wave = fields.get("wave", iteration + 1)
        self.renamed.append((iteration, fields["version"], fields["as"]))
        for group in self._groups.values():
            if group.settled_in > iteration:
                for place, num in Counter(group.fates).items():
                    if place != _OPEN:
                        self.counts[self._fates[place]] -= num
                        self.under_way += num
                    # A step that is sent again under its id is done once.
                    if self._fates[place] == "trained" and not fields["step"]:
                        self.counts["returned"] += num
                group.fates, group.settled_in = bytearray(len(group.fates)), 0
        if self.counts["begun"] and iteration > self.position.iteration:
            self._wrong(f"a run continues after iteration {iteration}, its records end in {self.position.iteration}")
        first = self.firsts.get(wave, fields["first"])
        if first != fields["first"]:
            self._wrong(f"wave {wave} began with prompt {first}, and begins with {fields['first']} now")
        self.firsts = {number: first for number, first in self.firsts.items() if number < wave}
        self.begins = {number: first for number, first in self.begins.items() if number < iteration} | {iteration: wave}
        self.trained = {number: version for number, version in self.trained.items() if number <= iteration}
        self.position = Position(
            iteration=iteration, next_prompt=fields["first"], step_id=fields["last"], digest=fields["digest"]
        )

    def _settle(self, samples: Samples, fate: str, iteration: int | None = None) -> None:
        """Settle samples.

        Args:
            iteration: that settles them; None: the next one begins without them.
        Raises: Unbalanced: one is not under way.
        """
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
            group.settled_in = max(group.wave, self.position.iteration + 1) if iteration is None else iteration
        if iteration is not None:
            self.position.iteration = max(self.position.iteration, iteration)

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
