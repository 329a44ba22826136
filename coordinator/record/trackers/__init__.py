"""Sends each iteration's figures to experiment trackers, one adapter per tracker; their libraries are imported late."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from coordinator.record.trackers.base import Backend, Outcome, RunFacts, Tracker
from coordinator.record.trackers.completions import shown_of
from coordinator.record.trackers.mlflow import MlflowBackend
from coordinator.record.trackers.settings import public_settings
from coordinator.record.trackers.tensorboard import TensorboardBackend
from coordinator.record.trackers.wandb import WandbBackend
from tandem_config.schema import RunConfig
from tandem_config.sections.trackers import MlflowTracker, WandbTracker
from tandem_config.sections.trackers import Tracker as Entry
from tandem_files.tokenizer import TextCodec


def build_trackers(
    config: RunConfig, run_dir: Path, outcome: Callable[[], Outcome], codec: TextCodec | None = None
) -> list[Tracker]:
    """Make a sink per tracker of the configuration; none is connected, and no library of theirs imported.

    Args:
        outcome: returns how the run has ended, once it has.
        codec: decodes completions, for trackers that show them.
    """
    facts = RunFacts(name=config.run.name, run_dir=run_dir, settings=public_settings(config), outcome=outcome)
    found = []
    for entry in config.trackers:
        shows = None
        if codec is not None and entry.completions:
            shows = partial(shown_of, number=entry.completions, codec=codec)
        found.append(Tracker(_backend(entry, facts), facts, completions=shows))
    return found


def _backend(entry: Entry, facts: RunFacts) -> Backend:
    if isinstance(entry, WandbTracker):
        return WandbBackend(entry, facts)
    if isinstance(entry, MlflowTracker):
        return MlflowBackend(entry, facts)
    return TensorboardBackend(facts)
