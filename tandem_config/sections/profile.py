"""Which train steps are profiled, and what of them is recorded."""

from typing import Annotated

from pydantic import Field

from tandem_config.sections.base import ListOf, PositiveInt, Section, about


class ProfileSection(Section):
    """Profiles of train steps: a trace (torch.profiler) and a table of each, in the run's folder `profile/`."""

    steps: Annotated[int, Field(ge=0)] = Field(
        0,
        description="Consecutive train steps to profile, each by itself; 0: none. `tandem profile` shows them.",
        json_schema_extra=about(
            "a profiled step takes longer, and its trace some 20 megabytes (4 micro-batches of each part)", unit="steps"
        ),
    )
    first: PositiveInt = Field(
        2,
        description="The first of them, as the run counts its train steps, from 1.",
        json_schema_extra=about("the first step of a process allocates memory and loads kernels"),
    )
    every: PositiveInt | None = Field(
        None,
        description="Steps from the beginning of one series to that of the next; null: there is one series.",
        json_schema_extra=about("one series shows most", unit="steps"),
    )
    ranks: ListOf[Annotated[int, Field(ge=0)]] = Field(
        (0,),
        description="Trainer ranks to profile; []: all.",
        json_schema_extra=about("ranks do alike, but for pipeline stages and unequal shares"),
    )
    shapes: bool = Field(
        False,
        description="Record the shapes of operators' inputs.",
        json_schema_extra=about("makes traces larger and steps slower"),
    )
    stacks: bool = Field(
        False,
        description="Record the Python lines that call operators.",
        json_schema_extra=about("makes traces many times larger and steps slower"),
    )
    memory: bool = Field(
        False,
        description="Record each allocation.",
        json_schema_extra=about("makes traces larger; the peak is measured in every step anyway"),
    )

    def covers(self, step: int, rank: int) -> bool:
        """Whether a rank profiles a step, which is counted from 1.

        >>> [step for step in range(1, 10) if ProfileSection(steps=2, first=3, every=4).covers(step, 0)]
        [3, 4, 7, 8]
        """
        if step < self.first or (self.ranks and rank not in self.ranks):
            return False
        since = step - self.first
        return (since if self.every is None else since % self.every) < self.steps
