"""The schema of a run's configuration: one frozen model per section of the YAML file.

Every field states what it is, its unit and the reason for its default. This package imports pydantic and yaml only, so
that the coordinator can load a configuration without torch: see `loading.py`.
"""

from pydantic import Field

from tandem_config.sections.base import Section, about
from tandem_config.sections.data import DataSection
from tandem_config.sections.fleet import FleetSection
from tandem_config.sections.grpo import GrpoSection
from tandem_config.sections.reward import RewardSection
from tandem_config.sections.rollout import RolloutSection
from tandem_config.sections.run import ModelSection, RunSection
from tandem_config.sections.samples import SamplesSection
from tandem_config.sections.sync import SyncSection
from tandem_config.sections.trackers import Trackers
from tandem_config.sections.trainer import TrainerSection

__all__ = [
    "RunConfig",
    "Section",
    "RunSection",
    "ModelSection",
    "DataSection",
    "RewardSection",
    "GrpoSection",
    "TrainerSection",
    "RolloutSection",
    "SyncSection",
    "FleetSection",
    "SamplesSection",
]


class RunConfig(Section):
    """The whole configuration file."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection
    reward: RewardSection = Field(default_factory=RewardSection)
    grpo: GrpoSection = Field(default_factory=GrpoSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    sync: SyncSection = Field(default_factory=SyncSection)
    fleet: FleetSection = Field(default_factory=FleetSection)
    samples: SamplesSection = Field(default_factory=SamplesSection)
    trackers: Trackers = Field(
        default_factory=list,
        description="Experiment trackers that get each iteration's figures.",
        json_schema_extra=about("metrics.jsonl and the page need none"),
    )
