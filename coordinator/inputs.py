"""Reads a run's inputs from disk before any service is called: data, tokenizer, the state to resume from."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import yaml

from coordinator.checkpoints.loading import NewestCheckpoint, load_newest
from coordinator.data.cursor import DataCursor
from coordinator.data.prompts import PromptSet, load_prompts
from coordinator.data.repeated_prompts import OLD_ORDER, copy_warnings
from coordinator.data.scan import Scan
from coordinator.record.resuming import Renewal, begin_sets_anew, order_differences, order_of, set_facts
from coordinator.record.state import RunState
from coordinator.take_over import LastIteration
from servicekit.errors import ConfigError
from servicekit.logs import get_logger
from tandem_clients.flow import DataKey
from tandem_clients.formatting import EpisodeTools
from tandem_config.comparing.resuming import RunComparison, compare, mark_of, refuse
from tandem_config.schema import EvaluationSet, RunConfig
from tandem_files.checkpoints import UndamagedCheckpoint, list_complete
from tandem_files.ledger.reading import LedgerContent, read_ledger
from tandem_files.metrics_file import METRICS_FILE, MetricsFile
from tandem_files.model.fingerprint import model_fingerprint
from tandem_files.run_config import NEXT_CONFIG, RESOLVED_CONFIG
from tandem_files.run_folder import STATE_FILE, read_identity, run_id_of
from tandem_files.tokenizer import TextCodec

log = get_logger(__name__)


class RunData(NamedTuple):
    """What a run's folder does not change: data and tokenizer, and what figures of evaluation sets depend on."""

    codec: TextCodec
    train: PromptSet
    # By the names of RunConfig.evaluation_sets.
    evaluation: Mapping[str, PromptSet]
    fingerprint: str
    facts: dict[str, dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Data and state of a run; `cursor` and `rng` stand where `state` says.

    Attributes:
        resumed: whether the run was started with --resume, so may have begun earlier.
        checkpoint: the one that it resumes from; None: it starts from the beginning.
        last: the run after the iterations since that checkpoint; None: there were none that can be read.
        ledger: of the run so far.
        comparison: of the run with that checkpoint.
        renewal: what is not compared with that checkpoint's evaluations.
        unread: files of the checkpoint were not compared with their digests: it takes minutes, and may not be needed.
    """

    data: RunData
    cursor: DataCursor
    rng: np.random.Generator
    state: RunState
    resumed: bool
    checkpoint: UndamagedCheckpoint | None = None
    last: LastIteration | None = None
    ledger: LedgerContent = field(default_factory=LedgerContent)
    comparison: RunComparison | None = None
    renewal: Renewal = field(default_factory=Renewal)
    unread: bool = False

    @property
    def has_begun(self) -> bool:
        """Whether an earlier process has found the services of the run, and begun to work with them."""
        return bool(self.ledger.heads) or self.state.iteration > 0

    def dropped_prompts(self) -> dict[DataKey, dict[str, int]]:
        """Count the prompts that were dropped as too long, by part of the data and name of the source."""
        heldout = sum((Counter(prompts.dropped) for prompts in self.data.evaluation.values()), Counter[str]())
        return {"train": self.data.train.dropped, "heldout": dict(heldout)}

    def scans(self) -> list[Scan]:
        """Return what was found in all data."""
        return [scan for prompts in (self.data.train, *self.data.evaluation.values()) for scan in prompts.scans]


def read_inputs(
    config: RunConfig,
    run_dir: Path,
    *,
    resume: bool,
    episodes: EpisodeTools | None = None,
    data: RunData | None = None,
    deep: bool = True,
) -> Inputs:
    """Load data and tokenizer, unless `data` has them, and the newest checkpoint's state on a resume.

    Args:
        deep: see load_newest.
    Raises: ConfigError: names the file that cannot be used; a checkpoint of another model, run or configuration; a run
        folder in use.
    """
    is_new, data = data is None, data or _read_data(config, run_dir, episodes)
    _, train, evaluation, fingerprint, facts = data
    cursor = DataCursor(
        train, seed=config.run.seed, shuffle=config.data.shuffle, texts=[scan.texts for scan in train.scans]
    )
    rng = np.random.default_rng(config.run.seed)
    state = RunState(
        cursor=cursor.state(),
        batch_rng=dict(rng.bit_generator.state),
        model_fingerprint=fingerprint,
        order=order_of(config, train.scans, train.formats),
        sets=facts,
    )
    newest, last, renewal, ledger = None, None, Renewal(), _ledger_so_far(run_dir)
    if not resume:
        _refuse_used_folder(run_dir)
    else:
        fresh, before = state, _config_so_far(run_dir)
        newest = load_newest(run_dir, config, fingerprint, read_identity(run_dir), deep=deep)
        if newest is not None:
            state = _checked(newest, fresh)
            renewal = begin_sets_anew(state, config, facts, before)
        last = _last_iteration(run_dir, fresh, config, before)
        # Also if there is none since the checkpoint: the step after it may be done.
        if last is not None and last.state.iteration >= max(state.iteration, 1):
            last = replace(last, renewal=begin_sets_anew(last.state, config, facts, before))
        else:
            last = None
        _restore(cursor, rng, state)
    if is_new:
        _warn_of_copies(train, evaluation, cursor)
    return Inputs(
        data=data,
        cursor=cursor,
        rng=rng,
        state=state,
        resumed=resume,
        checkpoint=None if newest is None else newest.sound,
        last=last,
        ledger=ledger,
        comparison=None if newest is None else newest.comparison,
        renewal=renewal,
        unread=newest is not None and not deep,
    )


def _read_data(config: RunConfig, run_dir: Path, episodes: EpisodeTools | None) -> RunData:
    """Load tokenizer and data. Raises: as read_inputs."""
    try:
        codec = TextCodec.from_folders(config.model.path, config.model.tokenizer_path)
        train = load_prompts(config.data, "train", codec, run_dir, episodes)
        evaluation = {
            chosen.name: evaluation_prompts(config, chosen, codec, run_dir, episodes)
            for chosen in config.evaluation_sets()
        }
        fingerprint = model_fingerprint(config.model.path)
        return RunData(codec, train, evaluation, fingerprint, set_facts(config, evaluation))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from error


def evaluation_prompts(
    config: RunConfig, chosen: EvaluationSet, codec: TextCodec, scratch: Path, episodes: EpisodeTools | None = None
) -> PromptSet:
    """Load the prompts of a set: as data.heldout, from its own data. Raises: as load_prompts."""
    section = config.data.model_copy(update={"heldout": chosen.data})
    return load_prompts(section, "heldout", codec, scratch, episodes)


def _checked(newest: NewestCheckpoint, fresh: RunState) -> RunState:
    """Return the checkpoint's state. Raises: ConfigError: lists why a new run may not resume from it."""
    different = [] if fresh.order is None else order_differences(newest.state, fresh.order)
    refuse(newest.comparison, newest.sound.folder, different)
    return newest.state


def _last_iteration(
    run_dir: Path, fresh: RunState, config: RunConfig, before: RunConfig | None
) -> LastIteration | None:
    """Read the state after the last iteration; None: it is of other data, another model or a run that this is not."""
    try:
        state = RunState.load(run_dir / STATE_FILE)
    except (ConfigError, OSError) as error:  # the checkpoint suffices
        log.info("state of the last iteration not used", error=str(error))
        return None
    if before is None or fresh.order is None:
        return None
    settings = compare(mark_of(before, ""), config, None)
    if settings.refused or order_differences(state, fresh.order) or state.model_fingerprint != fresh.model_fingerprint:
        return None
    return LastIteration(state=state, may_repeat=not settings.changed)


def _ledger_so_far(run_dir: Path) -> LedgerContent:
    """Read the run's ledger. Raises: ConfigError: it cannot be read, or is another run's."""
    try:
        return read_ledger(run_dir, run_id_of(run_dir))
    except OSError as error:
        raise ConfigError(f"the run's ledger cannot be read: {error}") from error


def differences_from_run(config: RunConfig, run_dir: Path) -> list[str]:
    """List how a configuration differs from that which the run's folder has, the next one before the former one."""
    theirs = _config_so_far(run_dir, NEXT_CONFIG) or _config_so_far(run_dir)
    found = None if theirs is None else compare(mark_of(theirs, ""), config, None)
    return [] if found is None else [*found.refused, *found.changed]


def _config_so_far(run_dir: Path, name: str = RESOLVED_CONFIG) -> RunConfig | None:
    """Read with what configuration the run was trained so far; None: it cannot be read."""
    try:
        return RunConfig.model_validate(yaml.safe_load((run_dir / name).read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def _restore(cursor: DataCursor, rng: np.random.Generator, state: RunState) -> None:
    try:
        cursor.restore(state.cursor)
        rng.bit_generator.state = state.batch_rng
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"cannot resume: {error}") from error


def _warn_of_copies(train: PromptSet, evaluation: Mapping[str, PromptSet], cursor: DataCursor) -> None:
    parts = {"data.train": train.scans} | {f"set {name}": prompts.scans for name, prompts in evaluation.items()}
    for key, scans in parts.items():
        for warning, _ in copy_warnings(scans, parts["data.train"]):
            log.warning("data hold prompts more than once", part=key, found=warning)
    if cursor.keeps_old_order:
        log.warning("order of prompts: as before", reason=OLD_ORDER)


def _refuse_used_folder(run_dir: Path) -> None:
    if list_complete(run_dir) or MetricsFile(run_dir / METRICS_FILE).rows():
        raise ConfigError(f"{run_dir} already holds a run: continue it with --resume, or choose another run.name")
