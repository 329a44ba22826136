"""Experiment trackers that get each iteration's figures: the list `trackers`, one entry per tracker."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints

from tandem_config.sections.base import Section, about
from tandem_config.sections.reward_base import wrong

# W&B's own bounds on names, groups and tags.
_Name = Annotated[str, StringConstraints(min_length=1, max_length=128)]
_Tag = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class TrackerSection(Section):
    """Where each iteration's figures go: a list of trackers, none by default (docs/monitoring.md).

    `trackers: [tensorboard, {kind: wandb, project: sums}]`; the name of a kind alone is an entry with its defaults.
    """


class TensorboardTracker(TrackerSection):
    """TensorBoard: event files in `<run>/tensorboard`; look at them with `tensorboard --logdir runs`."""

    kind: Literal["tensorboard"] = Field(
        ...,
        description="TensorBoard.",
        json_schema_extra=about("each entry says which tracker it is"),
    )


class WandbTracker(TrackerSection):
    """Weights & Biases, with the login that `wandb login` or `WANDB_API_KEY` gives."""

    kind: Literal["wandb"] = Field(
        ..., description="Weights & Biases.", json_schema_extra=about("each entry says which tracker it is")
    )
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

    kind: Literal["mlflow"] = Field(
        ..., description="MLflow.", json_schema_extra=about("each entry says which tracker it is")
    )
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


def _entry(value: Any) -> Any:
    """Check that an entry says its kind."""
    if isinstance(value, TrackerSection) or (isinstance(value, Mapping) and "kind" in value):
        return value
    raise wrong("says no kind of tracker", "write e.g. `trackers: [tensorboard, {kind: wandb, project: my-project}]`")


def _as_tuple(value: Any) -> tuple[Any, ...]:
    """Turn a single entry into a list; an empty entry is none."""
    entries = value if isinstance(value, list | tuple) else [value]
    return tuple(entry for entry in entries if entry not in ({}, None))


Trackers = Annotated[
    tuple[Annotated[Tracker, Discriminator("kind"), BeforeValidator(_entry)], ...], BeforeValidator(_as_tuple)
]
