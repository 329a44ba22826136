"""What earlier processes of a run have left in its ledger, as far as this one can use it."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.ledger.groups import read_group, read_scores, versions_of
from coordinator.record.state import RunState
from servicekit.errors import Internal
from servicekit.logs import get_logger
from tandem_clients.flow import Group, GroupScores, Prompt
from tandem_files.ledger.account import KEPT_VERSIONS
from tandem_files.ledger.reading import LedgerContent
from tandem_files.ledger.records import NoRecord, Record, groups_file, groups_files, read_records, wave_of_file

# An iteration that fails so often with the same groups gets others: one of them may be the reason.
MAX_REPEATS = 2

# An iteration's groups in their order, and their scores.
Scored = tuple[tuple[str, ...], GroupScores]

log = get_logger(__name__)


@dataclass(kw_only=True)
class _Kept:
    """What the file of a wave holds: finished groups by id, and scores by iteration."""

    groups: dict[str, Record] = field(default_factory=dict)
    scores: dict[int, Record] = field(default_factory=dict)
    damages: list[NoRecord] = field(default_factory=list)


class Past:
    """What earlier processes have left.

    Args:
        found: what they have written.
        rewards, max_staleness, waves_ahead, warn: as of Ledger.
    Attributes:
        first_wave: the first one with groups under way when this process began.
    """

    def __init__(
        self,
        run_dir: Path,
        found: LedgerContent,
        *,
        rewards: str,
        max_staleness: int,
        waves_ahead: int,
        warn: Callable[[str], None],
    ) -> None:
        self._run_dir, self._found, self._account = run_dir, found, found.account
        self._rewards, self._max_staleness, self._warn = rewards, max_staleness, warn
        self._waves_ahead = waves_ahead
        # The versions that policies had in an earlier process, with those that they have now.
        self._names: dict[int, int] = {}
        self._sent = ""
        self.first_wave = self._last_wave = self._resumed_after = self._version = 0
        # Groups that are used again, and scores by iteration.
        self._restored: set[str] = set()
        self._scores: dict[int, list[Record]] = {}

    def open(self, state: RunState, saved: int, step_id: str) -> None:
        """Note where this process begins; as Ledger.open."""
        iteration, version = state.iteration, state.policy_version
        self._sent, self._resumed_after, self._version = step_id, iteration, version
        self._names = dict.fromkeys(self._account.names_of(iteration, saved), version)
        if step_id:  # groups under way may have tokens of the policy after it
            self._names[saved + 1] = version + 1
        for number in range(iteration, iteration - KEPT_VERSIONS, -1):
            if (before := self._account.trained.get(number)) is not None:
                version -= 1
                for name in self._account.names_of(number - 1, before):
                    self._names.setdefault(name, version)
        self.first_wave, self._last_wave = state.wave, max(self._account.waves(), default=0)

    def sent_step(self, iteration: int) -> str:
        """Return the id of the train step that was sent in an iteration; "": none was, or its groups are lost."""
        step = self._found.steps.get(iteration)
        # A process that was to send it again, and was killed before, has taken it back.
        again = [resume["step"] for resume in self._found.resumes[-1:]]
        if step is None or step["step"] not in (self._account.position.step_id, *again):
            return ""
        files = [_read_groups(path) for path in groups_files(self._run_dir).values()]
        kept = {name for file in files for name in file.groups}
        for scores in [file.scores[iteration] for file in files if iteration in file.scores]:
            names = set(scores.fields.get("groups") or self._account.groups_of(iteration))
            if scores.fields["rewards"] == self._rewards and step["samples"].keys() <= names <= kept:
                return str(step["step"])
        return ""

    def sent(self, iteration: int) -> str:
        """Return the id of the step of an iteration that the trainer has done already; "": it has done none."""
        return self._sent if iteration == self._resumed_after + 1 else ""

    def size_of(self, wave: int, *, settled: bool = False) -> int:
        """Return how many prompts a wave took that has groups under way; 0: there is no such wave.

        Args:
            settled: and whose others are settled, or all of them.
        """
        if wave > self._last_wave:
            return 0
        is_asked = self._account.settled_groups(wave) if settled else self._account.open_groups(wave)
        return len(self._account.groups_of(wave)) if is_asked else 0

    def open_groups(self, wave: int) -> Mapping[str, bool]:
        """Return the groups of a wave that are under way, and whether each is finished."""
        return self._account.open_groups(wave) if wave <= self._last_wave else {}

    def settled_groups(self, wave: int) -> set[str]:
        """Return the groups of a wave that are trained or filtered."""
        return self._account.settled_groups(wave) if wave <= self._last_wave else set()

    def is_known(self, wave: int) -> bool:
        """Whether the policy with which a wave began is one of those that are known."""
        return self._account.orders.get(wave, ("", -1))[1] in self._names

    def is_young(self, name: int, wave: int) -> bool:
        """Whether a policy is known, and not too old when the turn of a wave comes."""
        waits = wave - self.first_wave
        return name in self._names and self._version - self._names[name] + waits <= self._max_staleness

    async def groups(self, wave: int, order: str, prompts: Mapping[str, Prompt]) -> Mapping[str, Group]:
        """Return the finished groups of a wave that were ordered as now, and keep scores in mind.

        Args:
            prompts: of groups that are not settled.
        """
        if wave > self.first_wave + self._waves_ahead:
            return {}
        kept = await asyncio.to_thread(_read_groups, groups_file(self._run_dir, wave))
        for damage in kept.damages[:1]:
            self._warn(f"ledger: {damage}: what it held is generated anew")
        groups = await asyncio.to_thread(self._read, wave, order, kept.groups, prompts)
        if groups and len(groups) == len(prompts) and self._found.repeats[wave] >= MAX_REPEATS and not self._sent:
            self._warn(f"iteration {wave} has failed with the same groups again: they are generated anew")
            return {}
        if groups:
            log.info("groups restored", wave=wave, groups=len(groups), of=len(prompts))
        self._restored.update(groups)
        for iteration, scores in kept.scores.items():
            fields = {**scores.fields, "groups": tuple(scores.fields.get("groups", prompts))}
            self._scores.setdefault(iteration, []).append(Record(kind="scores", fields=fields))
        return groups

    def _read(
        self, wave: int, order: str, records: Mapping[str, Record], prompts: Mapping[str, Prompt]
    ) -> dict[str, Group]:
        return {
            name: read_group(record, prompts[name], self._names)
            for name, record in records.items()
            if name in prompts
            and record.fields["order"] == order
            and all(self.is_young(one, wave) for one in versions_of(record))
        }

    def scores(self, iteration: int) -> Scored | None:
        """Return the scores of an iteration's groups, if all of them are restored; None: they are not.

        Raises: Internal: nor is what the trainer has done already.
        """
        sent = self._found.steps[iteration]["samples"] if self.sent(iteration) else ()
        for record in self._scores.get(iteration, ()):
            names = record.fields["groups"]
            is_same = record.fields["rewards"] == self._rewards and set(names).issuperset(sent)
            if is_same and self._restored.issuperset(names):
                return names, read_scores(record)
        if sent:
            raise Internal(f"the samples of step {self._sent}, which the trainer has done, are not restored")
        return None


def _read_groups(path: Path) -> _Kept:
    """Read a file of finished groups; nothing if there is none that can be read."""
    kept, wave = _Kept(), wave_of_file(path)
    try:
        for record in read_records(path):
            if isinstance(record, NoRecord):
                kept.damages.append(record)
            elif record.kind == "group":
                kept.groups[record.fields["group"]] = record
            elif record.kind == "scores":
                kept.scores[record.fields.get("iteration", wave)] = record
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("finished groups not read", error=str(error))
    return kept
