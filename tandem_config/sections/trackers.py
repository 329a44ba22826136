"""Experiment trackers that get each iteration's figures: a list of them.

trackers: [tensorboard, {kind: wandb, project: sums}]
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, StringConstraints

from tandem_config.sections.base import Section, setting

# W&B's own bounds on names, groups and tags.
_Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_Tag = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class TrackerSection(Section):
    """Experiment trackers that get each iteration's figures (docs/monitoring.md).

    A list, empty by default: `trackers: [tensorboard, {kind: wandb, project: sums}]`, `--set 'trackers=[tensorboard]'`.
    """

    completions: int = setting(
        0, "prompts and completions leave the run's folder only if they may", "completions", ge=0, le=100
    )
    """Completions of each iteration, and of each of its evaluations, that are sent as a table with their prompts and
    rewards: the worst, the best and some between them; texts of at most 4,000 characters."""


class TensorboardTracker(TrackerSection):
    """TensorBoard: event files in the run's `tensorboard/`; look at them with `tensorboard --logdir runs`."""

    kind: Literal["tensorboard"] = setting(..., "chosen by name")
    """Kind of tracker."""


class WandbTracker(TrackerSection):
    """Weights & Biases, with the login that `wandb login` or `WANDB_API_KEY` gives."""

    kind: Literal["wandb"] = setting(..., "chosen by name")
    """Kind of tracker."""
    project: _Name = setting("tandem", "runs of several models side by side")
    """Project of the run."""
    entity: _Name | None = setting(None, "the login has one")
    """User or team; null: `WANDB_ENTITY`, else the login's own."""
    group: _Name | None = setting(None, "runs stand alone")
    """Group of runs that belong together."""
    tags: list[_Tag] = setting(factory=list, why="none fits all runs")
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = setting(None, "as W&B itself")
    """offline: keep the run on disk, to upload with `wandb sync`; null: `WANDB_MODE`, else online."""
    dir: Path | None = setting(None, "a run's files stay together")
    """Folder for W&B's files, which it keeps in `wandb/` there; null: the run's folder."""


class MlflowTracker(TrackerSection):
    """MLflow, with the login of MLflow's own variables (`MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_TOKEN`, ...)."""

    kind: Literal["mlflow"] = setting(..., "chosen by name")
    """Kind of tracker."""
    uri: str | None = setting(None, "the variable is MLflow's own way")
    """Tracking server, e.g. `http://mlflow:5000`; null: `MLFLOW_TRACKING_URI`."""
    experiment: _Name = setting("tandem", "as W&B's project")
    """Experiment of the run; made if missing."""


Tracker = TensorboardTracker | WandbTracker | MlflowTracker
TRACKER_KINDS: Mapping[str, type[TrackerSection]] = {
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the entries of a list; one may stand alone, and null is none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


Trackers = Annotated[tuple[Annotated[Tracker, Discriminator("kind")], ...], BeforeValidator(_as_tuple)]
