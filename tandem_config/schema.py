"""The schema of a run's configuration: one frozen model per section of the YAML file.

Every field states what it is, its unit and the reason for its default. This package imports pydantic and yaml only, so
that the coordinator can load a configuration without torch: see `loading.py`.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from tandem_config.sections.base import Section
from tandem_config.sections.data import DataSection
from tandem_config.sections.environment import EnvironmentSection
from tandem_config.sections.fleet import FleetSection
from tandem_config.sections.grpo import GrpoSection
from tandem_config.sections.profile import ProfileSection
from tandem_config.sections.reward import REWARD_KINDS, ExactMatchReward, Rewards
from tandem_config.sections.rewards.base import RewardSection
from tandem_config.sections.rollout import RolloutSection
from tandem_config.sections.run import (
    HELDOUT,
    EvaluationSection,
    EvaluationSet,
    ModelSection,
    RunSection,
    SamplesSection,
    ScheduleSection,
)
from tandem_config.sections.sync import SyncSection
from tandem_config.sections.trackers import TRACKER_KINDS, Trackers, TrackerSection
from tandem_config.sections.trainer import OffloadSection, TrainerSection

__all__ = [
    "LISTED",
    "RunConfig",
    "Section",
    "RunSection",
    "ModelSection",
    "DataSection",
    "RewardSection",
    "EnvironmentSection",
    "GrpoSection",
    "ScheduleSection",
    "OffloadSection",
    "TrainerSection",
    "RolloutSection",
    "SyncSection",
    "FleetSection",
    "HELDOUT",
    "EvaluationSection",
    "EvaluationSet",
    "SamplesSection",
    "ProfileSection",
]


# Defaults with schedule.kind: async, by section.
ASYNC_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "sync": {"install": "staged", "pause": "keep_kv", "straggler_timeout_s": 30.0},
    "evaluation": {"concurrent": True},
}


class RunConfig(Section):
    """The whole configuration file."""

    run: RunSection = Field(default_factory=RunSection)
    model: ModelSection
    data: DataSection
    reward: Rewards = Field(default_factory=lambda: (ExactMatchReward(),))
    environment: Annotated[EnvironmentSection | None, BeforeValidator(lambda given: given or None)] = None
    grpo: GrpoSection = Field(default_factory=GrpoSection)
    schedule: ScheduleSection = Field(default_factory=ScheduleSection)
    trainer: TrainerSection = Field(default_factory=TrainerSection)
    rollout: RolloutSection = Field(default_factory=RolloutSection)
    sync: SyncSection = Field(default_factory=SyncSection)
    fleet: FleetSection = Field(default_factory=FleetSection)
    evaluation: EvaluationSection = Field(default_factory=EvaluationSection)

    @model_validator(mode="before")
    @classmethod
    def _fill_for_async(cls, given: Any) -> Any:
        """Let nothing wait with schedule.kind: async, unless the sections say otherwise."""
        schedule = given.get("schedule") if isinstance(given, Mapping) else None
        if not isinstance(schedule, Mapping) or schedule.get("kind") != "async":
            return given
        sections = {name: given.get(name, {}) for name in ASYNC_DEFAULTS}
        filled = {name: {**ASYNC_DEFAULTS[name], **own} for name, own in sections.items() if isinstance(own, Mapping)}
        return {**given, **filled}

    def changed(self, section: str, **values: object) -> "RunConfig":
        """Return the configuration with other values of a section; they are not checked."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def evaluation_sets(self) -> tuple[EvaluationSet, ...]:
        """Return the sets to evaluate: data.heldout as one called heldout, then those of evaluation.sets."""
        sets = self.evaluation.sets
        return sets if self.data.heldout is None else (EvaluationSet(name=HELDOUT, data=self.data.heldout), *sets)

    samples: SamplesSection = Field(default_factory=SamplesSection)
    profile: ProfileSection = Field(default_factory=ProfileSection)
    trackers: Trackers = Field(default_factory=tuple)


# Sections that may be lists: name -> (the settings that every entry has, the models of its kinds).
LISTED: Mapping[str, tuple[type[Section], Mapping[str, type[Section]]]] = {
    "reward": (RewardSection, REWARD_KINDS),
    "trackers": (TrackerSection, TRACKER_KINDS),
}
