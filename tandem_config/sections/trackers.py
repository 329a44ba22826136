"""Experiment trackers that get each iteration's figures: a list of them.

trackers: [tensorboard, {kind: wandb, project: sums}]
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints

from tandem_config.sections.base import Section, about

# W&B's own bounds on names, groups and tags.
_Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_Tag = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class TrackerSection(Section):
    """Experiment trackers that get each iteration's figures (docs/monitoring.md).

    A list, empty by default: `trackers: [tensorboard, {kind: wandb, project: sums}]`, `--set 'trackers=[tensorboard]'`.
    """

    completions: Annotated[int, Field(ge=0, le=100)] = Field(
        0,
        description="Completions of each iteration, and of each of its evaluations, that are sent as a table with "
        "their prompts and rewards: the worst, the best and some between them; texts of at most 4,000 characters.",
        json_schema_extra=about("prompts and completions leave the run's folder only if they may", unit="completions"),
    )


class TensorboardTracker(TrackerSection):
    """TensorBoard: event files in the run's `tensorboard/`; look at them with `tensorboard --logdir runs`."""

    kind: Literal["tensorboard"] = Field(..., description="Kind of tracker.", json_schema_extra=about("chosen by name"))


class WandbTracker(TrackerSection):
    """Weights & Biases, with the login that `wandb login` or `WANDB_API_KEY` gives."""

    kind: Literal["wandb"] = Field(..., description="Kind of tracker.", json_schema_extra=about("chosen by name"))
    project: _Name = Field(
        "tandem", description="Project of the run.", json_schema_extra=about("runs of several models side by side")
    )
    entity: _Name | None = Field(
        None,
        description="User or team; null: `WANDB_ENTITY`, else the login's own.",
        json_schema_extra=about("the login has one"),
    )
    group: _Name | None = Field(
        None, description="Group of runs that belong together.", json_schema_extra=about("runs stand alone")
    )
    tags: list[_Tag] = Field(
        default_factory=list, description="Tags of the run.", json_schema_extra=about("none fits all runs")
    )
    mode: Literal["online", "offline"] | None = Field(
        None,
        description="offline: keep the run on disk, to upload with `wandb sync`; null: `WANDB_MODE`, else online.",
        json_schema_extra=about("as W&B itself"),
    )
    dir: Path | None = Field(
        None,
        description="Folder for W&B's files, which it keeps in `wandb/` there; null: the run's folder.",
        json_schema_extra=about("a run's files stay together"),
    )


class MlflowTracker(TrackerSection):
    """MLflow, with the login of MLflow's own variables (`MLFLOW_TRACKING_USERNAME`, `MLFLOW_TRACKING_TOKEN`, ...)."""

    kind: Literal["mlflow"] = Field(..., description="Kind of tracker.", json_schema_extra=about("chosen by name"))
    uri: str | None = Field(
        None,
        description="Tracking server, e.g. `http://mlflow:5000`; null: `MLFLOW_TRACKING_URI`.",
        json_schema_extra=about("the variable is MLflow's own way"),
    )
    experiment: _Name = Field(
        "tandem", description="Experiment of the run; made if missing.", json_schema_extra=about("as W&B's project")
    )


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
